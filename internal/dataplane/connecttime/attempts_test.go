package connecttime

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// run runs a program on a host, and returns what it prints.
func run(t testing.TB, h *testbed.Host, args ...string) string {
	t.Helper()
	out, err := h.Command(t.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// attempting waits until a host has n connections without an answer.
func attempting(t testing.TB, h *testbed.Host, n int) {
	t.Helper()
	testbed.Until(t, "connections without an answer", func() error {
		if all := strings.Fields(run(t, h, "ss", "-HtnO", "state", "syn-sent")); len(all) != 4*n {
			return fmt.Errorf("%s has %q", h.Name(), all)
		}
		return nil
	})
}

// detoured waits until a host has n detours of each family to another one.
func detoured(t testing.TB, h, to *testbed.Host, n int) {
	t.Helper()
	testbed.Until(t, "detours", func() error {
		for word, a := range map[string]netip.Addr{"ip": to.Addr4(), "ip6": to.Addr(svc.IPv6)} {
			tables := run(t, h, "nft", "list", "tables")
			if !strings.Contains(tables, "table "+word+" "+detourTable) {
				return fmt.Errorf("there are only\n%s", tables)
			}
			if rules := run(t, h, "nft", "list", "table", word, detourTable); strings.Count(rules, " : "+a.String()+" ") != n {
				return fmt.Errorf("want %d detours to %s, have\n%s", n, a, rules)
			}
		}
		return nil
	})
}

// straight reports detours of a host.
func straight(t testing.TB, h *testbed.Host) error {
	t.Helper()
	if tables := run(t, h, "nft", "list", "tables"); strings.Contains(tables, detourTable) {
		return fmt.Errorf("left are\n%s", tables)
	}
	return nil
}

// Connections of the node and of a Pod to an endpoint that does not answer are led on when it leaves, and again when the next one does.
// Their programs see the Service. Where no endpoint is left they end at once. Connections with the endpoint itself go on trying.
// Cleanup removes detours, and they go by themselves when the connections have an answer.
func TestUnansweredAreLedOn(t *testing.T) { behind(t, unansweredAreLedOn) }

func unansweredAreLedOn(t *testing.T, r rig) {
	e := flows.NewEnv(t, r.createKnown)
	for _, name := range []string{"b", "d"} {
		run(t, e.Host(name), "nft", "add table inet silent; add chain inet silent in { type filter hook input priority 0; }; "+
			"add rule inet silent in tcp dport 9376 drop")
	}
	e.Apply(t, web(e, "d"), nil)
	clients := []*testbed.Host{e.Node, e.Host("c")}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	inside := clients[1].Command(ctx, "sleep", "300") // namespaces are found by their processes
	if err := inside.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		_ = inside.Wait()
	}()
	var all sync.WaitGroup
	dial := func(h *testbed.Host, to netip.AddrPort, answered func(name string, seen string, err error)) {
		all.Go(func() {
			c, err := h.Dial(ctx, svc.TCP, to)
			if err != nil {
				answered("", "", err)
				return
			}
			defer func() { _ = c.Close() }()
			got, err := testbed.AskOn(c)
			answered(got.Name, c.RemoteAddr().String(), err)
		})
	}
	for _, h := range clients {
		for _, to := range []netip.AddrPort{web4, web6} {
			dial(h, to, func(name, seen string, err error) {
				if name != "a" || seen != to.String() || err != nil {
					t.Errorf("%s to %s: answered by %q as %s, %v; want a", h.Name(), to, name, seen, err)
				}
			})
		}
	}
	direct, stop := context.WithCancel(ctx)
	all.Go(func() {
		c, err := e.Node.Dial(direct, svc.TCP, netip.AddrPortFrom(e.Host("d").Addr4(), 9376))
		if err == nil {
			_ = c.Close()
			t.Error("a connection with the endpoint itself was led on")
		}
	})
	attempting(t, e.Node, 3)
	attempting(t, clients[1], 2)
	e.Apply(t, web(e, "b"), nil)
	detoured(t, e.Node, e.Host("b"), len(clients))
	e.Node.Do(func() {
		if err := errors.Join(Cleanup(), straight(t, e.Node)); err != nil {
			t.Error(err)
		}
	})
	e.Apply(t, web(e, "a"), nil)
	testbed.Until(t, "the end of attempts", func() error {
		if left := run(t, clients[1], "ss", "-HtnO", "state", "syn-sent"); left != "" {
			return fmt.Errorf("%s has %s", clients[1].Name(), left)
		}
		return nil
	})
	attempting(t, e.Node, 1)
	stop()
	all.Wait()
	testbed.Until(t, "the end of detours", func() error { return straight(t, e.Node) })

	e.Apply(t, web(e, "d"), nil)
	for _, h := range clients {
		dial(h, web4, func(name, _ string, err error) {
			if err == nil {
				t.Errorf("%s: answered by %s, want an error", h.Name(), name)
			}
		})
		attempting(t, h, 1)
	}
	begin := time.Now()
	e.Apply(t, web(e), nil)
	all.Wait()
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("without an endpoint the attempts ended after %s", took)
	}
}
