package nft

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/fairlead/fairlead/internal/testbed/questions"
)

func create(t testing.TB, _ *testbed.Host) dataplane.Applier {
	t.Helper()
	p, err := New(Config{DropInvalid: true})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestFlows(t *testing.T) { flows.Run(t, "nft", create) }

func TestStories(t *testing.T) { flows.Stories(t, create) }

func TestExplanations(t *testing.T) { questions.Run(t, "nft", create) }

// behaviour 46, D4: in turn, each endpoint as often as every other, and the turns
// of one frontend are not disturbed by those of another.
func TestRoundRobin(t *testing.T) {
	e := flows.NewEnv(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := New(Config{Balance: dataplane.RoundRobin})
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
	a, b, d := e.Host("a"), e.Host("b"), e.Host("d")
	var list []table.Endpoint
	for _, h := range []*testbed.Host{a, b, d} {
		list = append(list, table.Endpoint{Addr: netip.AddrPortFrom(h.Addr4(), 9376)})
	}
	first, second := flows.AP("10.96.0.10:80"), flows.AP("10.96.0.11:80")
	e.Apply(t, table.New(
		flows.Port("first", "", svc.IPv4, svc.TCP, table.Frontend{Addr: first, Endpoints: list}),
		flows.Port("second", "", svc.IPv4, svc.TCP, table.Frontend{Addr: second, Endpoints: list}),
	), nil)
	seen := map[string]int{}
	for i := range 24 {
		got, err := e.Host("c").Ask(t.Context(), svc.TCP, first)
		if err != nil {
			t.Fatal(err)
		}
		seen[got.Name]++
		for range i % 3 {
			if _, err := e.Host("c").Ask(t.Context(), svc.TCP, second); err != nil {
				t.Fatal(err)
			}
		}
	}
	if seen["a"] != 8 || seen["b"] != 8 || seen["d"] != 8 {
		t.Errorf("24 connections went to %v, want 8 to each", seen)
	}
}

func TestLostPacketsAreCounted(t *testing.T) { flows.Counts(t, create) }

// Pings to a ClusterIP, each with another checksum in the place of a port, do
// not fill the set that counts what is refused.
func TestPingsAreNotCounted(t *testing.T) {
	e := flows.NewEnv(t, create)
	e.Apply(t, table.New(
		flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: flows.AP("10.96.0.10:80")}),
		flows.Port("web", "", svc.IPv6, svc.TCP, table.Frontend{Addr: flows.AP("[fd00:10:96::10]:80")}),
	), nil)
	for _, c := range []struct {
		network, to, table string
		echo               byte
	}{{"ip4:icmp", "10.96.0.10", "ip", 8}, {"ip6:ipv6-icmp", "fd00:10:96::10", "ip6", 128}} {
		e.Host("c").Do(func() {
			ping, err := net.Dial(c.network, c.to)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ping.Close() }()
			for i := range byte(5) {
				// The kernel makes the checksum for IPv6; for IPv4 the words add up to
				// what the other has not.
				if _, err := ping.Write([]byte{c.echo, 0, ^c.echo, ^i, 0, 0, 0, i}); err != nil {
					t.Fatal(err)
				}
			}
		})
		if _, err := e.Host("c").Ask(t.Context(), svc.TCP, netip.AddrPortFrom(netip.MustParseAddr(c.to), 99)); !testbed.Refused(err) {
			t.Errorf("asked another port: %v, want refused", err)
		}
		e.Node.Do(func() {
			text := flows.Command(t, "", "nft", "list", "set", c.table, "fairlead", "refused")
			if strings.Count(text, "counter packets") != 1 || !strings.Contains(text, c.to+" . tcp . 99 ") {
				t.Errorf("counted\n%s", text)
			}
		})
	}
}
