package follow

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/nftrace"
	"github.com/fairlead/fairlead/internal/kernel/probe"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/trace"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// rules translate 10.96.0.1 and fd00:10:96::1 to the endpoint, and are a firewall for some ports. What they trace is of others.
const rules = `
table inet translate {
	chain pre {
		type nat hook prerouting priority -100
		ip daddr 10.96.0.1 dnat ip to EP4
		ip6 daddr fd00:10:96::1 dnat ip6 to EP6
	}
	chain out {
		type nat hook output priority -100
		ip daddr 10.96.0.1 dnat ip to EP4
	}
}
table inet firewall {
	chain forward {
		type filter hook forward priority 10
		meta nftrace set 1
		jump rules
	}
	chain rules {
		tcp dport 23 drop comment "no telnet"
		tcp dport 24 reject with icmpx type admin-prohibited
		tcp dport 25 reject with tcp reset
	}
	chain output {
		type filter hook output priority 10; policy accept
		tcp dport 26 drop
		tcp dport 28 reject with tcp reset
	}
}`

// machines are a node with an endpoint that serves port 80, and a client; both are Pods.
func machines(t *testing.T) (node, endpoint, client *testbed.Host) {
	t.Helper()
	node = testbed.NewNetwork(t).Host("node")
	endpoint, client = node.Pod("endpoint"), node.Pod("client")
	nft := node.Command(t.Context(), "nft", "-f", "-")
	nft.Stdin = strings.NewReader(strings.NewReplacer("EP4", endpoint.Addr4().String(), "EP6", endpoint.Addr6().String()).Replace(rules))
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	return node, endpoint, client
}

func spaces(hosts ...*testbed.Host) (out []Space) {
	for _, h := range hosts {
		out = append(out, Space{Name: h.Name(), Path: h.NSPath()})
	}
	return out
}

func send(t *testing.T, p svc.Protocol, to string, from ...*testbed.Host) *trace.Seen {
	t.Helper()
	seen, err := Send(t.Context(), &Packet{Spaces: spaces(from...), Protocol: p, To: netip.MustParseAddrPort(to)})
	if err != nil {
		t.Fatalf("%s to %s: %v", p, to, err)
	}
	if seen.Untraced != "" || seen.More != 0 {
		t.Errorf("%s to %s: untraced %q, %d more", p, to, seen.Untraced, seen.More)
	}
	for _, h := range from {
		out, err := h.Command(t.Context(), "nft", "list", "tables").CombinedOutput()
		if err != nil || strings.Contains(string(out), nftrace.TableName) {
			t.Errorf("tables after the trace: %v\n%s", err, out)
		}
	}
	return seen
}

// way is the hooks that the packet was seen in, each once for each namespace.
func way(s *trace.Seen) string {
	var out []string
	for _, st := range s.Steps {
		if at := st.Space + " " + st.Hook; len(out) == 0 || out[len(out)-1] != at {
			out = append(out, at)
		}
	}
	return strings.Join(out, ", ")
}

func dropOf(s *trace.Seen) *trace.Step {
	i := slices.IndexFunc(s.Steps, func(st trace.Step) bool { return st.Verdict == trace.Drop })
	if i < 0 {
		return &trace.Step{}
	}
	return &s.Steps[i]
}

func TestWay(t *testing.T) {
	t.Parallel()
	node, endpoint, client := machines(t)
	endpoint.Serve(svc.TCP, 80)
	endpoint.Serve(svc.UDP, 80)
	const through = "client output, client postrouting, node prerouting, node forward, node postrouting"
	for _, c := range []struct {
		name, to string
		protocol svc.Protocol
		from     []*testbed.Host
		answer   trace.Answer
		way      string
		table    string // that drops
		text     string // of the rule that does
	}{
		{"answered", "10.96.0.1:80", svc.TCP, []*testbed.Host{client, node}, trace.Accepted, through, "", ""},
		{"answered over IPv6", "[fd00:10:96::1]:80", svc.TCP, []*testbed.Host{client, node}, trace.Accepted, through, "", ""},
		{"a datagram", "10.96.0.1:80", svc.UDP, []*testbed.Host{client, node}, trace.Accepted, through, "", ""},
		{"from the node", "10.96.0.1:80", svc.TCP, []*testbed.Host{node}, trace.Accepted, "node output, node postrouting", "", ""},
		{"nothing listens", "10.96.0.1:81", svc.TCP, []*testbed.Host{client, node}, trace.Reset, through, "", ""},
		{"dropped by another program", "10.96.0.1:23", svc.TCP, []*testbed.Host{client, node}, trace.NoAnswer,
			"client output, client postrouting, node prerouting, node forward", "inet firewall", "no telnet"},
		{"rejected with ICMP", "10.96.0.1:24", svc.TCP, []*testbed.Host{client, node}, trace.Rejected,
			"client output, client postrouting, node prerouting, node forward", "inet firewall", "rejects"},
		{"rejected with a reset", netip.AddrPortFrom(endpoint.Addr4(), 25).String(), svc.TCP, []*testbed.Host{client, node}, trace.Reset,
			"client output, client postrouting, node prerouting, node forward", "inet firewall", "rejects"},
		{"dropped by the sender", "10.96.0.1:26", svc.TCP, []*testbed.Host{node}, trace.NoAnswer, "node output", "inet firewall", "drops"},
		{"rejected by the sender", "10.96.0.1:28", svc.TCP, []*testbed.Host{node}, trace.Reset, "node output", "inet firewall", "rejects"},
	} {
		s := send(t, c.protocol, c.to, c.from...)
		if s.Answer != c.answer || way(s) != c.way {
			t.Errorf("%s: %s by %s; want %s by %s", c.name, s.Answer, way(s), c.answer, c.way)
		}
		if d := dropOf(s); d.Table != c.table || !strings.Contains(d.Text, c.text) {
			t.Errorf("%s: dropped by %+v", c.name, d)
		}
		if c.answer != trace.Accepted {
			continue
		}
		last := s.Steps[len(s.Steps)-1]
		if !last.Passed || last.Destination.Addr() != endpoint.Addr(svc.FamilyOf(s.Destination.Addr())) || last.Out == "" {
			t.Errorf("%s: it ended at %+v", c.name, last)
		}
		if !slices.ContainsFunc(s.Steps, func(st trace.Step) bool { return st.Table == "inet translate" && st.Handle != 0 }) {
			t.Errorf("%s: the translation is not shown: %+v", c.name, s.Steps)
		}
	}
	if out, err := node.Command(t.Context(), "ip", "route", "add", "unreachable", "198.51.100.0/24").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if s := send(t, svc.TCP, "198.51.100.1:80", node); s.Answer != trace.NoRoute || s.Error == "" || len(s.Steps) > 0 {
		t.Errorf("no route: %+v", s)
	}
}

// What iptables translates is seen before and after; its rules are shown where they are in nf_tables.
func TestIPTables(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		node, endpoint, client := machines(t)
		endpoint.Serve(svc.TCP, 80)
		for _, rule := range []string{
			"-t nat -A PREROUTING -d 10.96.0.2 -m comment --comment default/web -j DNAT --to-destination " + endpoint.Addr4().String(),
			"-A FORWARD -p tcp --dport 27 -m comment --comment closed -j DROP",
		} {
			if out, err := node.Command(t.Context(), program, strings.Fields(rule)...).CombinedOutput(); err != nil {
				t.Fatalf("%s %s: %v\n%s", program, rule, err, out)
			}
		}
		s := send(t, svc.TCP, "10.96.0.2:80", client, node)
		if last := s.Steps[len(s.Steps)-1]; s.Answer != trace.Accepted || last.Destination.Addr() != endpoint.Addr4() {
			t.Errorf("%s: %s, it ended at %+v", program, s.Answer, last)
		}
		named := slices.ContainsFunc(s.Steps, func(st trace.Step) bool { return strings.Contains(st.Text, `"default/web"`) })
		if named != (program == "iptables-nft") {
			t.Errorf("%s: the rule is shown: %t: %+v", program, named, s.Steps)
		}
		s = send(t, svc.TCP, "10.96.0.2:27", client, node)
		if !strings.HasSuffix(way(s), "node prerouting, node forward") || s.Answer != trace.NoAnswer ||
			strings.Contains(dropOf(s).Text, `"closed"`) != (program == "iptables-nft") {
			t.Errorf("%s: %s by %s, dropped by %+v", program, s.Answer, way(s), dropOf(s))
		}
	}
}

// No program gets a connection: the first one that the endpoint accepts is that of a client who came later.
func TestNoConnection(t *testing.T) {
	t.Parallel()
	node, endpoint, client := machines(t)
	l := endpoint.ListenTCP(netip.AddrPortFrom(endpoint.Addr4(), 80))
	if s := send(t, svc.TCP, "10.96.0.1:80", client, node); s.Answer != trace.Accepted {
		t.Fatalf("answer %s", s.Answer)
	}
	c, err := client.Dial(t.Context(), svc.TCP, netip.MustParseAddrPort("10.96.0.1:80"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	if accepted.RemoteAddr().String() != c.LocalAddr().String() {
		t.Errorf("accepted %s, want %s", accepted.RemoteAddr(), c.LocalAddr())
	}
}

// Packets of others that are traced at the same time, by rules of others, are not shown.
func TestOnlyThisPacket(t *testing.T) {
	t.Parallel()
	node, endpoint, client := machines(t)
	endpoint.Serve(svc.TCP, 80)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for ctx.Err() == nil {
			_, _ = client.Ask(ctx, svc.TCP, netip.MustParseAddrPort("10.96.0.1:80"))
			<-pace.C
		}
	}()
	defer func() { stop(); <-done }()
	for range 5 {
		s := send(t, svc.TCP, "10.96.0.1:80", client, node)
		for _, st := range s.Steps {
			if st.Source.IsValid() && st.Source != s.Source {
				t.Fatalf("a packet from %s in the trace of %s", st.Source, s.Source)
			}
		}
		if n := len(slices.Compact(strings.Split(way(s), ", "))); n != 5 {
			t.Errorf("the way is %s", way(s))
		}
	}
}

// Only one trace is under way, and what one has left is removed.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	node, _, client := machines(t)
	tables := func() string {
		out, err := node.Command(t.Context(), "nft", "list", "tables").CombinedOutput()
		if err != nil {
			t.Fatalf("nft: %v\n%s", err, out)
		}
		return string(out)
	}
	packet := nftrace.Packet{
		Protocol: svc.TCP, Source: netip.MustParseAddrPort("192.0.2.1:1"), Destination: netip.MustParseAddrPort("192.0.2.2:2"),
	}
	node.Do(func() {
		first, err := nftrace.Start(packet)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := nftrace.Start(packet); !errors.Is(err, nftrace.ErrBusy) {
			t.Errorf("a second trace: %v", err)
		}
		if err := nftrace.Remove(t.Context()); err != nil || !strings.Contains(tables(), nftrace.TableName) {
			t.Errorf("a trace that is under way was removed: %v\n%s", err, tables())
		}
		if err := first.End(); err != nil || strings.Contains(tables(), nftrace.TableName) {
			t.Errorf("%v\n%s", err, tables())
		}
	})
	leave := func() {
		if out, err := node.Command(t.Context(), "nft", "add table ip "+nftrace.TableName).CombinedOutput(); err != nil {
			t.Fatalf("nft: %v\n%s", err, out)
		}
	}
	leave()
	if s := send(t, svc.TCP, "10.96.0.1:81", client, node); s.Answer != trace.Reset {
		t.Errorf("answer %s", s.Answer)
	}
	leave()
	node.Do(func() {
		if err := nftrace.Remove(t.Context()); err != nil || strings.Contains(tables(), nftrace.TableName) {
			t.Errorf("%v\n%s", err, tables())
		}
	})
}

// Rules for which there is no time left are shown without their text, and counted.
func TestNoTimeToDescribe(t *testing.T) {
	t.Parallel()
	node, _, client := machines(t)
	p := &Packet{Spaces: spaces(client, node), Protocol: svc.TCP, To: netip.MustParseAddrPort("10.96.0.1:24")}
	var packet *probe.Probe
	err := p.Spaces[0].in(func() (err error) {
		packet, err = probe.Open(p.Protocol, p.To)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer packet.Close()
	w := &watched{spaces: p.Spaces, traces: make([]*nftrace.Trace, len(p.Spaces))}
	defer func() {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	}()
	late, all := &trace.Seen{}, &trace.Seen{}
	if err := errors.Join(w.start(packet, p), w.send(t.Context(), packet, all)); err != nil {
		t.Fatal(err)
	}
	w.tell(late, time.Now())
	w.tell(all, time.Now().Add(testbed.Patience))
	for i := range late.Steps {
		if late.Steps[i].Text != "" || late.Steps[i].Handle != all.Steps[i].Handle {
			t.Errorf("without time: %+v, and with it %+v", late.Steps[i], all.Steps[i])
		}
	}
	if d := dropOf(late); late.Undescribed < 2 || all.Undescribed != 0 || dropOf(all).Text == "" || d.Handle == 0 {
		t.Errorf("%d rules without time, %d with it: %+v, %+v", late.Undescribed, all.Undescribed, d, dropOf(all))
	}
}

// A trace ends with its context.
func TestEnds(t *testing.T) {
	t.Parallel()
	node, _, client := machines(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := Send(ctx, &Packet{Spaces: spaces(client, node), Protocol: svc.TCP, To: netip.MustParseAddrPort("10.96.0.1:23")})
	if err == nil {
		t.Error("a cancelled trace has no error")
	}
}
