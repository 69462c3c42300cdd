package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// on calls f with a Conn of a host.
func on(t testing.TB, h *testbed.Host, f func(*Conn) error) {
	t.Helper()
	var err error
	h.Do(func() {
		var c *Conn
		if c, err = Dial(); err == nil {
			defer func() { _ = c.Close() }()
			err = f(c)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The kernel reads out what is in scope, and nothing else.
func TestScope(t *testing.T) {
	host, ep := setUp(t)
	conn, err := host.Dial(t.Context(), svc.UDP, ap("10.96.0.1:53"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := testbed.AskOn(conn); err != nil {
		t.Fatal(err)
	}
	open(t, host, svc.UDP, "10.96.0.2:53", "[fd00:10:96::2]:53")
	open(t, host, svc.TCP, "10.96.0.1:53")
	ep4 := netip.AddrPortFrom(ep.Addr4(), 5353)
	answered := Entry{Protocol: svc.UDP, OrigDst: ap("10.96.0.1:53"), ReplySrc: ep4, Replied: true, Marked: true}
	waits := Entry{Protocol: svc.UDP, OrigDst: ap("10.96.0.2:53"), ReplySrc: ap("10.96.0.2:53")}
	waits6 := Entry{Protocol: svc.UDP, OrigDst: ap("[fd00:10:96::2]:53"), ReplySrc: ap("[fd00:10:96::2]:53")}
	tcp := Entry{Protocol: svc.TCP, OrigDst: ap("10.96.0.1:53"), ReplySrc: ep4, Replied: true, Assured: true, Marked: true}
	sweep := func(scope Scope, remove Entry, want ...Entry) {
		t.Helper()
		seen := map[Entry]bool{}
		var n int
		on(t, host, func(c *Conn) (err error) {
			n, err = c.Sweep(t.Context(), scope, func(e Entry) bool {
				if e.Protocol == svc.UDP && (e.Left <= 0 || e.Left > UDPTimeout() || e.Assured) {
					t.Errorf("a new entry: %+v", e)
				}
				e.Left = 0
				seen[e] = true
				return e == remove
			})
			return err
		})
		same := len(seen) == len(want)
		for _, e := range want {
			same = same && seen[e]
		}
		if removed := slices.Contains(want, remove); !same || n > 1 || removed != (n == 1) {
			t.Errorf("%+v: %d removed, seen %v, want %v", scope, n, seen, want)
		}
	}
	sweep(Scope{}, Entry{}, answered, waits, waits6, tcp)
	sweep(Scope{Family: svc.IPv4}, Entry{}, answered, waits, tcp)
	sweep(Scope{Family: svc.IPv6}, Entry{}, waits6)
	sweep(Scope{Protocol: svc.TCP}, Entry{}, tcp)
	sweep(Scope{Protocol: svc.UDP}, Entry{}, answered, waits, waits6)
	sweep(Scope{Protocol: svc.UDP, Family: svc.IPv6}, Entry{}, waits6)
	sweep(Scope{Protocol: svc.SCTP}, Entry{})
	sweep(Scope{Protocol: svc.TCP, Unreplied: true}, Entry{})
	sweep(Scope{Unreplied: true}, waits, waits, waits6)
	sweep(Scope{Protocol: svc.UDP, Unreplied: true}, waits6, waits6)
	sweep(Scope{Protocol: svc.UDP}, answered, answered)
	sweep(Scope{}, Entry{}, tcp)
}

// Of the connections that differ from it in one thing each, a filter takes none.
func TestForgetTakesOnlyWhatItIsAskedFor(t *testing.T) {
	host, ep := setUp(t)
	deaf := host.Pod("deaf")
	silence := "add table ip deaf; add chain ip deaf in { type filter hook input priority 0; }; add rule ip deaf in tcp flags syn drop"
	if out, err := deaf.Command(t.Context(), "nft", silence).CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	fronts := []string{"10.96.0.7:80", "10.96.0.7:81", "10.96.0.8:80"}
	var rules strings.Builder
	rules.WriteString("table ip more {\n chain out {\n type nat hook output priority -99\n")
	from := uint16(40000)
	dials := map[uint16]netip.AddrPort{}
	for _, at := range fronts {
		for _, port := range []int{8080, 8081} {
			f := ap(at)
			fmt.Fprintf(&rules, "ip daddr %s tcp dport %d tcp sport %d dnat to %s:%d\n", f.Addr(), f.Port(), from, deaf.Addr4(), port)
			dials[from] = f
			from++
		}
	}
	rules.WriteString("}\n}\n")
	nft := host.Command(t.Context(), "nft", "-f", "-")
	nft.Stdin = strings.NewReader(rules.String())
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	for from, to := range dials {
		ctx, giveUp := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			if c, err := host.DialFrom(ctx, svc.TCP, netip.AddrPortFrom(host.Addr4(), from), to); err == nil {
				_ = c.Close()
			}
		}()
		t.Cleanup(func() { giveUp(); <-done })
	}
	open(t, host, svc.TCP, "10.96.0.1:53")
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(deaf.Addr4(), port) }
	entries := func() map[Flow]bool {
		out := map[Flow]bool{}
		on(t, host, func(c *Conn) error {
			_, err := c.Sweep(t.Context(), Scope{Protocol: svc.TCP}, func(e Entry) bool {
				out[Flow{e.Protocol, e.OrigDst, e.ReplySrc}] = true
				return false
			})
			return err
		})
		return out
	}
	testbed.Until(t, "seven connections", func() error {
		if n := len(entries()); n != 7 {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
	gone := Flow{svc.TCP, ap("10.96.0.7:80"), at(8080)}
	answered := Flow{svc.TCP, ap("10.96.0.1:53"), netip.AddrPortFrom(ep.Addr4(), 5353)}
	before := entries()
	if !before[gone] || !before[answered] {
		t.Fatalf("the table has %v", before)
	}
	on(t, host, func(c *Conn) error {
		done, err := c.Forget(t.Context(), []Flow{gone, answered})
		if c.noFilter {
			t.Skip("needs a kernel that deletes by a filter (Linux 6.12)")
		}
		if !done && err == nil {
			t.Error("the kernel can, and it was not done")
		}
		return err
	})
	after := entries()
	delete(before, gone)
	for f := range before {
		if !after[f] {
			t.Errorf("%v is gone too", f)
		}
	}
	if after[gone] {
		t.Errorf("%v is still there", gone)
	}
	// What it cannot compare it does not try.
	on(t, host, func(c *Conn) error {
		six := Flow{svc.TCP, ap("[fd00::1]:80"), ap("[fd00::2]:80")}
		for _, flows := range [][]Flow{{six}, {gone, six}, {{svc.SCTP, gone.OrigDst, gone.ReplySrc}}, {{svc.TCP, gone.OrigDst, netip.AddrPort{}}},
			{{svc.TCP, ap("0.0.0.0:30080"), gone.ReplySrc}}} {
			if done, err := c.Forget(t.Context(), flows); done || err != nil {
				t.Errorf("Forget(%v) = %t, %v", flows, done, err)
			}
		}
		return nil
	})
	if n := len(entries()); n != len(after) {
		t.Errorf("%d connections are left of %d", n, len(after))
	}
}

// BenchmarkRemoval is what the connections of one removed endpoint of TCP cost, on this
// machine's number of buckets and with few entries: by a filter, and by reading the
// table.
func BenchmarkRemoval(b *testing.B) {
	n := testbed.NewNetwork(b)
	host := n.Host("node")
	rules := "add table ip t; add chain ip t o { type filter hook output priority 0; }; add rule ip t o ct state new counter"
	if out, err := host.Command(b.Context(), "nft", rules).CombinedOutput(); err != nil {
		b.Fatalf("nft: %v\n%s", err, out)
	}
	conn, err := host.Dial(b.Context(), svc.UDP, netip.AddrPortFrom(host.Addr4(), 9))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, _ = conn.Write([]byte("?"))
	gone := []Flow{{svc.TCP, ap("10.96.0.7:80"), ap("10.244.0.5:8080")}}
	b.Run("filter", func(b *testing.B) {
		on(b, host, func(c *Conn) error {
			for b.Loop() {
				if done, err := c.Forget(b.Context(), gone); !done || err != nil {
					return fmt.Errorf("done %t: %w", done, err)
				}
			}
			return nil
		})
	})
	for _, family := range []svc.Family{svc.IPv4, 0} {
		b.Run(fmt.Sprintf("read family %d", family), func(b *testing.B) {
			on(b, host, func(c *Conn) error {
				for b.Loop() {
					scope := Scope{Family: family, Protocol: svc.TCP, Unreplied: true}
					if _, err := c.Sweep(b.Context(), scope, func(Entry) bool { return false }); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}
