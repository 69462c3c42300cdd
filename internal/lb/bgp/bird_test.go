package bgp_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/bird"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

var (
	vip4 = netip.MustParseAddr("198.51.100.7")
	vip6 = netip.MustParseAddr("2001:db8:7::7")
)

const (
	route4, route6 = "198.51.100.7/32", "2001:db8:7::7/128"
	servicePort    = 80
)

// site is an outside client, a router with BIRD, and two nodes that serve the same
// addresses and have a session with the router.
type site struct {
	client *testbed.Host
	router *bird.Router
	nodes  []*node
}

func neighbor(h *testbed.Host, options ...string) string {
	return fmt.Sprintf("neighbor %s as %d; %s", h.Addr4(), nodeAS, strings.Join(options, " "))
}

func peer(router *testbed.Host) bgp.Peer {
	return bgp.Peer{Name: router.Name(), Address: router.Addr4(), LocalASN: nodeAS, PeerASN: routerAS}
}

func newSite(t *testing.T, options ...string) *site {
	t.Helper()
	n := testbed.NewNetwork(t)
	s := &site{client: n.Outside("client")}
	router := n.Host("router")
	s.client.Route(netip.MustParsePrefix("198.51.100.0/24"), router.Addr4())
	s.client.Route(netip.MustParsePrefix("2001:db8:7::/64"), router.Addr6())
	hosts := []*testbed.Host{n.Host("node1"), n.Host("node2")}
	var neighbors []string
	for _, h := range hosts {
		neighbors = append(neighbors, neighbor(h, options...))
		h.AddAddr(vip4)
		h.AddAddr(vip6)
		h.Serve(svc.TCP, servicePort)
	}
	s.router = bird.Start(t, router, neighbors...)
	for _, h := range hosts {
		s.nodes = append(s.nodes, startNode(t, h))
	}
	return s
}

// ask makes a connection of the client and returns which node answered.
func (s *site) ask(t *testing.T, a netip.Addr) string {
	t.Helper()
	return bird.Connect(t, s.client, netip.AddrPortFrom(a, servicePort))
}

// Every node that announces an address gets its share of connections, in both
// families over one session; when a node falls silent, the rest gets them all after
// the hold time.
func TestConnectionsAreSpreadAndSurviveADeadNode(t *testing.T) {
	s := newSite(t)
	for _, n := range s.nodes {
		n.announce(vip4, vip6)
		p := peer(s.router.Host)
		p.HoldTime = bgp.MinHoldTime
		n.setPeers(p)
	}
	s.router.Routes(route4, s.nodes[0].Addr4(), s.nodes[1].Addr4())
	s.router.Routes(route6, s.nodes[0].Addr6(), s.nodes[1].Addr6())
	for _, a := range []netip.Addr{vip4, vip6} {
		by := map[string]int{}
		for range 64 {
			by[s.ask(t, a)]++
		}
		// 2 to the power of 63 to one against one node alone.
		if len(by) != 2 {
			t.Errorf("%s: answers by %v, want both nodes", a, by)
		}
	}

	link := s.nodes[0].Command(context.Background(), "ip", "link", "set", "eth0", "down")
	if out, err := link.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s.router.Routes(route4, s.nodes[1].Addr4())
	s.router.Routes(route6, s.nodes[1].Addr6())
	for _, a := range []netip.Addr{vip4, vip6} {
		for range 16 {
			if name := s.ask(t, a); name != "node2" {
				t.Fatalf("%s: %s answered", a, name)
			}
		}
	}
	s.nodes[0].Says(`peer router: Idle: .*hold time of 3s`)
}

// No connection that begins after the process has ended comes to the node: the router
// has taken the withdrawal by then, so that the proxy may stop. Others do not fail
// either, but for one whose handshake is under way while the router changes its next
// hop: its last packet comes to the other node, which resets it.
func TestWithdrawalComesBeforeTheEnd(t *testing.T) {
	s := newSite(t)
	for _, n := range s.nodes {
		n.announce(vip4)
		n.setPeers(peer(s.router.Host))
	}
	s.router.Routes(route4, s.nodes[0].Addr4(), s.nodes[1].Addr4())

	var mu sync.Mutex
	by, after := map[string]int{}, map[string]int{}
	stopped := make(chan struct{})
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				gone := false
				select {
				case <-stopped:
					gone = true
				default:
				}
				answer, err := s.client.Ask(context.Background(), svc.TCP, netip.AddrPortFrom(vip4, servicePort))
				if errors.Is(err, syscall.ECONNRESET) && !gone {
					continue
				}
				if err != nil {
					t.Errorf("a connection failed: %v", err)
					return
				}
				mu.Lock()
				by[answer.Name]++
				if gone {
					after[answer.Name]++
				}
				mu.Unlock()
			}
		})
	}
	count := func(m map[string]int, name string) func() error {
		return func() error {
			mu.Lock()
			defer mu.Unlock()
			if m[name] < 20 {
				return fmt.Errorf("%d answers of %s", m[name], name)
			}
			return nil
		}
	}
	testbed.Until(t, "answers of node1", count(by, "node1"))
	began := time.Now()
	s.nodes[0].Stop()
	t.Logf("withdrawn %s after SIGTERM", time.Since(began))
	close(stopped)
	testbed.Until(t, "answers after the withdrawal", count(after, "node2"))
	close(done)
	wg.Wait()
	if after["node1"] > 0 {
		t.Errorf("node1 answered %d connections that began after it had withdrawn the address", after["node1"])
	}
}

// Withdrawing one address leaves the others, and one that was not announced is no error.
func TestWithdraw(t *testing.T) {
	s := newSite(t)
	n := s.nodes[0]
	other := netip.MustParseAddr("198.51.100.8")
	n.announce(vip4, vip6, other)
	n.setPeers(peer(s.router.Host))
	s.router.Routes(route4, n.Addr4())
	n.order(order{Withdraw: []netip.Addr{vip4, vip6, vip4}})
	s.router.Routes(route4)
	s.router.Routes(route6)
	s.router.Routes("198.51.100.8/32", n.Addr4())
	n.announce(vip4)
	s.router.Routes(route4, n.Addr4())
}

// A session with the right password works; with a wrong one or none it does not come
// up, its status says what may be the cause, and the other session does not notice.
func TestPassword(t *testing.T) {
	net := testbed.NewNetwork(t)
	h := net.Host("node1")
	good := bird.Start(t, net.Host("router"), neighbor(h, `password "right";`))
	bad := bird.Start(t, net.Host("other"), neighbor(h, `password "right";`))
	n := startNode(t, h)
	n.announce(vip4)
	right, wrong := peer(good.Host), peer(bad.Host)
	right.Password, wrong.Password = "right", "wrong"
	n.setPeers(right, wrong)
	good.Routes(route4, h.Addr4())
	n.Says(`peer other: Idle: cannot connect: i/o timeout: .* has another password`)
	bad.Routes(route4)

	wrong.Password = ""
	n.setPeers(right, wrong)
	n.Says(`peer other: Idle: cannot connect: i/o timeout: .* wants a password`)
	wrong.Password = "right"
	n.setPeers(right, wrong)
	bad.Routes(route4, h.Addr4())
	if log := n.Log(); strings.Count(log, "peer router: Established") != 1 || strings.Contains(log, "peer router: Idle") {
		t.Errorf("the session with the right password was disturbed:\n%s", log)
	}
	if strings.Contains(n.Log(), "right") && strings.Contains(n.Log(), `password=`) {
		t.Errorf("a password is in the log:\n%s", n.Log())
	}
}

// Communities, the local preference and a longer path arrive, also when they change. An internal router gets no path.
func TestAttributesArrive(t *testing.T) {
	net := testbed.NewNetwork(t)
	h := net.Host("node1")
	outer := bird.Start(t, net.Host("router"), neighbor(h))
	inner := bird.Start(t, net.Host("inner"), fmt.Sprintf("neighbor %s as %d;", h.Addr4(), routerAS))
	n := startNode(t, h)
	var communities []bgp.Community
	for _, text := range []string{"64513:100", "no-export", "64513:1:4294967295"} {
		c, err := bgp.ParseCommunity(text)
		if err != nil {
			t.Fatal(err)
		}
		communities = append(communities, c)
	}
	n.order(order{Announce: []netip.Addr{vip4, vip6}, Attributes: bgp.Attributes{Communities: communities, LocalPreference: new(uint32(250))}})
	internal := peer(inner.Host)
	internal.LocalASN = routerAS
	n.setPeers(peer(outer.Host), internal)
	has := func(b *bird.Router, route string, want ...string) {
		t.Helper()
		testbed.Until(t, fmt.Sprintf("%s to have %s with %q", b.Name(), route, want), func() error {
			out := b.Ask("show", "route", route, "all")
			for _, w := range want {
				if !regexp.MustCompile(w).MatchString(out) {
					return fmt.Errorf("it has\n%s", out)
				}
			}
			return nil
		})
	}
	for _, route := range []string{route4, route6} {
		has(outer, route, `(?m)BGP.as_path: 64513$`, `BGP.community: \(64513,100\) \(65535,65281\)`,
			`BGP.large_community: \(64513, 1, 4294967295\)`, `BGP.local_pref: 100`)
		has(inner, route, `(?m)BGP.as_path: *$`, `BGP.local_pref: 250`, `BGP.community: \(64513,100\)`)
	}
	n.order(order{Announce: []netip.Addr{vip4}, Attributes: bgp.Attributes{LocalPreference: new(uint32(7)), ASPathPrepend: 2}})
	has(inner, route4, `(?m)BGP.local_pref: 7$`, `(?m)BGP.as_path: *$`)
	has(outer, route4, `(?m)BGP.as_path: 64513 64513 64513$`)
	has(outer, route6, `(?m)BGP.as_path: 64513$`)
	has(inner, route6, `BGP.local_pref: 250`)
	if out := inner.Ask("show", "route", route4, "all"); strings.Contains(out, "community") {
		t.Errorf("the communities are still there:\n%s", out)
	}
	n.order(order{Announce: []netip.Addr{vip4}, Attributes: bgp.Attributes{ASPathPrepend: 1}})
	has(outer, route4, `(?m)BGP.as_path: 64513 64513$`)
}

// One prefix stands for all addresses in it, and stays until the last is withdrawn.
func TestAggregation(t *testing.T) {
	s := newSite(t)
	n := s.nodes[0]
	a, b := netip.MustParseAddr("198.51.100.65"), netip.MustParseAddr("198.51.100.70")
	n.order(order{Announce: []netip.Addr{a, b}, Attributes: bgp.Attributes{AggregationLength: 26}})
	n.order(order{Announce: []netip.Addr{vip6}, Attributes: bgp.Attributes{AggregationLength: 64}})
	n.setPeers(peer(s.router.Host))
	s.router.Routes("198.51.100.64/26", n.Addr4())
	s.router.Routes("2001:db8:7::/64", n.Addr6())
	s.router.Routes("198.51.100.65/32")
	n.order(order{Withdraw: []netip.Addr{a, vip6}})
	s.router.Routes("2001:db8:7::/64")
	s.router.Routes("198.51.100.64/26", n.Addr4())
	n.order(order{Announce: []netip.Addr{b}})
	s.router.Routes("198.51.100.64/26")
	s.router.Routes("198.51.100.70/32", n.Addr4())
}

// A router with graceful restart keeps the routes of a killed process, over which
// connections go on, and drops those that the next process does not announce.
func TestGracefulRestart(t *testing.T) {
	s := newSite(t, "graceful restart on;")
	gone := netip.MustParseAddr("198.51.100.8")
	p := peer(s.router.Host)
	p.GracefulRestart, p.RestartTime = true, time.Minute
	n := s.nodes[0]
	n.announce(vip4, vip6, gone)
	n.setPeers(p)
	s.router.Routes(route4, n.Addr4())
	s.router.Routes("198.51.100.8/32", n.Addr4())
	noticed := func() error {
		if out := s.router.Ask("show", "protocols", "n1"); !strings.Contains(out, "Active") && !strings.Contains(out, "Connect") {
			return errors.New(out)
		}
		return nil
	}
	n.Kill()
	testbed.Until(t, "the router to notice", noticed)
	for _, a := range []netip.Addr{vip4, vip6} {
		if name := s.ask(t, a); name != "node1" {
			t.Fatalf("%s after the kill: %s answered", a, name)
		}
	}
	again := startNode(t, n.Host)
	// The one is withdrawn at the planned end below, the others are not announced after it.
	ended, stale4, stale6 := netip.MustParseAddr("198.51.100.9"), netip.MustParseAddr("198.51.100.10"), netip.MustParseAddr("2001:db8:7::10")
	again.announce(vip4, vip6, ended, stale4, stale6)
	again.setPeers(p)
	s.router.Routes("198.51.100.8/32")
	s.router.Routes(route4, n.Addr4())
	s.router.Routes(route6, n.Addr6())
	// It was not the end of the restart time that removed the one.
	again.Says("peer router: Established")

	// A planned restart is no end: only what is no longer announced is withdrawn, and nothing is changed by the next process.
	s.router.Routes("198.51.100.9/32", n.Addr4())
	s.router.Routes("198.51.100.10/32", n.Addr4())
	s.router.Routes("2001:db8:7::10/128", n.Addr6())
	watch := process.Start(t, s.router.Command(context.Background(), "ip", "monitor", "route"))
	testbed.Until(t, "the monitor to print a change", func() error { // it begins to listen at some time
		for _, do := range []string{"add", "del"} {
			process.Output(t, s.router.Command(t.Context(), "ip", "route", do, "blackhole", "192.0.2.99/32"))
		}
		if !strings.Contains(watch.Log(), "Deleted blackhole 192.0.2.99") {
			return errors.New("it does not")
		}
		return nil
	})
	again.order(order{Withdraw: []netip.Addr{ended}, Restart: true})
	again.Says("restarting")
	if err := again.Wait(); err != nil {
		t.Error(err)
	}
	testbed.Until(t, "the router to notice", noticed)
	for _, a := range []netip.Addr{vip4, vip6} {
		if name := s.ask(t, a); name != "node1" {
			t.Errorf("%s while it restarts: %s answered", a, name)
		}
	}
	third := startNode(t, n.Host)
	// While it cannot announce all, as on a busy machine, the router keeps the others.
	more := netip.MustParseAddr("198.51.100.11")
	third.order(order{Announce: []netip.Addr{vip4}, Peers: []bgp.Peer{p}, Incomplete: true})
	third.Says("peer router: Established")
	third.order(order{Announce: []netip.Addr{more}, Incomplete: true})
	s.router.Routes("198.51.100.11/32", n.Addr4()) // has come after all of the first message
	s.router.Routes(route6, n.Addr6())
	s.router.Routes("198.51.100.10/32", n.Addr4())
	third.announce(vip6)
	// The router drops stale routes at the End-of-RIB marker of their family, which comes after all that is announced.
	s.router.Routes("198.51.100.10/32")
	s.router.Routes("2001:db8:7::10/128")
	watch.Kill()
	var deleted []string
	for line := range strings.Lines(watch.Log()) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == "Deleted" && words[1] != "blackhole" {
			deleted = append(deleted, words[1])
		}
	}
	want := []string{stale4.String(), ended.String(), stale6.String()}
	if slices.Sort(deleted); !slices.Equal(deleted, want) {
		t.Errorf("the router dropped %v, want %v:\n%s", deleted, want, watch.Log())
	}
	s.router.Routes(route4, n.Addr4())

	// A router without graceful restart is told, as at every end.
	p.GracefulRestart = false
	third.setPeers(p)
	testbed.Until(t, "the session without graceful restart", func() error {
		if strings.Count(third.Log(), "peer router: Established") < 2 {
			return errors.New(third.Log())
		}
		return nil
	})
	s.router.Routes(route4, n.Addr4())
	third.order(order{Restart: true})
	s.router.Routes(route4)
}

// Peers come, change and go while the session with another stays up.
func TestPeersChange(t *testing.T) {
	net := testbed.NewNetwork(t)
	h := net.Host("node1")
	first := bird.Start(t, net.Host("first"), neighbor(h))
	second := bird.Start(t, net.Host("second"), fmt.Sprintf("neighbor %s as 64999;", h.Addr4()))
	n := startNode(t, h)
	n.announce(vip4)
	n.setPeers(peer(first.Host))
	first.Routes(route4, h.Addr4())
	wrong := peer(second.Host)
	n.setPeers(peer(first.Host), wrong)
	n.Says(`peer second: Idle: the router closed the session: .*bad peer as.*: it expects another AS number`)
	right := wrong
	right.LocalASN = 64999
	n.setPeers(peer(first.Host), right)
	second.Routes(route4, h.Addr4())
	n.setPeers(peer(first.Host))
	second.Routes(route4)
	first.Routes(route4, h.Addr4())
	if log := n.Log(); strings.Count(log, "peer first: Established") != 1 || strings.Contains(log, "peer first: Idle") {
		t.Errorf("the session with the first router was disturbed:\n%s", log)
	}
}

// Over a session between IPv6 addresses both families are announced; IPv4 with the
// node's IPv4 address as its next hop.
func TestSessionOverIPv6(t *testing.T) {
	net := testbed.NewNetwork(t)
	h := net.Host("node1")
	router := bird.Start(t, net.Host("router"), fmt.Sprintf("neighbor %s as %d;", h.Addr6(), nodeAS))
	n := startNode(t, h)
	n.announce(vip4, vip6)
	p := peer(router.Host)
	p.Address = router.Addr6()
	n.setPeers(p)
	router.Routes(route6, h.Addr6())
	router.Routes(route4, h.Addr4())
}

// A router that asks for the routes once more gets them (RFC 2918), and one that
// restarts gets them again.
func TestRefreshAndRestartOfTheRouter(t *testing.T) {
	s := newSite(t)
	n := s.nodes[0]
	n.announce(vip4, vip6)
	n.setPeers(peer(s.router.Host))
	s.router.Routes(route4, n.Addr4())
	updates := func() string {
		return regexp.MustCompile(`Import updates: +(\d+)`).FindString(s.router.Ask("show", "protocols", "all", "n1"))
	}
	before := updates()
	s.router.Control("reload", "in", "n1")
	testbed.Until(t, "the routes once more", func() error {
		if now := updates(); now == before {
			return errors.New(now)
		}
		return nil
	})
	s.router.Control("restart", "n1")
	n.Says(`peer router: Idle: the router closed the session: .*cease`)
	s.router.Routes(route4, n.Addr4())
	s.router.Routes(route6, n.Addr6())
	n.Signal(syscall.SIGTERM)
	n.Says("closed")
}
