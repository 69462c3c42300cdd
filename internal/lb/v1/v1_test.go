package v1_test

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	extensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/randfill"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

func start(t *testing.T) *v1.Client {
	t.Helper()
	config := process.API(t)
	client, err := v1.NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	definitions, err := v1.Definitions()
	if err != nil {
		t.Fatal(err)
	}
	api := extensions.NewForConfigOrDie(config).ApiextensionsV1().CustomResourceDefinitions()
	for _, d := range definitions {
		if _, err := api.Create(t.Context(), d, metav1.CreateOptions{}); err != nil {
			t.Fatalf("%s: %v", d.Name, err)
		}
	}
	deadline := time.Now().Add(30 * time.Second)
	for _, list := range []func() error{
		func() error { _, err := client.Pools.List(context.Background(), metav1.ListOptions{}); return err },
		func() error { _, err := client.Peers.List(context.Background(), metav1.ListOptions{}); return err },
		func() error { _, err := client.Speakers.List(context.Background(), metav1.ListOptions{}); return err },
	} {
		for err := list(); err != nil; err = list() {
			if time.Now().After(deadline) {
				t.Fatal(err)
			}
			<-time.After(20 * time.Millisecond)
		}
	}
	return client
}

// What the schema rejects, and what it lets through.
func TestRulesOfDefinitions(t *testing.T) {
	client := start(t)
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	pool := func(change func(*v1.IPAddressPoolSpec)) error {
		p := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.IPAddressPoolSpec{Addresses: []string{"192.0.2.0/24"}}}
		change(&p.Spec)
		_, err := client.Pools.Create(t.Context(), p, dry)
		return err
	}
	addresses := func(list ...string) error { return pool(func(s *v1.IPAddressPoolSpec) { s.Addresses = list }) }
	route := func(first v1.PoolRoute, further ...v1.PoolRoute) error {
		return pool(func(s *v1.IPAddressPoolSpec) { s.BGP = &v1.PoolBGP{PoolRoute: first, Advertisements: further} })
	}
	peer := func(change func(*v1.BGPPeerSpec)) error {
		p := &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.BGPPeerSpec{Address: "192.0.2.1", LocalASN: 64512, PeerASN: 64513}}
		change(&p.Spec)
		_, err := client.Peers.Create(t.Context(), p, dry)
		return err
	}
	for _, c := range []struct {
		what, fails string
		err         error
	}{
		{"both families", "", addresses("192.0.2.0/24", "2001:db8::/64", "192.0.3.1-192.0.3.9", "2001:db8:1::1 - 2001:db8:1::f")},
		{"nothing", "Required value", addresses()},
		{"a word", "want a CIDR", addresses("office")},
		{"one address", "want a CIDR", addresses("192.0.2.1")},
		{"three addresses", "want a CIDR", addresses("192.0.2.1-192.0.2.2-192.0.2.3")},
		{"leading zeros", "want a CIDR", addresses("192.0.02.0/24")},
		{"mapped", "want a CIDR", addresses("::ffff:192.0.2.0/120")},
		{"mapped pair", "want a CIDR", addresses("::ffff:192.0.2.1-::ffff:192.0.2.9")},
		{"host bits", "bits set behind its prefix", addresses("192.0.2.7/24")},
		{"everything", "all addresses", addresses("0.0.0.0/0")},
		{"every IPv6", "all addresses", addresses("::/0")},
		{"mixed pair", "different families", addresses("192.0.2.1-2001:db8::1")},
		{"the same range again", "Duplicate value", addresses("192.0.2.0/24", "192.0.2.0/24")},
		{"too many", "must have at most 128 items", addresses(strings.Split(strings.Repeat("192.0.2.0/24,", 128)+"x", ",")...)},
		{"interface", "interfaces", pool(func(s *v1.IPAddressPoolSpec) { s.Interfaces = []string{"a/b"} })},
		{"namespace", "namespaces", pool(func(s *v1.IPAddressPoolSpec) { s.Namespaces = []string{"A_b"} })},
		{"operator", "Unsupported value", pool(func(s *v1.IPAddressPoolSpec) {
			s.ServiceSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}}
		})},
		{"communities", "", pool(func(s *v1.IPAddressPoolSpec) {
			s.BGP = &v1.PoolBGP{PoolRoute: v1.PoolRoute{
				Communities: []string{"65535:65535", "4294967295:1:2", "no-export"}, LocalPreference: new(int64(4294967295))}}
		})},
		{"community", "too high", route(v1.PoolRoute{Communities: []string{"65536:1"}})},
		{"local preference", "localPreference", route(v1.PoolRoute{LocalPreference: new(int64(-1))})},
		{"a long path", "asPathPrepend", route(v1.PoolRoute{ASPathPrepend: v1.MaxASPathPrepend + 1})},
		{"a path of a further route", "advertisements[0].asPathPrepend", route(v1.PoolRoute{}, v1.PoolRoute{ASPathPrepend: -1})},
		{"aggregation", "aggregationLengthV4", route(v1.PoolRoute{AggregationLengthV4: new(int32(33))})},
		{"a peer twice", "Duplicate value", route(v1.PoolRoute{Peers: []string{"a", "a"}})},
		{"a peer without a name", "peers[0]", route(v1.PoolRoute{Peers: []string{""}})},
		{"community of a further route", "too high", route(v1.PoolRoute{}, v1.PoolRoute{Communities: []string{"65536:1"}})},
		{"length of a further route", "advertisements[0].aggregationLengthV6",
			route(v1.PoolRoute{}, v1.PoolRoute{AggregationLengthV6: new(int32(0))})},
		{"many further routes", "must have at most 8 items", route(v1.PoolRoute{}, make([]v1.PoolRoute, 9)...)},
		{"a way", `supported values: "arp", "bgp"`, pool(func(s *v1.IPAddressPoolSpec) { s.Announce = []string{"ndp"} })},
		{"a selector of nodes", "Unsupported value", pool(func(s *v1.IPAddressPoolSpec) {
			s.NodeSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}}
		})},

		{"peer", "", peer(func(s *v1.BGPPeerSpec) {
			s.HoldTime, s.KeepaliveTime = &metav1.Duration{Duration: 3 * time.Second}, &metav1.Duration{Duration: time.Second}
			s.EBGPMultihop, s.SourceAddress = 2, "192.0.2.2"
		})},
		{"a router's name", "want an IP address", peer(func(s *v1.BGPPeerSpec) { s.Address = "router" })},
		{"no router", "address of one router", peer(func(s *v1.BGPPeerSpec) { s.Address = "::" })},
		{"AS 0", "peerASN", peer(func(s *v1.BGPPeerSpec) { s.PeerASN = 0 })},
		{"high AS", "localASN", peer(func(s *v1.BGPPeerSpec) { s.LocalASN = 1 << 32 })},
		{"port", "port", peer(func(s *v1.BGPPeerSpec) { s.Port = 70000 })},
		{"hold time", "want 3s to 65535s", peer(func(s *v1.BGPPeerSpec) { s.HoldTime = &metav1.Duration{Duration: time.Second} })},
		{"keepalive", "below holdTime", peer(func(s *v1.BGPPeerSpec) {
			s.HoldTime, s.KeepaliveTime = &metav1.Duration{Duration: 3 * time.Second}, &metav1.Duration{Duration: 3 * time.Second}
		})},
		{"multihop inside of an AS", "another AS", peer(func(s *v1.BGPPeerSpec) { s.PeerASN, s.EBGPMultihop = s.LocalASN, 5 })},
		{"families", "different families", peer(func(s *v1.BGPPeerSpec) { s.SourceAddress = "2001:db8::1" })},
		{"every address", "address of one router", peer(func(s *v1.BGPPeerSpec) { s.Address = "0.0.0.0" })},
		{"mapped router", "want an IP address", peer(func(s *v1.BGPPeerSpec) { s.Address = "::ffff:192.0.2.1" })},
		{"multicast", "address of one router", peer(func(s *v1.BGPPeerSpec) { s.Address = "224.0.0.5" })},
		{"wide multicast", "address of one router", peer(func(s *v1.BGPPeerSpec) { s.Address = "239.1.1.1" })},
		{"IPv6 multicast", "address of one router", peer(func(s *v1.BGPPeerSpec) { s.Address = "ff05::2" })},
		{"broadcast", "address of one router", peer(func(s *v1.BGPPeerSpec) { s.Address = "255.255.255.255" })},
		{"link-local router", "link-local", peer(func(s *v1.BGPPeerSpec) { s.Address = "fe80::1" })},
		{"router with a zone", "want an IP address", peer(func(s *v1.BGPPeerSpec) { s.Address = "fe80::1%eth0" })},
		{"router with a length", "want an IP address", peer(func(s *v1.BGPPeerSpec) { s.Address = "192.0.2.1/24" })},
		{"negative AS", "peerASN", peer(func(s *v1.BGPPeerSpec) { s.PeerASN = -1 })},
		{"negative port", "port", peer(func(s *v1.BGPPeerSpec) { s.Port = -1 })},
		{"long hold time", "want 3s to 65535s", peer(func(s *v1.BGPPeerSpec) { s.HoldTime = &metav1.Duration{Duration: 24 * time.Hour} })},
		{"no hold time", "want 3s to 65535s", peer(func(s *v1.BGPPeerSpec) { s.HoldTime = &metav1.Duration{} })},
		{"keepalive above the default hold time", "below holdTime", peer(func(s *v1.BGPPeerSpec) {
			s.KeepaliveTime = &metav1.Duration{Duration: 2 * time.Minute}
		})},
		{"restart time", "want 1s to 4095s", peer(func(s *v1.BGPPeerSpec) { s.RestartTime = &metav1.Duration{Duration: 2 * time.Hour} })},
		{"multihop", "ebgpMultihop", peer(func(s *v1.BGPPeerSpec) { s.EBGPMultihop = 256 })},
		{"source address", "want an IP address", peer(func(s *v1.BGPPeerSpec) { s.SourceAddress = "eth0" })},
		{"node selector", "Unsupported value", peer(func(s *v1.BGPPeerSpec) {
			s.NodeSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}}
		})},
		{"secret", "passwordSecretRef.name", peer(func(s *v1.BGPPeerSpec) { s.PasswordSecretRef = &v1.SecretReference{Name: "../x"} })},
	} {
		switch {
		case c.fails == "" && c.err != nil:
			t.Errorf("%s: %v", c.what, c.err)
		case c.fails != "" && (!apierrors.IsInvalid(c.err) || !strings.Contains(c.err.Error(), c.fails)):
			t.Errorf("%s: %v, want %q", c.what, c.err, c.fails)
		}
	}
}

// What is written comes back: the schemas lack no field of the types, for unknown
// fields are dropped.
func TestObjectsComeBackWhole(t *testing.T) {
	client := start(t)
	ctx := t.Context()
	p := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.IPAddressPoolSpec{
		Addresses: []string{"192.0.2.0/24"}, AvoidBuggyIPs: true, AutoAssign: new(false), Priority: 7, Internal: true,
		Namespaces: []string{"a"}, NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}},
		ServiceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "a", Operator: "In", Values: []string{"b"}}}},
		Interfaces: []string{"eth0"},
		Announce:   []string{"bgp"}, NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"c": "d"}},
		BGP: &v1.PoolBGP{
			PoolRoute: v1.PoolRoute{Peers: []string{"a"}, Communities: []string{"no-export"}, LocalPreference: new(int64(1)), ASPathPrepend: 3,
				AggregationLengthV4: new(int32(24)), AggregationLengthV6: new(int32(64))},
			Advertisements: []v1.PoolRoute{{Peers: []string{"b"}, Communities: []string{"1:2"}, LocalPreference: new(int64(2)),
				ASPathPrepend:       v1.MaxASPathPrepend,
				AggregationLengthV4: new(int32(25)), AggregationLengthV6: new(int32(65))}},
		},
	}}
	made, err := client.Pools.Create(ctx, p, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(made.Spec, p.Spec) {
		t.Errorf("%+v, want %+v", made.Spec, p.Spec)
	}
	now := metav1.NewTime(time.Unix(1700000000, 0))
	condition := []metav1.Condition{{Type: "Ready", Status: "True", ObservedGeneration: 3, LastTransitionTime: now, Reason: "R", Message: "m"}}
	made.Status = v1.IPAddressPoolStatus{Total: v1.MaxCount, Free: 2, Used: 3, IPv4: &v1.PoolUsage{Total: 1, Free: 2, Used: 3},
		IPv6: &v1.PoolUsage{Total: 4, Free: 5, Used: 6}, ObservedGeneration: 1, Conditions: condition}
	if got, err := client.Pools.UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil || !reflect.DeepEqual(got.Status, made.Status) {
		t.Errorf("%+v, want %+v: %v", got.Status, made.Status, err)
	}

	second := &metav1.Duration{Duration: 5 * time.Second}
	peer := &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.BGPPeerSpec{
		Address: "2001:db8::1", Port: 1179, LocalASN: 4200000000, PeerASN: 64512, PasswordSecretRef: &v1.SecretReference{Name: "s"},
		HoldTime: &metav1.Duration{Duration: time.Minute}, KeepaliveTime: second, GracefulRestart: true, RestartTime: second, EBGPMultihop: 5,
		NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}, SourceAddress: "2001:db8::2",
	}}
	if got, err := client.Peers.Create(ctx, peer, metav1.CreateOptions{}); err != nil || !reflect.DeepEqual(got.Spec, peer.Spec) {
		t.Errorf("%+v, want %+v: %v", got.Spec, peer.Spec, err)
	}

	speaker, err := client.Speakers.Create(ctx, &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	since := metav1.NewMicroTime(now.Add(time.Microsecond))
	speaker.Status = v1.SpeakerStatus{Eligible: true, Reason: "r", Endpoints: []string{"192.0.2.1:7472"}, Networks: []string{"192.0.2.0/24"},
		Interfaces: []string{"eth0"}, AnyNetwork: true,
		VoterVersion: 4, Addresses: []v1.AnnouncedAddress{{Address: "192.0.2.9", Via: "arp", Interface: "eth0", Since: since, Reason: "r"}},
		Peers:      []v1.PeerStatus{{Name: "p", Address: "192.0.2.1", State: "Idle", Since: since, Reason: "r", Prefixes: 3}},
		Conditions: condition}
	got, err := client.Speakers.UpdateStatus(ctx, speaker, metav1.UpdateOptions{})
	if err != nil || !reflect.DeepEqual(got.Status, speaker.Status) {
		t.Errorf("%+v, want %+v: %v", got.Status, speaker.Status, err)
	}
}

// A copy is equal and shares no memory that can be written.
func TestDeepCopy(t *testing.T) {
	f := randfill.NewWithSeed(1).NilChance(0).NumElements(1, 2)
	for range 20 {
		var pools v1.IPAddressPoolList
		var peers v1.BGPPeerList
		var speakers v1.SpeakerList
		f.Fill(&pools.Items)
		f.Fill(&peers.Items)
		f.Fill(&speakers.Items)
		for _, pair := range [][2]any{
			{&pools, pools.DeepCopyObject()}, {&peers, peers.DeepCopyObject()}, {&speakers, speakers.DeepCopyObject()},
		} {
			if !reflect.DeepEqual(pair[0], pair[1]) {
				t.Fatalf("a copy of %T differs:\n%+v\n%+v", pair[0], pair[0], pair[1])
			}
			shared(t, reflect.TypeOf(pair[0]).String(), reflect.ValueOf(pair[0]), reflect.ValueOf(pair[1]))
		}
	}
}

// shared fails the test where a and b, which are equal, point to the same memory.
func shared(t *testing.T, path string, a, b reflect.Value) {
	t.Helper()
	switch a.Kind() {
	case reflect.Pointer:
		if a.IsNil() || a.Type().String() == "*time.Location" {
			return
		}
		if a.Pointer() == b.Pointer() && a.Type().Elem().Size() > 0 {
			t.Errorf("%s is shared with the copy", path)
		}
		shared(t, path, a.Elem(), b.Elem())
	case reflect.Slice:
		if a.Len() > 0 && a.Pointer() == b.Pointer() {
			t.Errorf("%s is shared with the copy", path)
		}
		for i := range a.Len() {
			shared(t, path+"[]", a.Index(i), b.Index(i))
		}
	case reflect.Map:
		if a.Len() > 0 && a.Pointer() == b.Pointer() {
			t.Errorf("%s is shared with the copy", path)
		}
	case reflect.Struct:
		for i := range a.NumField() {
			shared(t, path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
		}
	}
}
