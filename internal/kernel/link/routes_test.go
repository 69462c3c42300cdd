package link_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
)

func TestRoutes(t *testing.T) {
	node(t)
	outside(t)
	run(t, "", "ip", "route", "add", "10.99.0.0/24", "via", "192.0.2.2", "proto", "static")
	route := func(dst, via string) link.Route {
		return link.Route{Dst: netip.MustParsePrefix(dst), Via: netip.MustParseAddr(via)}
	}
	list := func() string {
		out := run(t, "", "ip", "route", "show", "proto", "250") + run(t, "", "ip", "-6", "route", "show", "proto", "250")
		return strings.Join(strings.Fields(out), " ")
	}
	two := []link.Route{route("10.244.2.0/24", "192.0.2.2"), route("fd00:10:244:2::/64", "2001:db8::2")}
	moved := []link.Route{route("10.244.2.0/24", "192.0.2.3"), route("10.244.3.0/24", "192.0.2.2")}
	var routes link.Routes
	for _, c := range []struct {
		name        string
		want        []link.Route
		has, hasNot []string
	}{
		{"two", two, []string{"10.244.2.0/24 via 192.0.2.2", "fd00:10:244:2::/64 via 2001:db8::2"}, nil},
		{"again", two, []string{"10.244.2.0/24 via 192.0.2.2", "fd00:10:244:2::/64 via 2001:db8::2"}, nil},
		{"moved", moved, []string{"10.244.2.0/24 via 192.0.2.3", "10.244.3.0/24 via 192.0.2.2"}, []string{"fd00", "10.244.2.0/24 via 192.0.2.2"}},
		{"none", nil, nil, []string{"via"}},
	} {
		if failed, err := routes.Set(c.want); err != nil || len(failed) > 0 {
			t.Fatalf("%s: %v, %v", c.name, failed, err)
		}
		got := list()
		for _, h := range c.has {
			if !strings.Contains(got, h) {
				t.Errorf("%s: no %q in %q", c.name, h, got)
			}
		}
		for _, h := range c.hasNot {
			if strings.Contains(got, h) {
				t.Errorf("%s: %q still in %q", c.name, h, got)
			}
		}
	}
	failed, err := new(link.Routes).Set([]link.Route{route("10.244.9.0/24", "203.0.113.9"), route("10.244.8.0/24", "192.0.2.2")})
	if err != nil || len(failed) != 1 || failed[netip.MustParsePrefix("10.244.9.0/24")] == nil {
		t.Errorf("a neighbour out of reach gave %v, %v; want an error of its range", failed, err)
	}
	if got := list(); !strings.Contains(got, "10.244.8.0/24") {
		t.Errorf("one bad route kept the good one away: %q", got)
	}
	if got := run(t, "", "ip", "route", "show", "proto", "static"); !strings.Contains(got, "10.99.0.0/24") {
		t.Errorf("a foreign route is gone: %q", got)
	}
}

// A route costs a message to the kernel when it is new or ends, and nothing else is asked or
// told: what another program has deleted comes back when all are compared.
func TestRoutesCostWhatChanges(t *testing.T) {
	node(t)
	outside(t)
	var routes link.Routes
	var want []link.Route
	add := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			want = append(want, link.Route{
				Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 0}), 24), Via: netip.MustParseAddr("192.0.2.2"),
			})
		}
		if failed, err := routes.Set(want); err != nil || len(failed) > 0 {
			t.Fatalf("%v, %v", failed, err)
		}
	}
	has := func(i int) bool {
		return strings.Contains(run(t, "", "ip", "route", "show", "proto", "250"), fmt.Sprintf("10.244.%d.0/24 via", i))
	}
	add(1, 200)
	if !has(7) || !has(199) {
		t.Fatal("routes are missing")
	}
	run(t, "", "ip", "route", "delete", "10.244.7.0/24", "metric", fmt.Sprint(link.RouteMetric))
	add(200, 201)
	if has(7) || !has(200) {
		t.Errorf("one more route: all were compared (%v), or it is missing (%v)", has(7), !has(200))
	}
	routes.Forget()
	add(201, 201)
	if !has(7) {
		t.Error("a comparison leaves a route out")
	}
	run(t, "", "ip", "route", "delete", "10.244.9.0/24", "metric", fmt.Sprint(link.RouteMetric))
	want = want[:0] // one that is gone already ends without an error
	add(50, 51)
	if !has(50) || has(51) || has(9) {
		t.Errorf("the routes are\n%s", run(t, "", "ip", "route"))
	}
	if err := routes.Add([]link.Route{{Dst: cluster[0]}}); err != nil {
		t.Fatal(err)
	}
	add(51, 52)
	if strings.Contains(run(t, "", "ip", "route"), "unreachable 10.244.0.0/16") {
		t.Error("an added route outlives the next Set")
	}
}

// Routes that were added stay beside those that are there, until the next comparison.
func TestRoutesThatWereAdded(t *testing.T) {
	node(t)
	all := link.Route{Dst: cluster[0]}
	for range 2 {
		if err := new(link.Routes).Add([]link.Route{all}); err != nil {
			t.Fatal(err)
		}
	}
	if got := run(t, "", "ip", "route"); !strings.Contains(got, "unreachable 10.244.0.0/16") {
		t.Errorf("the routes are\n%s", got)
	}
	if failed, err := new(link.Routes).Set(nil); err != nil || len(failed) > 0 || strings.Contains(run(t, "", "ip", "route"), "unreachable") {
		t.Errorf("%v, %v; the routes are\n%s", failed, err, run(t, "", "ip", "route"))
	}
}

// A route that is not ours is neither replaced nor removed, whatever its metric, and
// takes precedence where it has a lower one.
func TestForeignRoutesStay(t *testing.T) {
	node(t)
	outside(t)
	foreign := []string{
		"default via 192.0.2.2", "10.244.5.0/24 via 192.0.2.3", "10.244.6.0/24 via 192.0.2.3 metric 2500",
	}
	for _, r := range foreign {
		run(t, "", "ip", append([]string{"route", "add"}, strings.Fields(r)...)...)
	}
	route := func(dst string) link.Route {
		return link.Route{Dst: netip.MustParsePrefix(dst), Via: netip.MustParseAddr("192.0.2.2")}
	}
	failed, err := new(link.Routes).Set([]link.Route{route("0.0.0.0/0"), route("10.244.5.0/24"), route("10.244.6.0/24")})
	if err != nil || len(failed) != 1 || failed[netip.MustParsePrefix("10.244.6.0/24")] == nil {
		t.Errorf("failed %v, %v; want that of 10.244.6.0/24 alone, which collides", failed, err)
	}
	if got := run(t, "", "ip", "route", "get", "10.244.5.9"); !strings.Contains(got, "via 192.0.2.3") {
		t.Errorf("the administrator's route does not lead: %s", got)
	}
	for range 2 {
		all := run(t, "", "ip", "route")
		for _, r := range foreign {
			if !strings.Contains(strings.ReplaceAll(all, " dev up0", ""), r) {
				t.Errorf("no %q in\n%s", r, all)
			}
		}
		if _, err := new(link.Routes).Set(nil); err != nil {
			t.Fatal(err)
		}
	}
}

// Who sends to an address of the node's own range that no pod has is told so at
// once, though a default route leads out.
func TestUnusedAddressesAreUnreachable(t *testing.T) {
	node(t)
	outside(t)
	run(t, "", "ip", "route", "add", "default", "via", "192.0.2.2")
	run(t, "", "ip", "-6", "route", "add", "default", "via", "2001:db8::2")
	p := pod(t, 2)
	var own []link.Route
	for _, dst := range []string{"10.244.1.0/24", "fd00:10:244:1::/64"} {
		own = append(own, link.Route{Dst: netip.MustParsePrefix(dst)})
	}
	for range 2 {
		if failed, err := new(link.Routes).Set(own); err != nil || len(failed) > 0 {
			t.Fatal(failed, err)
		}
	}
	for i, dead := range []string{"10.244.1.77", "fd00:10:244:1::77"} {
		for _, ns := range []string{self, p.Netns} {
			start := time.Now()
			// A pod's first packet gets its answer while connect(2) still holds the
			// socket, which then fails when it sends again, after 1 s.
			err := netns.Do(ns, func() error {
				_, err := net.DialTimeout("tcp", netip.AddrPortFrom(netip.MustParseAddr(dead), 80).String(), 20*time.Second)
				return err
			})
			if !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ENETUNREACH) {
				t.Errorf("%s from %s: %v, want that there is no route to host", dead, ns, err)
			}
			t.Logf("%s from %s: %v after %v", dead, ns, err, time.Since(start).Round(time.Microsecond))
		}
		listen(t, p.Netns, netip.AddrPortFrom(p.Addrs[i], 80))
		if _, err := ask(self, netip.AddrPortFrom(p.Addrs[i], 80)); err != nil {
			t.Errorf("the pod that is there: %v", err)
		}
	}
	if err := link.Cleanup(); err != nil {
		t.Fatal(err)
	}
	if got := run(t, "", "ip", "route") + run(t, "", "ip", "-6", "route"); strings.Contains(got, "unreachable") {
		t.Errorf("left after Cleanup:\n%s", got)
	}
}

// BenchmarkOneMoreRoute is a Node that comes and goes among 5,000, when what was written is
// remembered, and when the kernel is asked for all routes as every minute.
func BenchmarkOneMoreRoute(b *testing.B) {
	const nodes = 5000
	want := make([]link.Route, nodes+1)
	for i := range want {
		want[i].Dst = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24) // unreachable
	}
	for _, remembered := range []bool{true, false} {
		b.Run(map[bool]string{true: "remembered", false: "compared"}[remembered], func(b *testing.B) {
			var routes link.Routes
			set := func(n int) {
				if failed, err := routes.Set(want[:n]); err != nil || len(failed) > 0 {
					b.Fatal(failed, err)
				}
			}
			b.Cleanup(func() { set(0) })
			set(nodes)
			for n := nodes + 1; b.Loop(); n = 2*nodes + 1 - n {
				if !remembered {
					routes.Forget()
				}
				set(n)
			}
		})
	}
}
