package proxy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// port reads a service port from "UDP 10.96.0.1:53=10.0.0.1,10.0.0.2" with
// further frontends after blanks; "=a/b" is endpoints a and local clients b,
// and a frontend of the address 0.0.0.0 is a node port.
func port(t *testing.T, text string) *table.ServicePort {
	t.Helper()
	if text == "" {
		return nil
	}
	fields := strings.Fields(text)
	proto, err := svc.ParseProtocol(fields[0])
	if err != nil {
		t.Fatal(err)
	}
	p := &table.ServicePort{ID: svc.PortName{Name: svc.Name{Namespace: "d", Name: "s"}}, Family: svc.IPv4, Protocol: proto}
	list := func(text string) (out []table.Endpoint) {
		for _, a := range strings.Split(text, ",") {
			if a != "" {
				out = append(out, table.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), 53)})
			}
		}
		return out
	}
	for _, f := range fields[1:] {
		at, eps, _ := strings.Cut(f, "=")
		ends, clients, differ := strings.Cut(eps, "/")
		fe := table.Frontend{Addr: netip.MustParseAddrPort(at), Endpoints: list(ends)}
		if fe.Addr.Addr().IsUnspecified() {
			fe.Kind = table.NodePort
		}
		if differ {
			fe.LocalClients = append([]table.Endpoint{}, list(clients)...)
		}
		p.Frontends = append(p.Frontends, fe)
	}
	return p
}

func TestStaleFlows(t *testing.T) {
	const vip = "UDP 10.96.0.1:53"
	for _, c := range []struct{ name, before, after, want string }{
		{"nothing changes", vip + "=10.0.0.1", vip + "=10.0.0.1", ""},
		{"an endpoint goes", vip + "=10.0.0.1,10.0.0.2", vip + "=10.0.0.2", "UDP 10.96.0.1:53 by 10.0.0.1:53"},
		{"an endpoint comes", vip + "=10.0.0.1", vip + "=10.0.0.1,10.0.0.2", ""},
		{"one for another", vip + "=10.0.0.1", vip + "=10.0.0.2", "UDP 10.96.0.1:53 by 10.0.0.1:53"},
		{"to zero endpoints", vip + "=10.0.0.1", vip + "=", "UDP 10.96.0.1:53"},
		{"the Service is deleted", vip + "=10.0.0.1", "", "UDP 10.96.0.1:53"},
		{"a frontend goes", vip + "=10.0.0.1 192.0.2.1:53=10.0.0.1", vip + "=10.0.0.1", "UDP 192.0.2.1:53"},
		// kubernetes/kubernetes#139628: the untranslated flow answers itself.
		{"out of the black hole", vip + "=", vip + "=10.0.0.1", "UDP 10.96.0.1:53 by 10.96.0.1:53"},
		{"a new Service", "", vip + "=10.0.0.1", "UDP 10.96.0.1:53 by 10.96.0.1:53"},
		{"a new Service without endpoints", "", vip + "=", ""},
		{"a new frontend", vip + "=10.0.0.1", vip + "=10.0.0.1 192.0.2.1:53=10.0.0.1", "UDP 192.0.2.1:53 by 192.0.2.1:53"},
		{"SCTP", "SCTP 10.96.0.1:9=10.0.0.1", "", "SCTP 10.96.0.1:9"},
		{"TCP ends by itself", "TCP 10.96.0.1:80=10.0.0.1", "", ""},
		{"TCP becomes UDP", "TCP 10.96.0.1:53=10.0.0.1", vip + "=10.0.0.1", "UDP 10.96.0.1:53 by 10.96.0.1:53"},
		{"UDP becomes TCP", vip + "=10.0.0.1", "TCP 10.96.0.1:53=10.0.0.1", "UDP 10.96.0.1:53"},
		{"a node port, on this node's addresses alone", "UDP 0.0.0.0:30053=10.0.0.1,10.0.0.2", "UDP 0.0.0.0:30053=10.0.0.2",
			"UDP 192.0.2.1:30053 by 10.0.0.1:53, UDP 192.0.2.2:30053 by 10.0.0.1:53"},
		{"the last local endpoint goes, local clients stay", vip + "=10.0.0.1/10.0.0.1,10.0.1.1", vip + "=/10.0.1.1",
			"UDP 10.96.0.1:53 by 10.0.0.1:53"},
		{"the first local endpoint comes", vip + "=/10.0.1.1", vip + "=10.0.0.1/10.0.0.1,10.0.1.1", "UDP 10.96.0.1:53 by 10.96.0.1:53"},
		{"only local clients' endpoints change", vip + "=10.0.0.1/10.0.0.1,10.0.1.1", vip + "=10.0.0.1/10.0.0.1,10.0.1.2",
			"UDP 10.96.0.1:53 by 10.0.1.1:53"},
		{"all local clients' endpoints change", vip + "=/10.0.1.1", vip + "=/10.0.1.2", "UDP 10.96.0.1:53 by 10.0.1.1:53"},
		{"still used by local clients", vip + "=10.0.0.1", vip + "=/10.0.0.1", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("fd00::1")}
			build := func(text string) *table.Table {
				var ports []*table.ServicePort
				if p := port(t, text); p != nil {
					ports = append(ports, p)
				}
				tab := table.New(ports...)
				tab.NodePortAddrs = addrs
				return tab
			}
			key := table.Key{ID: svc.PortName{Name: svc.Name{Namespace: "d", Name: "s"}}, Family: svc.IPv4}
			var got []string
			for _, f := range staleFlows(build(c.before), build(c.after), []table.Key{key}) {
				text := fmt.Sprintf("%s %s", f.Protocol, f.OrigDst)
				if f.ReplySrc.IsValid() {
					text += " by " + f.ReplySrc.String()
				}
				got = append(got, text)
			}
			slices.Sort(got)
			if g := strings.Join(got, ", "); g != c.want {
				t.Errorf("stale: %q, want %q", g, c.want)
			}
			if c.before == "" {
				if len(staleFlows(nil, build(c.after), []table.Key{key})) != len(got) {
					t.Error("no Table before must be as an empty one")
				}
			}
		})
	}
}

// After a start only what leads nowhere goes.
func TestSweep(t *testing.T) {
	ap := netip.MustParseAddrPort
	dns := &table.ServicePort{
		ID: svc.PortName{Name: svc.Name{Namespace: "d", Name: "dns"}}, Family: svc.IPv4, Protocol: svc.UDP,
		Frontends: []table.Frontend{
			{Kind: table.ClusterIP, Addr: ap("10.96.0.10:53"), Endpoints: []table.Endpoint{{Addr: ap("10.244.0.5:53")}}},
			{Kind: table.NodePort, Addr: ap("0.0.0.0:30053"), LocalClients: []table.Endpoint{{Addr: ap("10.244.0.6:53")}}},
		},
	}
	empty := &table.ServicePort{
		ID: svc.PortName{Name: svc.Name{Namespace: "d", Name: "empty"}}, Family: svc.IPv4, Protocol: svc.UDP,
		Frontends: []table.Frontend{{Kind: table.ClusterIP, Addr: ap("10.96.0.11:53")}},
	}
	tab := table.New(dns, empty)
	tab.NodePortAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	s := newSweep(tab, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")})
	for _, c := range []struct {
		name     string
		p        svc.Protocol
		dst, src string
		stale    bool
	}{
		{"to an endpoint", svc.UDP, "10.96.0.10:53", "10.244.0.5:53", false},
		{"to one that is gone", svc.UDP, "10.96.0.10:53", "10.244.0.4:53", true},
		{"began when there was none", svc.UDP, "10.96.0.10:53", "10.96.0.10:53", true},
		{"TCP", svc.TCP, "10.96.0.10:53", "10.244.0.4:53", false},
		{"SCTP on the same port", svc.SCTP, "10.96.0.10:53", "10.244.0.4:53", true},
		{"node port to a local client's endpoint", svc.UDP, "192.0.2.1:30053", "10.244.0.6:53", false},
		{"node port to another one", svc.UDP, "192.0.2.1:30053", "10.244.0.7:53", true},
		{"the same port of somebody else", svc.UDP, "192.0.2.9:30053", "10.244.0.7:53", false},
		{"no endpoint is left", svc.UDP, "10.96.0.11:53", "10.244.0.4:53", true},
		{"no endpoint yet", svc.UDP, "10.96.0.11:53", "10.96.0.11:53", false},
		{"the Service is gone", svc.UDP, "10.96.0.99:53", "10.244.0.4:53", true},
		{"untranslated in the range", svc.UDP, "10.96.0.99:53", "10.96.0.99:53", false},
		{"somebody else's translation", svc.UDP, "198.51.100.1:53", "10.244.0.4:53", false},
	} {
		if got := s.stale(c.p, ap(c.dst), ap(c.src)); got != c.stale {
			t.Errorf("%s: %v, want %v", c.name, got, c.stale)
		}
	}
}
