package metallb

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/testbed"
)

// base is a pool that is announced by ARP and by BGP, to one peer.
const base = `
{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: p, namespace: metallb-system}, spec: {addresses: [192.0.2.0/24]}}
---
{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: l, namespace: metallb-system}}
---
{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: b, namespace: metallb-system}, spec: {}}
---
{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: r, namespace: metallb-system},
 spec: {myASN: 64512, peerASN: 64513, peerAddress: 10.0.0.1}}
`

// A configuration becomes the objects and the notes beside it.
func TestConvert(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, ".out.yaml") {
			continue
		}
		in, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Convert(in)
		in.Close()
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		got, err := yaml.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		golden := strings.TrimSuffix(file, ".yaml") + ".out.yaml"
		if os.Getenv("UPDATE") != "" {
			if err := os.WriteFile(golden, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil || string(got) != string(want) {
			t.Errorf("%s: %v, got\n%s", file, err, got)
		}
	}
}

// How nodes announce follows from the advertisements.
func TestAnnounce(t *testing.T) {
	parts := strings.Split(base, "---")
	for _, c := range []struct{ text, want string }{
		{base, v1.AnnounceARP}, {parts[0] + "---" + parts[1], v1.AnnounceARP}, {parts[0] + "---" + parts[2] + "---" + parts[3], v1.AnnounceBGP},
	} {
		r, err := Convert(strings.NewReader(c.text))
		if err != nil || r.Announce != c.want || len(r.Pools) != 1 {
			t.Errorf("%+v, %v; want %s", r, err, c.want)
		}
	}
}

// Each pool keeps its ways and its nodes, which selectors of MetalLB list as alternatives.
func TestWaysOfPools(t *testing.T) {
	parts := strings.Split(base, "---")
	second := strings.NewReplacer("name: p", "name: q", "192.0.2", "198.51.100").Replace(parts[0])
	l2 := func(spec string) string { return strings.Replace(parts[1], "}}", "}, spec: {"+spec+"}}", 1) }
	bgp := func(spec string) string { return strings.Replace(parts[2], "spec: {}", "spec: {"+spec+"}", 1) }
	const a, alternatives = "nodeSelectors: [{matchLabels: {host: a}}]",
		"nodeSelectors: [{matchLabels: {host: b}}, {matchExpressions: [{key: host, operator: In, values: [c, a]}]}, {matchLabels: {host: a}}]"
	for _, c := range []struct {
		l2, bgp, all   string
		p, q           []string
		pNodes, qNodes string
	}{
		{l2("ipAddressPools: [p]"), bgp("ipAddressPools: [q]"), v1.AnnounceARP, []string{"arp"}, []string{"bgp"}, "", ""},
		{l2(""), bgp("ipAddressPools: [p]"), v1.AnnounceARP, []string{"arp", "bgp"}, []string{"arp"}, "", ""},
		{l2("ipAddressPools: [p], " + a), bgp("ipAddressPools: [q]"), v1.AnnounceARP, []string{"arp"}, []string{"bgp"}, "host=a", ""},
		{l2(a), bgp("ipAddressPools: [q], " + a), v1.AnnounceARP, []string{"arp"}, []string{"arp", "bgp"}, "host=a", "host=a"},
		{l2("ipAddressPools: [p]"), bgp("ipAddressPools: [q], " + alternatives), v1.AnnounceARP, []string{"arp"}, []string{"bgp"}, "",
			"host in (a,b,c)"},
		{l2(a), bgp("nodeSelectors: [{matchExpressions: [{key: host, operator: In, values: [a, a]}]}, {matchLabels: {host: a}}]"),
			v1.AnnounceARP, []string{"arp", "bgp"}, []string{"arp", "bgp"}, "host=a", "host=a"},
		{l2("nodeSelectors: [{matchLabels: {host: a}, matchExpressions: [" +
			"{key: z, operator: NotIn, values: [c, b]}, {key: r, operator: Exists}]}]"),
			bgp("nodeSelectors: [{matchExpressions: [{key: r, operator: Exists}, {key: host, operator: In, values: [a]}, " +
				"{key: z, operator: NotIn, values: [b, c]}]}]"),
			v1.AnnounceARP, []string{"arp", "bgp"}, []string{"arp", "bgp"}, "host=a,r,z notin (b,c)", "host=a,r,z notin (b,c)"},
		{"", bgp("nodeSelectors: [{}, {matchLabels: {host: a}}]"), v1.AnnounceBGP, []string{"bgp"}, []string{"bgp"}, "", ""},
	} {
		r, err := Convert(strings.NewReader(strings.Join([]string{parts[0], second, c.l2, c.bgp, parts[3]}, "\n---\n")))
		if err != nil {
			t.Errorf("%s %s: %v", c.l2, c.bgp, err)
			continue
		}
		p, q := r.Pools[0].Spec, r.Pools[1].Spec
		if r.Announce != c.all || !slices.Equal(p.Announce, c.p) || !slices.Equal(q.Announce, c.q) ||
			nodes(p) != c.pNodes || nodes(q) != c.qNodes {
			t.Errorf("%s %s: %s, p by %v from %q, q by %v from %q", c.l2, c.bgp, r.Announce, p.Announce, nodes(p), q.Announce, nodes(q))
		}
	}
}

func nodes(p v1.IPAddressPoolSpec) string {
	if p.NodeSelector == nil {
		return ""
	}
	return metav1.FormatLabelSelector(p.NodeSelector)
}

// What fairlead does not do, and what is wrong, is refused with the path of the field: nothing is left out in silence.
func TestRefusals(t *testing.T) {
	const ranges, l2, peer = "addresses: [192.0.2.0/24]", "name: l, namespace: metallb-system}", "peerAddress: 10.0.0.1"
	for _, c := range []struct{ old, replacement, want string }{
		{ranges, "addresses: []", "IPAddressPool/p: spec.addresses: it is empty"},
		{"192.0.2.0/24", "192.0.2.0/240", "IPAddressPool/p: spec.addresses[0]"},
		{ranges, ranges + ", autoAsign: false", `IPAddressPool/p: unknown field "spec.autoAsign"`},
		{ranges, ranges + ", serviceAllocation: {serviceSelectors: [{matchLabels: {a: b}}, {matchLabels: {c: b}}]}",
			"IPAddressPool/p: spec.serviceAllocation.serviceSelectors: it has 2"},
		{ranges, ranges + ", serviceAllocation: {namespaceSelectors: [{matchExpressions: [{key: a, operator: Is}]}]}",
			"IPAddressPool/p: spec.serviceAllocation.namespaceSelectors[0]"},
		{ranges, ranges + ", serviceAllocation: {priority: -1}", "IPAddressPool/p: spec.serviceAllocation.priority"},
		{l2, l2 + ", spec: {nodeSelectors: [{matchLabels: {a: b}}]}",
			"IPAddressPool/p: L2Advertisement/l and BGPAdvertisement/b announce it from different nodes"},
		{l2, l2 + ", spec: {nodeSelectors: [{matchExpressions: [{key: a, operator: NotIn, values: [b]}]}, {matchLabels: {a: b}}]}",
			"L2Advertisement/l: spec.nodeSelectors: it has 2"},
		{l2, l2 + ", spec: {nodeSelectors: [{matchLabels: {a: b}}, {matchLabels: {a: b, c: d}}]}",
			"L2Advertisement/l: spec.nodeSelectors: it has 2"},
		{l2, l2 + ", spec: {nodeSelectors: [{matchExpressions: [{key: a, operator: Is}]}]}", "L2Advertisement/l: spec.nodeSelectors[0]"},
		{l2, l2 + ", spec: {serviceSelectors: [{matchLabels: {a: b}}]}",
			"L2Advertisement/l: spec.serviceSelectors"},
		{l2, l2 + ", spec: {ipAddressPools: [other]}",
			"L2Advertisement/l: spec.ipAddressPools[0]"},
		{l2, l2 + ", spec: {ipAddressPoolSelectors: [{matchExpressions: [{key: a}]}]}",
			"L2Advertisement/l: spec.ipAddressPoolSelectors[0]"},
		{"spec: {}", "spec: {nodeSelectors: [{matchLabels: {a: b}}]}", "IPAddressPool/p: L2Advertisement/l and BGPAdvertisement/b"},
		{"spec: {}", "spec: {asPathPrepend: 11}", "BGPAdvertisement/b: spec.asPathPrepend: it is 11: want 0 to 10"},
		{"spec: {}", "spec: {peers: [x]}", `BGPAdvertisement/b: spec.peers[0]: there is no BGPPeer "x"`},
		{"spec: {}", "spec: {communities: [gold]}", "BGPAdvertisement/b: spec.communities[0]"},
		{"spec: {}", "spec: {communities: ['70000:1']}", "BGPAdvertisement/b: spec.communities[0]"},
		{"namespace: metallb-system}, spec: {}", "namespace: default}, spec: {}", "BGPAdvertisement/b: metadata.namespace"},
		{"name: l,", "name: p,", ""}, // of another kind
		{peer, "peerAddress: router", "BGPPeer/r: spec.peerAddress"},
		{peer, "interface: eth0", "BGPPeer/r: spec.interface"},
		{peer, peer + ", bfdProfile: fast", `BGPPeer/r: spec.bfdProfile: there is no BFDProfile "fast"`},
		{peer, peer + ", vrf: red", "BGPPeer/r: spec.vrf"},
		{peer, peer + ", disableMP: true", "BGPPeer/r: spec.disableMP"},
		{peer, peer + ", localASN: 7", "BGPPeer/r: spec.localASN"},
		{peer, peer + ", sourceAddress: 'fd00::1'", "BGPPeer/r: spec: "},
		{peer, peer + ", sourceAddress: x", "BGPPeer/r: spec.sourceAddress"},
		{peer, peer + ", holdTime: 0s", "BGPPeer/r: spec.holdTime"},
		{peer, peer + ", holdTime: 3s, keepaliveTime: 3s", "BGPPeer/r: spec: keepalive time"},
		{peer, peer + ", holdTime: 90", "BGPPeer/r: json: "},
		{peer, peer + ", password: a, passwordSecret: {name: b}", "BGPPeer/r: spec.password"},
		{peer, peer + ", nodeSelectors: [{matchLabels: {a: b}}, {matchLabels: {c: b}}]", "BGPPeer/r: spec.nodeSelectors"},
		{"peerASN: 64513", "dynamicASN: external", "BGPPeer/r: spec.dynamicASN"},
		{"peerASN: 64513", "peerASN: 64513, dynamicASN: internal", "BGPPeer/r: spec.dynamicASN: it excludes"},
		{"peerASN: 64513, ", "", "BGPPeer/r: spec: the peer's AS number is missing"},
		{"kind: L2Advertisement", "kind: AddressPool", "AddressPool: MetalLB v0.16 has no such configuration"},
		{"metallb.io/v1beta1, kind: L2", "metallb.io/v1, kind: L2", "want v1beta1"},
		{"metallb.io/v1beta1, kind: L2", "v1, kind: L2", "want objects of metallb.io"},
		{"name: l,", "", "L2Advertisement: metadata.name is missing"},
	} {
		text := strings.Replace(base, c.old, c.replacement, 1)
		if text == base {
			t.Fatalf("%q is not in the text", c.old)
		}
		r, err := Convert(strings.NewReader(text))
		if c.want == "" && err == nil {
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || r != nil {
			t.Errorf("%s: %v; want %s", c.replacement, err, c.want)
		}
	}
}

// What a BFDProfile asks for and fairlead does not do is a note, and an interval that it does not keep is refused.
func TestBFDProfiles(t *testing.T) {
	const peer = "peerAddress: 10.0.0.1"
	for _, c := range []struct{ profile, note, refusal string }{
		{"echoMode: true", "BFDProfile/f: spec.echoMode: it has no effect", ""},
		{"passiveMode: true", "BFDProfile/f: spec.passiveMode: it has no effect", ""},
		{"minimumTtl: 250", "BFDProfile/f: spec.minimumTtl: it has no effect", ""},
		{"echoMode: false, passiveMode: false, receiveInterval: 10, transmitInterval: 60000", "", ""},
		{"receiveInterval: 9", "", "BFDProfile/f: spec.receiveInterval: it is 9ms: want 10ms to 1m0s"},
		{"transmitInterval: 60001", "", "BFDProfile/f: spec.transmitInterval: it is 1m0.001s: want"},
	} {
		r, err := Convert(strings.NewReader(strings.Replace(base, peer, peer+", bfdProfile: f", 1) +
			"---\n{apiVersion: metallb.io/v1beta1, kind: BFDProfile, metadata: {name: f, namespace: metallb-system}, spec: {" + c.profile + "}}\n"))
		if c.refusal != "" {
			if err == nil || !strings.Contains(err.Error(), c.refusal) {
				t.Errorf("%s: %v; want %s", c.profile, err, c.refusal)
			}
			continue
		}
		if err != nil || r.Peers[0].Spec.BFD == nil {
			t.Errorf("%s: %+v, %v", c.profile, r, err)
			continue
		}
		if notes := strings.Join(r.Notes, "\n"); !strings.Contains(notes, c.note) || strings.Contains(notes, "BFDProfile") != (c.note != "") {
			t.Errorf("%s: %s; want %s", c.profile, notes, c.note)
		}
	}
}

// further are n advertisements of all pools, each with another length.
func further(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "---\n{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: f%d, namespace: metallb-system}, "+
			"spec: {aggregationLength: %d}}\n", i, 20+i)
	}
	return b.String()
}

// Pools that would be announced to more than before are refused as a whole.
func TestRefusalsOfWays(t *testing.T) {
	parts := strings.Split(base, "---")
	again := strings.Replace(parts[2], "name: b", "name: c", 1)
	for _, c := range []struct{ text, want string }{
		{parts[0], "IPAddressPool/p: no advertisement selects it"},
		{parts[0] + "---" + parts[1] + "---" + parts[3], "BGPPeer/r: no pool is announced by BGP"},
		{base + "---" + parts[0], "IPAddressPool/p: metadata.name: the text has two objects"},
		{base + "---" + strings.Replace(again, "spec: {}", "spec: {localPref: 7}", 1),
			"BGPAdvertisement/c: spec: another BGPAdvertisement announces pool p"},
		{base + "---" + strings.Replace(again, "spec: {}", "spec: {asPathPrepend: 1, peers: [r]}", 1), "BGPAdvertisement/c: spec: another"},
		{base + further(9), "IPAddressPool/p: its BGPAdvertisements are 10 different routes"},
		{"", "no object"},
		{"[]", "not an object"},
		{strings.Repeat("#", MaxText+2), "more than 16 MiB"},
	} {
		if _, err := Convert(strings.NewReader(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.80s: %v; want %s", c.text, err, c.want)
		}
	}
}

// Every field of MetalLB's definitions is known here, so that its next release cannot bring one that is passed over.
func TestFieldsAreKnown(t *testing.T) {
	dir := testbed.ModuleDir(t, filepath.Join("..", "..", "..", "test", "clouds"), "go.universe.tf/metallb")
	for name, spec := range map[string]any{
		"ipaddresspools": poolSpec{}, "l2advertisements": l2Spec{}, "bgpadvertisements": bgpSpec{}, "bgppeers": peerSpec{},
		"bfdprofiles": profileSpec{}, "communities": communitySpec{},
	} {
		text, err := os.ReadFile(filepath.Join(dir, "config", "crd", "bases", "metallb.io_"+name+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatal(err)
		}
		known := map[string]bool{}
		fields(reflect.TypeOf(spec), "", known)
		checked := 0
		for _, v := range crd.Spec.Versions {
			var paths []string
			schema := v.Schema.OpenAPIV3Schema.Properties["spec"]
			properties(&schema, "", &paths)
			for _, p := range paths {
				checked++
				if !known[p] {
					t.Errorf("%s %s: spec%s is not known", name, v.Name, p)
				}
			}
		}
		if checked == 0 {
			t.Errorf("%s has no fields", name)
		}
	}
}

// fields adds the paths of a type's fields.
func fields(of reflect.Type, at string, to map[string]bool) {
	for slices.Contains([]reflect.Kind{reflect.Pointer, reflect.Slice}, of.Kind()) {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || of.PkgPath() == "" || strings.HasSuffix(of.String(), "Duration") {
		return
	}
	for i := range of.NumField() {
		f := of.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		path := at
		if name != "" {
			path = at + "." + name
			to[path] = true
		}
		fields(f.Type, path, to)
	}
}

// properties appends the paths of a schema's properties.
func properties(s *apiextensionsv1.JSONSchemaProps, at string, to *[]string) {
	if s.Items != nil && s.Items.Schema != nil {
		properties(s.Items.Schema, at, to)
	}
	for name, p := range s.Properties {
		*to = append(*to, at+"."+name)
		properties(&p, at+"."+name, to)
	}
}
