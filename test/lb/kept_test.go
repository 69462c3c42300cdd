package lb

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dns"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/bird"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Connections that stay open through an address, announced by ARP and by BGP with graceful restart, outlast an upgrade of all
// nodes of three, and with BGP the death of a speaker. With direct return they also outlast that other nodes get their packets.
func TestKeptConnections(t *testing.T) {
	inParallel(t)
	c := newCluster(t, clusterOptions{}, "n1", "n2", "n3")
	b := c.behindRouter()
	var pods []*testbed.Host
	for _, n := range c.nodes {
		p := n.host.Pod("p-" + n.name)
		p.Serve(svc.TCP, 8080)
		pods = append(pods, p)
	}
	c.voters(3)
	nat, direct := c.serve("nat", pods), c.serve("direct", pods, forwarded)
	for _, vip := range []netip.Addr{nat, direct} {
		b.leads(vip, c.nodes...)
		c.ask(c.wire.Host(), vip)
	}

	// A node is stopped as soon as the one before is up, twice each.
	t.Run("upgrade", func(t *testing.T) {
		byARP, byBGP := c.hold(nat), c.keep(b.client, nat, heldConns)
		for range 2 {
			for _, n := range c.nodes {
				b.restart(t, n, byARP, byBGP)
			}
		}
	})

	// With --dns-lameduck, the others keep the address from the end of the speaker, not from SIGTERM. On a busy machine processes
	// wait longer than a promise lasts, and the address moves: then the next owner restarts.
	t.Run("upgrade with --dns-lameduck", func(t *testing.T) {
		byARP, byBGP := c.hold(nat), c.keep(b.client, nat, heldConns)
		for range 5 {
			n := byARP.owner
			n.lameduck = true
			_, moved := b.restart(t, n, byARP, byBGP)
			n.lameduck = false
			if moved {
				continue
			}
			took, moved := b.restart(t, n, byARP, byBGP)
			if took < dns.DefaultLameduck {
				t.Errorf("%s ended after %s, in spite of --dns-lameduck", n.name, took)
			}
			if !moved {
				return
			}
		}
		t.Errorf("%s moved each time that its owner restarted", nat)
	})

	// The router keeps the routes, and the node's kernel forwards on.
	t.Run("kill -9 with BGP", func(t *testing.T) {
		kept := c.keep(b.client, nat, 20)
		for _, n := range c.nodes {
			n.kill9()
			kept.loses(t, 0, "after kill -9 of "+n.name)
			n.start()
			b.established(n)
			kept.loses(t, 0, "when it is back")
		}
	})

	// The next owner passes each connection on to the node that has answered it, once the client has heard of the move.
	t.Run("kill -9 with ARP and direct return", func(t *testing.T) {
		c.checkForwarded(c.wire.Host(), direct, false, len(pods))
		was := c.owner(direct, c.nodes...)
		kept := c.keep(c.wire.Host(), direct, 20)
		begin := time.Now()
		was.kill9()
		c.tookOver("kill -9", direct, was, begin, expireWithin)
		c.learned(direct, was)
		kept.loses(t, 0, "after kill -9 of "+was.name)
		was.start()
		kept.loses(t, 0, "when it is back")
	})

	// The router spreads all flows anew over the nodes that are left, and again when the third is back.
	t.Run("a node less with BGP and direct return", func(t *testing.T) {
		c.checkForwarded(b.client, direct, false, len(pods)) // an agent that starts translates at first
		kept := c.keep(b.client, direct, 20)
		for _, n := range c.nodes {
			n.label(corev1.LabelNodeExcludeBalancers, true)
			b.leads(direct, c.others(n)...)
			kept.loses(t, 0, "without "+n.name)
			n.label(corev1.LabelNodeExcludeBalancers, false)
			b.leads(direct, c.nodes...)
			kept.loses(t, 0, "when it is back")
		}
	})
}

// loses fails the test unless so many of the connections are no longer answered.
func (h *conns) loses(t *testing.T, want int, when string) {
	t.Helper()
	if lost := h.lost(); lost != want {
		t.Errorf("%s: %d of %d kept connections are lost, want %d", when, lost, len(h.all), want)
	} else {
		t.Logf("%s: %d of %d kept connections are lost", when, lost, len(h.all))
	}
}

// restart restarts a node, whose router must not lose a connection. It returns how long the process took to end, and whether
// the address that is announced by ARP has moved.
func (b *behind) restart(t *testing.T, n *node, byARP *held, byBGP *conns) (took time.Duration, moved bool) {
	t.Helper()
	begin := time.Now()
	n.Stop()
	took = time.Since(begin)
	byBGP.loses(t, 0, "while "+n.name+" restarts")
	n.start()
	moved = byARP.outlast(begin)
	b.established(n)
	byBGP.loses(t, 0, "after the restart of "+n.name)
	return took, moved
}

// behind is a client whose packets for addresses go to a router, to which the nodes of a cluster announce them.
type behind struct {
	*cluster
	client *testbed.Host
	router *bird.Router
}

func (c *cluster) behindRouter() *behind {
	c.Helper()
	b := &behind{cluster: c, client: c.net.Outside("routed")}
	var neighbors []string
	for _, n := range c.nodes {
		neighbors = append(neighbors, fmt.Sprintf("neighbor %s as %d; graceful restart on; hold time 60;", n.host.Addr4(), nodeAS))
	}
	b.router = bird.Start(c.TB, c.net.Host("router"), neighbors...)
	_, err := c.lb.Peers.Create(c.Context(), &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "router"}, Spec: v1.BGPPeerSpec{
		Address: b.router.Addr4().String(), LocalASN: nodeAS, PeerASN: bird.AS, HoldTime: &metav1.Duration{Duration: time.Minute},
		GracefulRestart: true, RestartTime: &metav1.Duration{Duration: time.Minute},
	}}, metav1.CreateOptions{})
	c.must(err)
	return b
}

// leads waits until the router has routes to an address over these nodes and no others, and the client is answered.
func (b *behind) leads(vip netip.Addr, over ...*node) {
	b.Helper()
	var hops []netip.Addr
	for _, n := range over {
		hops = append(hops, n.host.Addr4())
	}
	route := netip.PrefixFrom(vip, vip.BitLen())
	b.client.Route(route, b.router.Addr4())
	b.router.Routes(route.String(), hops...)
	b.ask(b.client, vip)
}

// established waits until the router has a session with a node.
func (b *behind) established(n *node) {
	b.Helper()
	name := fmt.Sprint("n", slices.Index(b.nodes, n)+1)
	testbed.Until(b.TB, "a session with "+n.name, func() error {
		if out := b.router.Ask("show", "protocols", name); !strings.Contains(out, "Established") {
			return errors.New(out)
		}
		return nil
	})
}

// learned waits until the client's kernel no longer sends packets for an address to a node.
func (c *cluster) learned(vip netip.Addr, from *node) {
	c.Helper()
	testbed.Until(c.TB, "the client to hear of the move", func() error {
		out := process.Output(c.TB, c.wire.Host().Command(c.Context(), "ip", "neighbour", "show", vip.String()))
		if strings.Contains(out, net.HardwareAddr(from.mac[:]).String()) {
			return errors.New(out)
		}
		return nil
	})
}
