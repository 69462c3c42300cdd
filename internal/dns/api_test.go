package dns

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/svc"
)

// Names follow the API: behaviour 78.
func TestNamesFollowTheAPI(t *testing.T) {
	ctx := context.Background()
	var init []runtime.Object
	for _, o := range objects(t) {
		init = append(init, o.(runtime.Object))
	}
	client := fake.NewClientset(init...)
	o := clusterOptions()
	o.Client = client
	s := start(t, o)
	eventually(t, "ready", s.Ready)
	resolves := func(name, want string) func() bool {
		return func() bool { return firstA(exchange(t, s, "udp", question(name, mdns.TypeA))) == want }
	}
	if !resolves("my-service.prod.svc.cluster.local.", "10.96.0.20")() {
		t.Error("a Service from the first list is missing")
	}
	if !s.follow.Up() {
		t.Error("the API is said to be away")
	}

	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "new", Name: "web"}, Spec: corev1.ServiceSpec{ClusterIP: "None"}}
	if _, err := client.CoreV1().Services("new").Create(ctx, web, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "new", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.7.7"}}},
	}
	slices := client.DiscoveryV1().EndpointSlices("new")
	if _, err := slices.Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new Service is answered", resolves("web.new.svc.cluster.local.", "10.244.7.7"))
	slice.Endpoints[0].Addresses[0] = "10.244.7.8"
	if _, err := slices.Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the endpoint has moved", resolves("web.new.svc.cluster.local.", "10.244.7.8"))
	if err := client.CoreV1().Services("new").Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deleted Service is gone", resolves("web.new.svc.cluster.local.", "NXDOMAIN"))
}

// Before the first lists are complete the cluster's names are SERVFAIL, which
// sends clients to another server; NXDOMAIN would be a lie.
func TestNotReadyBeforeTheFirstLists(t *testing.T) {
	client := fake.NewClientset()
	var broken atomic.Bool
	broken.Store(true)
	client.PrependReactor("list", "endpointslices", func(ktesting.Action) (bool, runtime.Object, error) {
		if broken.Load() {
			return true, nil, errors.New("the API is away")
		}
		return false, nil, nil
	})
	o := clusterOptions()
	o.Client, o.Upstream = client, upstreams(startUpstream(t, answerWith("@ 60 IN A 192.0.2.1")))
	s := start(t, o)
	eventually(t, "the API is noticed to be away", func() bool { return !s.follow.Up() && s.serving.Load() })
	for _, name := range []string{"web.prod.svc.cluster.local.", "cluster.local.", "1.0.96.10.in-addr.arpa."} {
		if r := exchange(t, s, "udp", question(name, mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure || len(r.Ns) != 0 {
			t.Errorf("%s: answered %v", name, r)
		}
	}
	if got := firstA(exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))); got != "192.0.2.1" {
		t.Errorf("another name: answered %s", got)
	}
	if s.Ready() || scrape(t, s, "/ready") == "OK" || scrape(t, s, "/health") != "OK" {
		t.Error("ready without the slices, or not alive")
	}
	broken.Store(false)
	eventually(t, "ready", s.Ready)
	if r := exchange(t, s, "udp", question("web.prod.svc.cluster.local.", mdns.TypeA)); r.Rcode != mdns.RcodeNameError {
		t.Errorf("answered %v", r)
	}
}

// When the API goes away the names stay, the server stays ready, and the metrics
// tell. What has changed meanwhile is answered once it is back.
func TestNamesOutliveTheAPI(t *testing.T) {
	ctx := context.Background()
	var init []runtime.Object
	for _, o := range objects(t) {
		init = append(init, o.(runtime.Object))
	}
	client := fake.NewClientset(init...)
	var away atomic.Bool
	errAway := errors.New("the API is away")
	client.PrependReactor("list", "*", func(ktesting.Action) (bool, runtime.Object, error) {
		return away.Load(), nil, errAway
	})
	var mu sync.Mutex
	var watches []watch.Interface
	client.PrependWatchReactor("*", func(a ktesting.Action) (bool, watch.Interface, error) {
		if away.Load() {
			return true, nil, errAway
		}
		w, err := client.Tracker().Watch(a.GetResource(), a.GetNamespace())
		mu.Lock()
		defer mu.Unlock()
		watches = append(watches, w)
		return true, w, err
	})
	o := clusterOptions()
	o.Client = client
	s := start(t, o)
	eventually(t, "ready, and watching", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return s.Ready() && len(watches) == 3
	})
	if text := scrape(t, s, "/metrics"); !strings.Contains(text, "\nfairlead_dns_api_up 1\n") {
		t.Errorf("the API is there:\n%s", text)
	}

	away.Store(true)
	mu.Lock()
	for _, w := range watches {
		w.Stop()
	}
	mu.Unlock()
	eventually(t, "the metric says that the API is away", func() bool {
		return strings.Contains(scrape(t, s, "/metrics"), "\nfairlead_dns_api_up 0\n")
	})
	if err := client.CoreV1().Services("prod").Delete(ctx, "six", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"my-service.prod.svc.cluster.local.": "10.96.0.20", "db-0.db.prod.svc.cluster.local.": "10.244.1.10",
		"missing.prod.svc.cluster.local.": "NXDOMAIN",
	} {
		if got := firstA(exchange(t, s, "udp", question(name, mdns.TypeA))); got != want {
			t.Errorf("%s is %s, not %s", name, got, want)
		}
	}
	if r := exchange(t, s, "udp", question("six.prod.svc.cluster.local.", mdns.TypeAAAA)); len(r.Answer) != 1 {
		t.Errorf("a name whose deletion was not seen is gone: %v", r)
	}
	if text := scrape(t, s, "/metrics"); !strings.Contains(text, "\nfairlead_dns_ready 1\n") || scrape(t, s, "/ready") != "OK" {
		t.Errorf("not ready any more:\n%s", text)
	}

	away.Store(false)
	eventually(t, "the API is back", func() bool { return strings.Contains(scrape(t, s, "/metrics"), "\nfairlead_dns_api_up 1\n") })
	eventually(t, "the deleted Service is gone", func() bool {
		return exchange(t, s, "udp", question("six.prod.svc.cluster.local.", mdns.TypeAAAA)).Rcode == mdns.RcodeNameError
	})
}

func TestPublish(t *testing.T) {
	ctx := context.Background()
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a", UID: "u-1"}})
	slices := client.DiscoveryV1().EndpointSlices("kube-system")
	get := func(name string) *discoveryv1.EndpointSlice {
		e, err := slices.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil
		}
		return e
	}
	o := clusterOptions()
	o.Listen = []string{"127.0.0.1:0"}
	o.Client = client
	o.Publish = &membership.Self{NodeName: "node-a", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")},
		Port: 53}
	o.Lameduck = time.Minute // shorter without another server
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.Run(run) }()
	eventually(t, "both slices are there", func() bool { return get("kube-dns-node-a") != nil && get("kube-dns-node-a-ipv6") != nil })

	e := get("kube-dns-node-a")
	ep := e.Endpoints[0]
	if e.AddressType != discoveryv1.AddressTypeIPv4 || len(e.Endpoints) != 1 || ep.Addresses[0] != "10.0.0.5" || *ep.NodeName != "node-a" ||
		!*ep.Conditions.Ready || *e.Ports[0].Name != "dns" || *e.Ports[0].Protocol != "UDP" || *e.Ports[1].Name != "dns-tcp" ||
		*e.Ports[1].Protocol != "TCP" || *e.Ports[1].Port != 53 || e.OwnerReferences[0].UID != "u-1" {
		t.Errorf("wrong slice:\n%+v", e)
	}
	for k, v := range map[string]string{discoveryv1.LabelServiceName: "kube-dns", discoveryv1.LabelManagedBy: svc.DNSSliceManager,
		svc.NodeLabel: "node-a"} {
		if e.Labels[k] != v {
			t.Errorf("label %s is %q", k, e.Labels[k])
		}
	}
	// Other clients change and delete it.
	e.Endpoints = nil
	if _, err := slices.Update(ctx, e, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the change is taken back", func() bool { e := get("kube-dns-node-a"); return e != nil && len(e.Endpoints) == 1 })
	if err := slices.Delete(ctx, "kube-dns-node-a-ipv6", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deletion is taken back", func() bool { return get("kube-dns-node-a-ipv6") != nil })

	stop()
	eventually(t, "the slices are withdrawn", func() bool { return get("kube-dns-node-a") == nil && get("kube-dns-node-a-ipv6") == nil })
	// It still answers for those who were sent here before.
	if r := exchange(t, s, "udp", question("cluster.local.", mdns.TypeSOA)); len(r.Answer) != 1 {
		t.Errorf("answered %v", r)
	}
	if err := ended(done); err != nil {
		t.Error(err)
	}
}

// A server that was listed before its Node was registered belongs to the Node
// once that is there, so that it goes with it.
func TestPublishBeforeTheNode(t *testing.T) {
	client := fake.NewClientset()
	slices := client.DiscoveryV1().EndpointSlices("kube-system")
	o := clusterOptions()
	o.Client = client
	o.Publish = &membership.Self{NodeName: "node-a", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.5")}, Port: 53}
	start(t, o)
	owners := func() int {
		e, err := slices.Get(t.Context(), "kube-dns-node-a", metav1.GetOptions{})
		if err != nil {
			return -1
		}
		return len(e.OwnerReferences)
	}
	eventually(t, "the slice is there", func() bool { return owners() == 0 })
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a", UID: "u-1"}}
	if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the slice has an owner", func() bool { return owners() == 1 })
}

func TestOptionsRefused(t *testing.T) {
	local := &NodeLocal{Addresses: []netip.Addr{netip.MustParseAddr("10.96.0.10")}}
	for _, beside := range []string{"10.0.0.5:53", ":10053", "[::]:53"} {
		if _, err := New(Options{Listen: []string{beside}, NodeLocal: local}); err != nil {
			t.Errorf("%s beside the node-local address: %v", beside, err)
		}
	}
	for want, o := range map[string]Options{
		"no address to listen on":                {},
		"want IP:PORT":                           {Listen: []string{"localhost:53"}},
		`invalid address to listen on "1.2.3.4"`: {Listen: []string{"1.2.3.4"}},
		`cluster domain "a..b" is not`:           {Listen: []string{":0"}, Domains: []string{"a..b"}},
		"publishing behind kube-dns needs":       {Listen: []string{":0"}, Publish: &membership.Self{}},
		`stub domain "x" needs`:                  {Listen: []string{":0"}, Stubs: []Stub{{Domain: "x"}}},
		"is a directory":                         {Listen: []string{":0"}, ResolvConf: "/"},
		"--listen :53 includes the addresses":    {Listen: []string{"127.0.0.1:53", ":53"}, NodeLocal: local},
		"10.96.0.10:53 includes":                 {Listen: []string{"10.96.0.10:53"}, NodeLocal: local},
	} {
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

func TestTakenPort(t *testing.T) {
	s := start(t, Options{})
	other, err := New(Options{Listen: []string{s.Addrs()[0].String()}})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "in use by another program") {
		t.Errorf("error %v", err)
	}
}
