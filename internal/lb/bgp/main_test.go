package bgp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/bird"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// nodeEnv names the node that this process is to be, instead of running tests.
const nodeEnv = "FAIRLEAD_BGP_NODE"

func TestMain(m *testing.M) {
	if name := os.Getenv(nodeEnv); name != "" {
		runNode(name)
		return
	}
	if slices.ContainsFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, "-test.fuzz=") || a == "-test.fuzzworker" }) {
		os.Exit(m.Run()) // workers inherit files that a further process would not have
	}
	testbed.Main(m)
}

// order is what a node is to do, one per line of its standard input.
type order struct {
	Announce, Withdraw []netip.Addr
	Attributes         bgp.Attributes
	Peers              []bgp.Peer // nil: they stay
	Incomplete         bool       // more is announced later that routers keep until then
	Restart            bool       // end as a process that another one follows
}

// runNode is an Announcer in its own process. It ends like the program: SIGTERM
// withdraws everything first.
func runNode(name string) {
	var a *bgp.Announcer
	a = bgp.New(bgp.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), NodeName: name, OnChange: func(s bgp.PeerStatus) {
		fmt.Printf("peer %s: %s: %s\n", s.Name, s.State, s.Reason)
	}, OnPath: func() {
		for _, p := range a.Peers() {
			fmt.Printf("bfd %s: %s\n", p.Name, p.BFD)
		}
	}})
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	fmt.Println("ready")
	go func() {
		orders := json.NewDecoder(os.Stdin)
		for {
			var o order
			if err := orders.Decode(&o); err != nil {
				return
			}
			for _, address := range o.Announce {
				a.Announce(address, o.Attributes)
			}
			for _, address := range o.Withdraw {
				a.Withdraw(address)
			}
			if !o.Incomplete {
				a.Complete()
			}
			if o.Peers != nil {
				a.SetPeers(o.Peers)
			}
			if o.Restart {
				a.Restart(context.Background())
				fmt.Println("restarting")
				os.Exit(0)
			}
		}
	}()
	<-stop
	a.Close(context.Background())
	fmt.Println("closed")
}

// node is a host whose addresses are announced.
type node struct {
	*testbed.Host
	*process.Process
	t      *testing.T
	orders io.Writer
}

// startNode starts the Announcer of a host.
func startNode(t *testing.T, h *testbed.Host) *node {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := h.Command(context.Background(), program)
	cmd.Env = append(os.Environ(), nodeEnv+"="+h.Name())
	orders, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	n := &node{Host: h, Process: process.Start(t, cmd), t: t, orders: orders}
	n.Says("ready")
	return n
}

func (n *node) order(o order) {
	n.t.Helper()
	if err := json.NewEncoder(n.orders).Encode(o); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) announce(addresses ...netip.Addr) { n.t.Helper(); n.order(order{Announce: addresses}) }

func (n *node) setPeers(peers ...bgp.Peer) {
	n.t.Helper()
	n.order(order{Peers: append([]bgp.Peer{}, peers...)})
}

// The autonomous systems of the tests.
const (
	routerAS = bird.AS
	nodeAS   = 64513
)
