package front

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// meshRig is a node whose proxy translates connections to vips, with a Service whose ClusterIPs these are.
type meshRig struct {
	*insideRig
	guest *testbed.Host // a Pod of the node
	plain *testbed.Host // where the proxy sends them
}

// newMeshRig has ports 80, which the Service leads here, and 81, which it does not. Rules of translation are of nf_tables, or
// of iptables.
func newMeshRig(t *testing.T, iptables bool) *meshRig {
	t.Helper()
	r := &meshRig{insideRig: newInsideRig(t, []uint16{80}, nil, map[string]string{"fairlead.dev/lb-proxy-protocol": "v1"})}
	r.guest, r.plain = r.node.Pod("caller"), r.client
	r.plain.Serve(svc.TCP, 9100)
	r.service.ClusterIP = true
	r.local.setSources([]netip.Addr{r.node.Addr4(), r.node.Addr6()})
	if iptables {
		for _, a := range vips {
			command, to := "iptables", r.plain.Addr4().String()
			if a.Is6() {
				command, to = "ip6tables", "["+r.plain.Addr6().String()+"]"
			}
			for _, chain := range []string{"PREROUTING", "OUTPUT"} {
				r.run(command, "-t", "nat", "-A", chain, "-d", a.String(), "-p", "tcp", "-j", "DNAT", "--to-destination", to+":9100")
			}
			pods := r.node.PodCIDR(svc.FamilyOf(a)).String()
			r.run(command, "-t", "nat", "-A", "POSTROUTING", "-s", pods, "-j", "MASQUERADE")
		}
		return r
	}
	r.run("nft", fmt.Sprintf(`table inet proxy {
		chain services {
			ip daddr %[1]s meta l4proto tcp dnat ip to %[2]s:9100
			ip6 daddr %[3]s meta l4proto tcp dnat ip6 to [%[4]s]:9100
		}
		chain in { type nat hook prerouting priority -100; jump services; }
		chain out { type nat hook output priority -100; jump services; }
		chain pods { type nat hook postrouting priority 100; ip saddr %[5]s masquerade; ip6 saddr %[6]s masquerade; }
	}`, vips[0], r.plain.Addr4(), vips[1], r.plain.Addr6(), r.node.PodCIDR(svc.IPv4), r.node.PodCIDR(svc.IPv6)))
	return r
}

func (r *meshRig) run(name string, args ...string) {
	r.Helper()
	if out, err := r.node.Command(r.Context(), name, args...).CombinedOutput(); err != nil {
		r.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// clients returns the clients, with the address that a Pod sees (by the PROXY protocol).
func (r *meshRig) clients(f svc.Family) map[*testbed.Host]netip.Addr {
	return map[*testbed.Host]netip.Addr{r.guest: r.guest.Addr(f), r.node: r.node.Addr(f)}
}

// Connections to a ClusterIP with a listener come to it before any rule of translation, of nf_tables as of iptables: from Pods
// behind a bridge and from the node, by IPv4 and IPv6, with the client's address. Other ports are as before, and so is
// all once the listener has gone.
func TestClusterIPsComeHereFirst(t *testing.T) {
	t.Parallel()
	for _, iptables := range []bool{false, true} {
		t.Run(map[bool]string{false: "nft", true: "iptables"}[iptables], func(t *testing.T) {
			t.Parallel()
			r := newMeshRig(t, iptables)
			check := func(led bool) {
				t.Helper()
				for _, a := range vips {
					for from, seen := range r.clients(svc.FamilyOf(a)) {
						want := "client "
						if led {
							want = fmt.Sprintf("pod PROXY %s %s %s ", map[bool]string{true: "TCP4", false: "TCP6"}[a.Is4()], seen, a)
						}
						r.wants(from, svc.TCP, netip.AddrPortFrom(a, 80), "x", want)
						r.wants(from, svc.TCP, netip.AddrPortFrom(a, 81), "x", "client ")
					}
				}
			}
			check(false)
			for range 2 {
				r.set(&r.service)
				check(true)
				r.set()
				check(false)
			}
		})
	}
}

// No new connection fails while routes come and go, and open ones go on where they are.
func TestRoutesComeAndGo(t *testing.T) {
	t.Parallel()
	r := newMeshRig(t, false)
	at := netip.AddrPortFrom(vips[0], 80)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan string, 1)
	asked := 0
	go func() {
		for ctx.Err() == nil {
			got, err := r.ask(r.guest, svc.TCP, at, "x")
			if err != nil || !strings.HasPrefix(got, "pod ") && !strings.HasPrefix(got, "client ") {
				done <- fmt.Sprintf("after %d answers: %q, %v", asked, got, err)
				return
			}
			asked++
		}
		done <- ""
	}()
	plain := r.open(at)
	r.set(&r.service)
	plain.says("still plain")
	led := r.open(at)
	for range 10 {
		r.set()
		r.set(&r.service)
	}
	r.set()
	led.says("still led")
	plain.says("again")
	cancel()
	if failed := <-done; failed != "" {
		t.Error(failed)
	}
	if asked == 0 {
		t.Error("nothing was asked meanwhile")
	}
}

// opened is a connection of the Pod.
type opened struct {
	*meshRig
	net.Conn
}

func (r *meshRig) open(at netip.AddrPort) *opened {
	r.Helper()
	c, err := r.guest.Dial(r.Context(), svc.TCP, at)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = c.Close() })
	return &opened{r, c}
}

// says sends a text and wants an answer with it.
func (o *opened) says(text string) {
	o.Helper()
	_, _ = o.Write([]byte(text))
	buf, all := make([]byte, 1024), ""
	for !strings.Contains(all, text) {
		n, err := o.Read(buf)
		if all += string(buf[:n]); err != nil {
			o.Errorf("%q: %q, %v", text, all, err)
			return
		}
	}
}

// Endpoints at ClusterIPs that lead here, and at addresses of load balancers, get no requests: these would go in circles.
func TestNoCircles(t *testing.T) {
	t.Parallel()
	m := &meshing{addrs: map[netip.Addr]bool{netip.MustParseAddr("10.96.0.7"): true}}
	claims := map[netip.Addr][]svc.Name{netip.MustParseAddr("192.0.2.9"): {{Namespace: "a", Name: "lb"}}}
	var all []netip.AddrPort
	for _, a := range []string{"10.244.0.1:80", "10.96.0.7:80", "192.0.2.9:80", "10.96.0.8:80"} {
		all = append(all, netip.MustParseAddrPort(a))
	}
	if got := fmt.Sprint(m.without(all, claims)); got != "[10.244.0.1:80 10.96.0.8:80]" {
		t.Errorf("of a ClusterIP's rules: %s", got)
	}
	if got := fmt.Sprint(m.without(all, nil)); got != "[10.244.0.1:80 192.0.2.9:80 10.96.0.8:80]" {
		t.Errorf("of a Gateway's rules: %s", got)
	}
	if all[1].Addr() != netip.MustParseAddr("10.96.0.7") {
		t.Error("the argument was changed")
	}
}

// The listeners of ClusterIPs are known as such by the next process, also before their Services are.
func TestClusterIPsAreHandedOver(t *testing.T) {
	t.Parallel()
	r := newMeshRig(t, false)
	r.set(&r.service)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	kept := r.server.Close(ctx)
	if len(kept) != 2 || !kept[0].ClusterIP || !kept[1].ClusterIP {
		t.Fatalf("%+v are kept", kept)
	}
	next := proxied.New(proxied.Options{Log: slog.New(slog.DiscardHandler), Store: r.store})
	doors := next.Doors()
	if len(doors) != 2 || !doors[0].ClusterIP || !doors[0].Inherited || doors[0].At != netip.AddrPortFrom(vips[0], 80) {
		t.Errorf("the next process has %+v", doors)
	}
	next.Close(ctx)
}

// failingServer fails to serve some Services.
type failingServer struct {
	*proxied.Server
	asked  []svc.Name
	failed map[svc.Name]error
}

func (s *failingServer) Set(services []*proxied.Service) map[svc.Name]error {
	s.asked = nil
	for _, v := range services {
		s.asked = append(s.asked, v.Name)
	}
	return s.failed
}

// newMesh has a Front with the routes of Service default/web, whose ClusterIP is 10.96.0.7, to default/back with its endpoints.
func newMesh(o Options, endpoints ...string) *Front {
	f := New(o)
	web, to := svc.Name{Namespace: "default", Name: "web"}, gateway.Target{Backend: gateway.Backend{
		Name: svc.Name{Namespace: "default", Name: "back"}, Port: 80, Protocol: gateway.HTTP1}}
	f.meshing.firsts = nil // the kernel can
	back := &target{listed: true, addrs: map[gateway.Backend][]netip.AddrPort{to.Backend: nil}}
	for _, e := range endpoints {
		back.addrs[to.Backend] = append(back.addrs[to.Backend], netip.MustParseAddrPort(e))
	}
	f.routing.backends[to.Name] = back
	f.routing.takeMeshes(map[svc.Name]*gateway.Mesh{web: {
		Table: &gateway.Table{Ports: map[uint16]*gateway.Port{80: {}}}, Targets: []gateway.Target{to},
		Addrs: []netip.Addr{netip.MustParseAddr("10.96.0.7")}, Key: "u",
	}}, map[svc.Name]bool{})
	return f
}

// A Service whose routes the server cannot serve is an Event and a line of the log, once for each reason.
func TestRoutesNotServed(t *testing.T) {
	t.Parallel()
	server := &failingServer{Server: proxied.New(proxied.Options{Log: slog.New(slog.DiscardHandler)})}
	defer server.Close(t.Context())
	w, local := newWrites()
	events, lines := &taken{}, &strings.Builder{}
	f := newMesh(Options{
		NodeName: "n1", Server: server, Events: events, Network: local.network, Log: slog.New(slog.NewTextHandler(lines, nil)),
	})
	mesh := svc.Name{Namespace: "default", Name: "web:mesh"}
	for _, c := range []struct{ failure, want string }{
		{"", ""},
		{"no port", "web Warning RoutesNotServed node n1: no port"},
		{"no port", ""},
		{"no memory", "web Warning RoutesNotServed node n1: no memory"},
		{"", ""},
		{"no memory", "web Warning RoutesNotServed node n1: no memory"},
	} {
		server.failed = nil
		if lines.Reset(); c.failure != "" {
			server.failed = map[svc.Name]error{mesh: errors.New(c.failure)}
		}
		f.apply()
		if len(server.asked) != 1 || server.asked[0] != mesh {
			t.Fatalf("the server was asked for %v", server.asked)
		}
		if got := events.take(); got != c.want {
			t.Errorf("after %q: %q, want %q", c.failure, got, c.want)
		}
		if logged := strings.Contains(lines.String(), "cannot serve the routes of a Service"); logged != (c.want != "") {
			t.Errorf("after %q: %s", c.failure, lines)
		}
	}
	if len(w.vips) != 1 {
		t.Errorf("the addresses became local %d times", len(w.vips))
	}
	f.meshing.no = "no tproxy" // what the server says of others does not hide it
	f.apply()
	f.apply()
	if got := events.take(); got != "web Warning RoutesNotServed node n1: no tproxy" || len(server.asked) != 0 {
		t.Errorf("%q, and the server was asked for %v", got, server.asked)
	}
}

// A node that may not read what routes depend on says so where the condition of routes has it from, and takes it back.
func TestUnreadIsReported(t *testing.T) {
	t.Parallel()
	reports := 0
	m := &meshing{mu: &sync.Mutex{}, served: func() { reports++ }}
	for i, why := range []string{"it may not read", "it may not read", ""} {
		m.setUnread(why)
		if got, want := m.NoMesh(), why; got != want || reports != []int{1, 1, 2}[i] {
			t.Errorf("%q: %q after %d reports", why, got, reports)
		}
	}
}

// An address that becomes one of a load balancer, or a ClusterIP with routes, leaves the endpoints that were built before.
func TestNoCirclesLater(t *testing.T) {
	t.Parallel()
	lb := netip.MustParseAddr("192.0.2.9")
	f := newMesh(Options{}, "10.244.0.1:80", "192.0.2.9:80", "10.96.0.7:80", "10.96.0.8:80")
	meshes := maps.Clone(f.meshing.all)
	web, shop := svc.Name{Namespace: "default", Name: "web"}, svc.Name{Namespace: "default", Name: "shop"}
	n := names.ServiceOfGateway(shop)
	mesh := meshes[web].mesh
	f.routing.watch = &watch.Watch{}
	f.routing.state = &watch.State{Fronts: map[svc.Name]*gateway.Front{shop: {Table: mesh.Table, Targets: mesh.Targets}}}
	f.services[n] = &service{listed: true, spec: &dialect.Spec{}, object: &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{names.FrontLabel: names.FrontGateway},
		OwnerReferences: []metav1.OwnerReference{{Kind: "Gateway", Name: shop.Name, Controller: new(true)}},
	}, Spec: corev1.ServiceSpec{IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}}}}
	check := func(when, inRoutes, inFront string) {
		t.Helper()
		got := map[svc.Name]string{}
		for _, v := range f.build() {
			got[v.Name] = fmt.Sprint(v.Routes.Targets[mesh.Targets[0]])
		}
		if got[meshName(web)] != inRoutes || got[n] != inFront {
			t.Errorf("%s: endpoints %v, want %s and %s", when, got, inRoutes, inFront)
		}
	}
	const all = "[10.244.0.1:80 192.0.2.9:80 10.96.0.8:80]"
	check("at first", all, all)
	stay := func(when string, inRoutes bool) {
		t.Helper()
		if f.services[n].built == nil || (f.meshing.all[web].built != nil) != inRoutes {
			t.Errorf("%s: built are %v and %v", when, f.services[n].built, f.meshing.all[web].built)
		}
	}
	f.SetClaim(netip.MustParseAddr("192.0.2.10"), []svc.Name{{Namespace: "default", Name: "lb"}})
	stay("with a load balancer at no endpoint", true)
	elsewhere := map[svc.Name]*gateway.Mesh{web: mesh, shop: {Table: mesh.Table, Addrs: []netip.Addr{netip.MustParseAddr("10.96.0.9")}}}
	f.routing.takeMeshes(elsewhere, map[svc.Name]bool{})
	stay("with routes at no endpoint", true)
	f.SetClaim(lb, []svc.Name{{Namespace: "default", Name: "lb"}})
	stay("with a load balancer at an endpoint", false)
	check("with a load balancer", "[10.244.0.1:80 10.96.0.8:80]", all)
	other := *mesh
	other.Addrs = []netip.Addr{netip.MustParseAddr("10.96.0.8")}
	f.routing.takeMeshes(map[svc.Name]*gateway.Mesh{web: &other}, map[svc.Name]bool{})
	check("with another ClusterIP", "[10.244.0.1:80 10.96.0.7:80]", "[10.244.0.1:80 192.0.2.9:80 10.96.0.7:80]")
	f.SetClaim(lb, nil)
	check("without a load balancer", "[10.244.0.1:80 192.0.2.9:80 10.96.0.7:80]", "[10.244.0.1:80 192.0.2.9:80 10.96.0.7:80]")
}
