package flows

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// AP parses "IP:port".
func AP(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// Endpoints are endpoints by address; a star before it marks local ones.
func Endpoints(addrs ...string) []table.Endpoint {
	var out []table.Endpoint
	for _, a := range addrs {
		local := a[0] == '*'
		if local {
			a = a[1:]
		}
		out = append(out, table.Endpoint{Addr: AP(a), Local: local})
	}
	return out
}

// Port is a port of a Service in namespace default.
func Port(name, portName string, f svc.Family, p svc.Protocol, fronts ...table.Frontend) *table.ServicePort {
	return &table.ServicePort{
		ID:     svc.PortName{Name: svc.Name{Namespace: "default", Name: name}, Port: portName},
		Family: f, Protocol: p, Frontends: fronts,
	}
}

// Affine applies a Service with session affinity and returns its port in both families. The endpoints of each frontend are a and b; in
// IPv4 the second frontend is a node port.
func (e *Env) Affine(t testing.TB) (web4, web6 *table.ServicePort) {
	t.Helper()
	a, b := e.Host("a"), e.Host("b")
	at := func(addr netip.Addr) table.Endpoint {
		return table.Endpoint{Addr: netip.AddrPortFrom(addr, endpointPort)}
	}
	front := table.Frontend{Addr: AP("10.96.0.10:80"), Endpoints: []table.Endpoint{at(a.Addr4()), at(b.Addr4())}}
	node := table.Frontend{Kind: table.NodePort, Addr: AP("0.0.0.0:30080"), Endpoints: front.Endpoints}
	web4 = Port("web", "http", svc.IPv4, svc.TCP, front, node)
	web6 = Port("web", "http", svc.IPv6, svc.TCP,
		table.Frontend{Addr: AP("[fd00:10:96::10]:80"), Endpoints: []table.Endpoint{at(a.Addr6()), at(b.Addr6())}})
	web4.Affinity, web6.Affinity = time.Hour, time.Hour
	tab := table.New(web4, web6)
	tab.NodePortAddrs = []netip.Addr{e.Node.Addr4()}
	e.Apply(t, tab, nil)
	return web4, web6
}

// EveryField is a Table that uses every field of a Frontend.
func EveryField() *table.Table {
	web := Endpoints("*10.244.1.2:9376", "10.244.2.2:9376")
	six := Endpoints("*[fd00:10:244:1::2]:53", "[fd00:10:244:2::2]:53")
	sticky := Port("cart", "http", svc.IPv4, svc.TCP,
		table.Frontend{Kind: table.ClusterIP, Addr: AP("10.96.0.11:80"), Endpoints: web},
		table.Frontend{Kind: table.NodePort, Addr: AP("0.0.0.0:30081"), Endpoints: web[:1], LocalClients: web})
	sticky.Affinity = 3 * time.Hour
	t := table.New(
		Port("web", "http", svc.IPv4, svc.TCP,
			table.Frontend{Kind: table.ClusterIP, Addr: AP("10.96.0.10:80"), Endpoints: web},
			table.Frontend{Kind: table.ExternalIP, Addr: AP("203.0.113.1:80"), Endpoints: web, Masquerade: true},
			table.Frontend{Kind: table.LoadBalancerIP, Addr: AP("203.0.113.2:80"), Endpoints: web, Masquerade: true,
				SourceRanges: []netip.Prefix{netip.MustParsePrefix("143.231.0.0/16"), netip.MustParsePrefix("0.0.0.0/0"),
					netip.MustParsePrefix("203.0.113.2/32")}},
			table.Frontend{Kind: table.NodePort, Addr: AP("0.0.0.0:30080"), Endpoints: web, Masquerade: true}),
		Port("local", "", svc.IPv4, svc.TCP,
			table.Frontend{Kind: table.LoadBalancerIP, Addr: AP("203.0.113.3:443"), Drop: true, LocalClients: web}),
		Port("db", "", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: AP("10.96.0.12:5432")}),
		Port("signal", "", svc.IPv4, svc.SCTP, table.Frontend{Kind: table.ClusterIP, Addr: AP("10.96.0.13:7777"), Endpoints: web}),
		Port("kube-dns", "dns", svc.IPv6, svc.UDP,
			table.Frontend{Kind: table.ClusterIP, Addr: AP("[fd00:10:96::a]:53"), Endpoints: six}),
		Port("headless", "", svc.IPv4, svc.TCP),
		sticky)
	t.NodePortAddrs = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.77.11"), netip.MustParseAddr("fd00:77::b")}
	t.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	t.LocalCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
	t.ServiceCIDRs = ServiceCIDRs
	return t
}

// States are Tables to walk between: random ones of which each has grow
// Services more than the one before, an empty one and EveryField.
func States(grow int) []*table.Table {
	all := Endpoints("*10.244.1.2:80", "*10.244.1.3:80", "10.244.2.2:80", "10.244.2.3:80", "10.244.2.4:80")
	var out []*table.Table
	for i := range 12 {
		r := rand.New(rand.NewPCG(uint64(i), 7))
		some := func() []table.Endpoint {
			var l []table.Endpoint
			for _, e := range all {
				if r.IntN(2) == 0 {
					l = append(l, e)
				}
			}
			return l
		}
		var ports []*table.ServicePort
		for s := range 6 + i*grow {
			if r.IntN(4) > 0 {
				ports = append(ports, randomPort(r, s, some))
			}
		}
		t := table.New(ports...)
		if i%4 == 1 {
			t.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
		}
		if i%3 == 1 {
			t.LocalCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
		}
		if i%4 == 2 {
			t.MasqueradeAll = true
		}
		for n := range r.IntN(3) {
			t.NodePortAddrs = append(t.NodePortAddrs, netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}))
		}
		out = append(out, t)
	}
	return append(out, table.New(), EveryField())
}

func randomPort(r *rand.Rand, s int, some func() []table.Endpoint) *table.ServicePort {
	proto := []svc.Protocol{svc.TCP, svc.UDP}[r.IntN(2)]
	p := Port(fmt.Sprintf("s%d", s), "p", svc.IPv4, proto,
		table.Frontend{Kind: table.ClusterIP, Addr: AP(fmt.Sprintf("10.96.%d.%d:80", s%3, s+1)), Endpoints: some(), Drop: r.IntN(3) == 0})
	if r.IntN(2) == 0 {
		p.Frontends = append(p.Frontends, table.Frontend{
			// Services 0 and 1 want the same one.
			Kind: table.ExternalIP, Addr: AP(fmt.Sprintf("203.0.113.%d:%d", max(s, 1)%7, 80+s/7)), Endpoints: some(), Masquerade: r.IntN(2) == 0,
		})
	}
	if r.IntN(2) == 0 {
		f := table.Frontend{Kind: table.NodePort, Addr: AP(fmt.Sprintf("0.0.0.0:%d", 30000+s)), Endpoints: some(), Masquerade: true}
		if r.IntN(2) == 0 {
			f.LocalClients, f.Masquerade = some(), false
		}
		if r.IntN(3) == 0 {
			f.SourceRanges = []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", r.IntN(3)))}
		}
		p.Frontends = append(p.Frontends, f)
	}
	if r.IntN(3) == 0 {
		p.Affinity = time.Duration(1+r.IntN(2)) * time.Hour
	}
	return p
}

// Changes are the keys that differ between two Tables.
func Changes(a, b *table.Table) []table.Key {
	keys := []table.Key{}
	for p := range a.All() {
		if b.Get(p.Key()) != p {
			keys = append(keys, p.Key())
		}
	}
	for p := range b.All() {
		if a.Get(p.Key()) == nil {
			keys = append(keys, p.Key())
		}
	}
	return keys
}

// Large is n Services of one port with a number of endpoints each.
func Large(n, endpoints int) []*table.ServicePort {
	ports := make([]*table.ServicePort, n)
	for i := range ports {
		ports[i] = LargePort(i, endpoints)
	}
	return ports
}

// LargePort is the i-th port of Large.
func LargePort(i, endpoints int) *table.ServicePort {
	list := make([]table.Endpoint, endpoints)
	for j := range list {
		x := i*endpoints + j
		list[j].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(64 + x>>16), byte(x >> 8), byte(x)}), 8080)
	}
	slices.SortFunc(list, func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
	vip := netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, byte(16 + i>>16), byte(i >> 8), byte(i)}), 80)
	return Port(fmt.Sprintf("service-%d", i), "http", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: list})
}

// OtherEndpoint is a port of Large with another endpoint in the place of its
// last; round makes it one that was not there before.
func OtherEndpoint(p *table.ServicePort, round int) *table.ServicePort {
	next := *p
	next.Frontends = slices.Clone(p.Frontends)
	list := slices.Clone(p.Frontends[0].Endpoints)
	list[len(list)-1].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 255, byte(round >> 8), byte(round)}), 8080)
	next.Frontends[0].Endpoints = list
	return &next
}
