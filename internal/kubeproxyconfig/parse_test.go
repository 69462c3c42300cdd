package kubeproxyconfig

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	"k8s.io/kube-proxy/config/v1alpha1"
)

const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

func parse(t *testing.T, text string) (*File, error) {
	t.Helper()
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	if !Is(doc.Content[0]) {
		t.Fatalf("not recognised: %s", text)
	}
	return Parse([]byte(text), doc.Content[0])
}

// Every field of the type, by reflection, is among fields, so that a new release cannot add one unseen.
func TestEveryFieldIsKnown(t *testing.T) {
	known := map[string]*field{}
	for i := range fields {
		known[fields[i].path] = &fields[i]
	}
	seen := 0
	var walk func(path string, typ reflect.Type)
	walk = func(path string, typ reflect.Type) {
		if fd := known[path]; fd != nil {
			seen++
			if pointer := typ.Kind() == reflect.Pointer; pointer != fd.pointer {
				t.Errorf("%s: pointer is %v, want %v", path, fd.pointer, pointer)
			}
			if (fd.flag == "") != (fd.note != "") {
				t.Errorf("%s: want a flag or a note", path)
			}
			return
		}
		if typ.Kind() != reflect.Struct {
			t.Errorf("%s is not in the table", path)
			return
		}
		for i := range typ.NumField() {
			f := typ.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			switch {
			case f.Name == "TypeMeta":
			case f.Anonymous && name == "":
				walk(path, f.Type)
			default:
				walk(strings.TrimPrefix(path+"."+name, "."), f.Type)
			}
		}
	}
	walk("", reflect.TypeFor[v1alpha1.KubeProxyConfiguration]())
	if seen != len(fields) {
		t.Errorf("%d of the %d fields of the table exist", seen, len(fields))
	}
}

// What kubeadm v1.37 writes into its ConfigMap.
const kubeadm = head + `bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
`

func TestParse(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"kubeadm", kubeadm, "clientConnection.kubeconfig: kubeconfig /var/lib/kube-proxy/kubeconfig.conf|bindAddress: bind-address 0.0.0.0|" +
			"clusterCIDR: cluster-cidr 10.244.0.0/16"},
		{"zeros that count",
			head + "conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s}\noomScoreAdj: 0\niptables: {localhostNodePorts: false}",
			"iptables.localhostNodePorts: iptables-localhost-nodeports false|oomScoreAdj: oom-score-adj 0|" +
				"conntrack.maxPerCore: conntrack-max-per-core 0|conntrack.tcpEstablishedTimeout: conntrack-tcp-timeout-established 0s"},
		{"lists and mappings", head + "nodePortAddresses: [primary, localhost]\nfeatureGates: {B: true, A: false}\n" +
			"logging: {vmodule: [{filePattern: a*, verbosity: 3}], verbosity: 5}",
			"featureGates: feature-gates A=false,B=true|logging.verbosity: v 5|logging.vmodule: vmodule a*=3|" +
				"nodePortAddresses: nodeport-addresses primary localhost"},
		{"of the mode", head + "mode: nftables\niptables: {syncPeriod: 9s, masqueradeAll: true}\nnftables: {syncPeriod: 7s, minSyncPeriod: 1s}",
			"mode: proxy-mode nftables|nftables.syncPeriod: iptables-sync-period 7s|nftables.minSyncPeriod: iptables-min-sync-period 1s"},
		{"words of YAML 1.1", head + "mode: ipvs\nipvs: {strictARP: yes}", "mode: proxy-mode ipvs|ipvs.strictARP: ipvs-strict-arp true"},
		{"a note", head + "portRange: 1-2\nmode: nftables\nnftables: {masqueradeBit: 3}",
			"mode: proxy-mode nftables|nftables.masqueradeBit: iptables-masquerade-bit 3|note portRange has no effect: " + notePortRange},
		{"unknown and repeated fields", head + "hostnameOverride: a\nhostnameOverride: b\niptabels: {}\n",
			`hostnameOverride: hostname-override b|lenient yaml: unmarshal errors:` + "\n" +
				`  line 4: key "hostnameOverride" already set in map|lenient unknown field "iptabels"`},
	} {
		f, err := parse(t, c.text)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var got []string
		for _, s := range f.Settings {
			got = append(got, fmt.Sprintf("%s: %s %s", s.Path, s.Flag, strings.Join(s.Values, " ")))
		}
		for _, n := range f.Notes {
			got = append(got, "note "+n)
		}
		for _, n := range f.Lenient {
			got = append(got, "lenient "+n)
		}
		if strings.Join(got, "|") != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.name, strings.Join(got, "|"), c.want)
		}
	}
}

// What kube-proxy refuses is refused with line and field.
func TestParseRefuses(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"apiVersion: kubeproxy.config.k8s.io/v1\nkind: KubeProxyConfiguration", "line 1: want apiVersion kubeproxy.config.k8s.io/v1alpha1"},
		{"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeletConfiguration", "want apiVersion"},
		{head + "mode: kernelspace", `line 3: mode: "kernelspace": want iptables, ipvs or nftables`},
		{head + "\nconntrack:\n  min: -1", `line 5: conntrack.min: "-1": want a number from 0`},
		{head + "conntrack: {min: many}", "cannot unmarshal string"},
		{head + "oomScoreAdj: 1001", "from -1000 to 1000"},
		{head + "iptables: {masqueradeBit: 32}", "iptables.masqueradeBit"},
		{head + "iptables: {syncPeriod: -1s}", "more than 0"},
		{head + "configSyncPeriod: -1s", "configSyncPeriod"},
		{head + "bindAddress: host", "want an IP address"},
		{head + "healthzBindAddress: 0.0.0.0:0", "want IP:PORT"},
		{head + "clusterCIDR: 10.0.0.0/8,10.1.0.0/16", "at most one range of each family"},
		{head + "nodePortAddresses: [all, here]", `"here": want primary, localhost, all`},
		{head + "detectLocalMode: Magic", "want ClusterCIDR, NodeCIDR"},
		{head + "detectLocalMode: BridgeInterface", "line 3: detectLocalMode: BridgeInterface needs detectLocal.bridgeInterface"},
		{head + "showHiddenMetricsForVersion: '1.30'", "want 1.36"},
		{head + "logging: {format: xml}", "logging.format"},
		{head + "mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0]}", "ipvs.excludeCIDRs"},
	} {
		if _, err := parse(t, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got %v, want %q", c.text, err, c.want)
		}
	}
}

// What flags say and what the file made of it says are the same.
func TestOfIsTheReverse(t *testing.T) {
	f, err := parse(t, head+"mode: nftables\nnftables: {masqueradeAll: true, syncPeriod: 7s}\nnodePortAddresses: [primary, 10.0.0.0/8]\n"+
		"featureGates: {A: true}\noomScoreAdj: -5\nclientConnection: {qps: 2.5, kubeconfig: /x}\n"+
		"logging: {vmodule: [{filePattern: a, verbosity: 1}]}\n"+
		"showHiddenMetricsForVersion: '1.36'\nconntrack: {tcpEstablishedTimeout: 5s}\niptables: {localhostNodePorts: false}\n")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := Of(func(flag string) []string {
		for _, s := range f.Settings {
			if s.Flag == flag {
				return s.Values
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	text, err := Text(cfg)
	if err != nil {
		t.Fatal(err)
	}
	again, err := parse(t, string(text))
	if err != nil {
		t.Fatal(err)
	}
	for i := range f.Settings {
		f.Settings[i].Line, again.Settings[i].Line = 0, 0
	}
	if !slices.EqualFunc(f.Settings, again.Settings, func(a, b Setting) bool { return reflect.DeepEqual(a, b) }) {
		t.Errorf("first %v\nthen %v", f.Settings, again.Settings)
	}
}
