package proxy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// port reads a service port from "UDP 10.96.0.1:53=10.0.0.1,10.0.0.2" with
// further frontends after blanks; "=a/b" is endpoints a and local clients b,
// and a frontend of the address 0.0.0.0 is a node port. "serving=..." are those
// that flows may keep.
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
		if at == "serving" {
			p.Serving = list(eps)
			continue
		}
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

// removed are the connections that go when the kernel follows after instead of
// before: of those to a frontend of either, translated to any endpoint that serves
// it before, or not translated, and answered or not.
func removed(t *testing.T, before, after *table.Table, keys []table.Key, relayed bool) []string {
	t.Helper()
	fronts := staleFronts(before, after, keys, relayed, func(svc.Frontend) bool { return false })
	was, is := map[svc.Frontend]*served{}, map[svc.Frontend]*served{}
	for _, k := range keys {
		eachServed(before, before.Get(k), was)
		eachServed(after, after.Get(k), is)
	}
	entries := map[conntrack.Entry]bool{}
	for _, all := range []map[svc.Frontend]*served{was, is} {
		for at := range all {
			e := conntrack.Entry{Protocol: at.Protocol, OrigDst: at.Addr, ReplySrc: at.Addr, Replied: true}
			s := was[at]
			if s == nil || len(s.endpoints) == 0 || len(s.inside) == 0 {
				entries[e] = true // it began then
			}
			if s != nil {
				for _, ep := range slices.Concat(s.serving, s.endpoints, s.inside) {
					e.ReplySrc = ep.Addr
					entries[e] = true
				}
			}
		}
	}
	var out []string
	for e := range entries {
		for _, e.Replied = range []bool{true, false} {
			s, concerned := fronts[svc.Frontend{Protocol: e.Protocol, Addr: e.OrigDst}]
			if !concerned || !s.now.stale(&e, relayed) || !e.Replied && e.Protocol != svc.TCP {
				continue
			}
			text := fmt.Sprintf("%s %s by %s", e.Protocol, e.OrigDst, e.ReplySrc)
			if !e.Replied {
				text += " unreplied"
			}
			out = append(out, text)
		}
	}
	slices.Sort(out)
	var tcp []string
	for at, s := range fronts {
		flows, whole := s.flows(at)
		if whole != (at.Protocol == svc.TCP) {
			t.Errorf("flows tell all of %v: %t", at, whole)
		}
		for _, f := range flows {
			tcp = append(tcp, fmt.Sprintf("%s %s by %s unreplied", f.Protocol, f.OrigDst, f.ReplySrc))
		}
	}
	slices.Sort(tcp)
	if want := slices.DeleteFunc(slices.Clone(out), func(s string) bool { return !strings.HasPrefix(s, "TCP") }); !slices.Equal(tcp, want) {
		t.Errorf("of TCP, the kernel is asked for %q, want %q", tcp, want)
	}
	return out
}

func TestStaleConnections(t *testing.T) {
	const vip, by1, by2 = "UDP 10.96.0.1:53", "UDP 10.96.0.1:53 by 10.0.0.1:53", "UDP 10.96.0.1:53 by 10.0.0.2:53"
	const self, tcp = "UDP 10.96.0.1:53 by 10.96.0.1:53", "TCP 10.96.0.1:80"
	for _, c := range []struct{ name, before, after, want string }{
		{"nothing changes", vip + "=10.0.0.1", vip + "=10.0.0.1", ""},
		{"an endpoint goes", vip + "=10.0.0.1,10.0.0.2", vip + "=10.0.0.2", by1},
		{"an endpoint comes", vip + "=10.0.0.1", vip + "=10.0.0.1,10.0.0.2", ""},
		{"one for another", vip + "=10.0.0.1", vip + "=10.0.0.2", by1},
		{"to zero endpoints", vip + "=10.0.0.1", vip + "=", by1},
		{"the Service is deleted", vip + "=10.0.0.1", "", by1},
		{"a frontend goes", vip + "=10.0.0.1 192.0.2.1:53=10.0.0.1", vip + "=10.0.0.1", "UDP 192.0.2.1:53 by 10.0.0.1:53"},
		// What is only not preferred any more keeps its flows.
		{"an endpoint is not preferred", vip + "=10.0.0.1,10.0.0.2", vip + "=10.0.0.2 serving=10.0.0.1,10.0.0.2", ""},
		{"an endpoint is not preferred, then gone", vip + "=10.0.0.2 serving=10.0.0.1,10.0.0.2", vip + "=10.0.0.2 serving=10.0.0.2", by1},
		{"none is preferred", vip + "=10.0.0.1", vip + "= serving=10.0.0.1", ""},
		{"none was preferred, then deleted", vip + "= serving=10.0.0.1,10.0.0.2", "", by1 + ", " + by2},
		// kubernetes/kubernetes#139628: the untranslated flow answers itself.
		{"out of the black hole", vip + "=", vip + "=10.0.0.1", self},
		{"a new Service", "", vip + "=10.0.0.1", self},
		{"a new Service without endpoints", "", vip + "=", ""},
		{"a new Service without preferred endpoints", "", vip + "= serving=10.0.0.1", ""},
		{"a new frontend", vip + "=10.0.0.1", vip + "=10.0.0.1 192.0.2.1:53=10.0.0.1", "UDP 192.0.2.1:53 by 192.0.2.1:53"},
		{"SCTP", "SCTP 10.96.0.1:9=10.0.0.1", "", "SCTP 10.96.0.1:9 by 10.0.0.1:53"},
		{"TCP ends by itself, but for what was never answered", tcp + "=10.0.0.1", "", tcp + " by 10.0.0.1:53 unreplied"},
		{"an endpoint of TCP goes", tcp + "=10.0.0.1,10.0.0.2", tcp + "=10.0.0.2", tcp + " by 10.0.0.1:53 unreplied"},
		{"a client of TCP was early", "", tcp + "=10.0.0.1", tcp + " by 10.96.0.1:80 unreplied"},
		{"TCP becomes UDP", "TCP 10.96.0.1:53=10.0.0.1", vip + "=10.0.0.1", "TCP 10.96.0.1:53 by 10.0.0.1:53 unreplied, " + self},
		{"UDP becomes TCP", vip + "=10.0.0.1", "TCP 10.96.0.1:53=10.0.0.1", "TCP 10.96.0.1:53 by 10.96.0.1:53 unreplied, " + by1},
		{"a node port, on this node's addresses alone", "UDP 0.0.0.0:30053=10.0.0.1,10.0.0.2", "UDP 0.0.0.0:30053=10.0.0.2",
			"UDP 192.0.2.1:30053 by 10.0.0.1:53, UDP 192.0.2.2:30053 by 10.0.0.1:53"},
		{"the last local endpoint goes, local clients stay", vip + "=10.0.0.1/10.0.0.1,10.0.1.1", vip + "=/10.0.1.1", by1},
		{"the first local endpoint comes", vip + "=/10.0.1.1", vip + "=10.0.0.1/10.0.0.1,10.0.1.1", self},
		{"only local clients' endpoints change", vip + "=10.0.0.1/10.0.0.1,10.0.1.1", vip + "=10.0.0.1/10.0.0.1,10.0.1.2",
			"UDP 10.96.0.1:53 by 10.0.1.1:53"},
		{"all local clients' endpoints change", vip + "=/10.0.1.1", vip + "=/10.0.1.2", "UDP 10.96.0.1:53 by 10.0.1.1:53, " + self},
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
			keys := []table.Key{{ID: svc.PortName{Name: svc.Name{Namespace: "d", Name: "s"}}, Family: svc.IPv4}}
			before, after := build(c.before), build(c.after)
			if got := strings.Join(removed(t, before, after, keys, false), ", "); got != c.want {
				t.Errorf("removed: %q, want %q", got, c.want)
			}
		})
	}
}

// A suspect that waits keeps what it has lost, without endpoints that are back, and with
// more than a few lost it asks for the table.
func TestSuspectsInherit(t *testing.T) {
	at := svc.Frontend{Protocol: svc.TCP, Addr: netip.MustParseAddrPort("10.96.0.1:80")}
	state := func(eps string) *served {
		p := port(t, "TCP 10.96.0.1:80="+eps)
		return servedBy(p, &p.Frontends[0])
	}
	older := newSuspect(at, state("10.0.0.1,10.0.0.2,10.0.0.3"), state("10.0.0.3"), false)
	newer := newSuspect(at, state("10.0.0.3"), state("10.0.0.1,10.0.0.4"), false)
	newer.inherit(at, older, false)
	var got []string
	flows, whole := newer.flows(at)
	for _, f := range flows {
		got = append(got, f.ReplySrc.Addr().String())
	}
	if slices.Sort(got); !whole || !slices.Equal(got, []string{"10.0.0.2", "10.0.0.3"}) {
		t.Errorf("lost are %v (all: %t), want 10.0.0.2 and 10.0.0.3", got, whole)
	}
	var many []string
	for i := range maxLost + 1 {
		many = append(many, fmt.Sprintf("10.0.1.%d", i+1))
	}
	all := newSuspect(at, state(strings.Join(many, ",")), nil, false)
	if flows, whole := all.flows(at); whole || len(flows) > 0 {
		t.Errorf("of %d lost, flows are %v", len(many), flows)
	}
	next := newSuspect(at, nil, state("10.0.0.1"), false)
	next.inherit(at, all, false)
	if _, whole := next.flows(at); whole {
		t.Error("what was too much is forgotten")
	}
}

// A flow of UDP that is no more than a remembered answer leaves an endpoint that gets no new
// flows, for one that serves on; flows that last, that wait or that had packets a moment ago stay.
func TestSpentFlows(t *testing.T) {
	const timeout = 30 * time.Second
	before := port(t, "UDP 10.96.0.1:53=10.0.0.1,10.0.0.2/10.0.0.3 serving=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4")
	after := port(t, "UDP 10.96.0.1:53=10.0.0.2/10.0.0.3 serving=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4")
	was, is := servedBy(before, &before.Frontends[0]), servedBy(after, &after.Frontends[0])
	entry := func(endpoint string, change func(*conntrack.Entry)) *conntrack.Entry {
		e := &conntrack.Entry{
			Protocol: svc.UDP, OrigDst: netip.MustParseAddrPort("10.96.0.1:53"),
			ReplySrc: netip.AddrPortFrom(netip.MustParseAddr(endpoint), 53), Replied: true, Left: timeout - 2*time.Second,
		}
		if change != nil {
			change(e)
		}
		return e
	}
	for _, c := range []struct {
		name   string
		served *served
		entry  *conntrack.Entry
		want   bool
	}{
		{"at an endpoint that terminates", is, entry("10.0.0.1", nil), true},
		{"before it does", was, entry("10.0.0.1", nil), false},
		{"at one for new flows", is, entry("10.0.0.2", nil), false},
		{"at one for new flows of this node", is, entry("10.0.0.3", nil), false},
		{"of a frontend that is gone", nil, entry("10.0.0.1", nil), false},
		{"TCP", is, entry("10.0.0.1", func(e *conntrack.Entry) { e.Protocol = svc.TCP }), false},
		{"not translated", is, entry("10.0.0.1", func(e *conntrack.Entry) { e.ReplySrc = e.OrigDst }), false},
		{"without an answer", is, entry("10.0.0.1", func(e *conntrack.Entry) { e.Replied = false }), false},
		{"that lasts", is, entry("10.0.0.1", func(e *conntrack.Entry) { e.Assured = true }), false},
		{"of the last second", is, entry("10.0.0.1", func(e *conntrack.Entry) { e.Left = timeout - time.Second }), false},
		{"of this moment", is, entry("10.0.0.1", func(e *conntrack.Entry) { e.Left = timeout }), false},
	} {
		if got := c.served.spent(c.entry, timeout); got != c.want {
			t.Errorf("a flow %s: spent is %t", c.name, got)
		}
	}
	for _, c := range []struct {
		p        svc.Protocol
		old, now *served
		want     bool
	}{
		{svc.UDP, was, is, true},  // 10.0.0.1 gets no new flows any more
		{svc.TCP, was, is, false}, // its connections go on
		{svc.UDP, is, was, false},
		{svc.UDP, was, was, false},
		{svc.UDP, is, nil, true},
	} {
		if got := c.now.less(c.old, c.p); got != c.want {
			t.Errorf("%s from %v to %v: less is %t", c.p, c.old, c.now, got)
		}
	}
}

// After a start only what leads nowhere goes.
func TestSweep(t *testing.T) {
	ap := netip.MustParseAddrPort
	dns := &table.ServicePort{
		ID: svc.PortName{Name: svc.Name{Namespace: "d", Name: "dns"}}, Family: svc.IPv4, Protocol: svc.UDP,
		Serving: []table.Endpoint{{Addr: ap("10.244.0.5:53")}, {Addr: ap("10.244.0.6:53")}, {Addr: ap("10.244.0.9:53")}},
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
	s := newSweep(tab, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, false)
	for _, c := range []struct {
		name     string
		p        svc.Protocol
		dst, src string
		stale    bool
	}{
		{"to an endpoint", svc.UDP, "10.96.0.10:53", "10.244.0.5:53", false},
		{"to one that is gone", svc.UDP, "10.96.0.10:53", "10.244.0.4:53", true},
		{"began when there was none", svc.UDP, "10.96.0.10:53", "10.96.0.10:53", true},
		{"to one that serves, but is not preferred", svc.UDP, "10.96.0.10:53", "10.244.0.9:53", false},
		{"TCP", svc.TCP, "10.96.0.10:53", "10.244.0.4:53", false},
		{"SCTP on the same port", svc.SCTP, "10.96.0.10:53", "10.244.0.4:53", true},
		{"node port to a local client's endpoint", svc.UDP, "192.0.2.1:30053", "10.244.0.6:53", false},
		{"node port to another one", svc.UDP, "192.0.2.1:30053", "10.244.0.7:53", true},
		{"the same port of another host", svc.UDP, "192.0.2.9:30053", "10.244.0.7:53", false},
		{"no endpoint is left", svc.UDP, "10.96.0.11:53", "10.244.0.4:53", true},
		{"no endpoint yet", svc.UDP, "10.96.0.11:53", "10.96.0.11:53", false},
		{"the Service is gone", svc.UDP, "10.96.0.99:53", "10.244.0.4:53", true},
		{"untranslated in the range", svc.UDP, "10.96.0.99:53", "10.96.0.99:53", false},
		{"another program's translation", svc.UDP, "198.51.100.1:53", "10.244.0.4:53", false},
	} {
		e := conntrack.Entry{Protocol: c.p, OrigDst: ap(c.dst), ReplySrc: ap(c.src), Replied: true}
		if got := s.stale(e); got != c.stale {
			t.Errorf("%s: %v, want %v", c.name, got, c.stale)
		}
	}
}
