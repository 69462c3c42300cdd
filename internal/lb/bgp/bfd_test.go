package bgp_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/bfd"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/bird"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// patientHold is a hold time that does not end while a test waits.
const patientHold = 240 * time.Second

// With BFD, a router drops the routes of a node that falls silent, and the node ends the session, long before the hold time does it:
// testbed.Until waits for less. Both families.
func TestBFD(t *testing.T) {
	net := testbed.NewNetwork(t)
	hosts := []*testbed.Host{net.Host("node1"), net.Host("node2")}
	const options = "hold time 240; bfd on;"
	over6 := fmt.Sprintf("neighbor %s as %d; %s", hosts[1].Addr6(), nodeAS, options)
	router := bird.Start(t, net.Host("router"), neighbor(hosts[0], options), over6)
	nodes := make([]*node, len(hosts))
	for i, h := range hosts {
		p := peer(router.Host)
		if i == 1 {
			p.Address = router.Addr6()
		}
		p.HoldTime, p.BFD = patientHold, bfd.Config{Transmit: 100 * time.Millisecond, Receive: 100 * time.Millisecond, Multiplier: 5}
		nodes[i] = startNode(t, h)
		nodes[i].announce(vip4, vip6)
		nodes[i].setPeers(p)
	}
	router.Routes(route4, hosts[0].Addr4(), hosts[1].Addr4())
	for i, n := range nodes {
		n.Says("bfd router: Up")
		testbed.Until(t, "the router's sessions of BFD", func() error {
			if list := router.Ask("show", "bfd", "sessions"); strings.Count(list, " Up ") != len(nodes) {
				return errors.New(list)
			}
			return nil
		})
		n.link(t, "down")
		if i == 0 {
			router.Routes(route4, hosts[1].Addr4())
		} else {
			router.Routes(route4, hosts[0].Addr4())
		}
		n.Says("peer router: Idle: .*nothing was heard from the router for the BFD detection time")
		n.link(t, "up")
		if i == 1 { // which loses its IPv6 address with the link
			break
		}
		router.Routes(route4, hosts[0].Addr4(), hosts[1].Addr4())
		n.Says("bfd router: Up")
	}
}

func (n *node) link(t *testing.T, state string) {
	t.Helper()
	if out, err := process.Try(n.Command(context.Background(), "ip", "link", "set", "eth0", state)); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// A router without BFD, and a port that another program has, leave the session of BGP as it is.
func TestBGPWithoutItsBFD(t *testing.T) {
	net := testbed.NewNetwork(t)
	h := net.Host("node1")
	for i, want := range []string{"bfd %s: Down", "bfd %s: cannot receive by BFD: .*address already in use"} {
		router := bird.Start(t, net.Host(fmt.Sprintf("router%d", i+1)), neighbor(h))
		n := startNode(t, h)
		n.announce(vip4)
		p := peer(router.Host)
		p.BFD = bfd.Default()
		n.setPeers(p)
		router.Routes(route4, h.Addr4())
		n.Says(fmt.Sprintf(want, router.Name()))
	}
}
