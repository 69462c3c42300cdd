package bgp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// nodeEnv names the node that this process is to be, instead of running tests.
const nodeEnv = "FAIRLEAD_BGP_NODE"

func TestMain(m *testing.M) {
	if name := os.Getenv(nodeEnv); name != "" {
		runNode(name)
		return
	}
	testbed.Main(m)
}

// order is what a node is told, one per line of its standard input.
type order struct {
	Announce, Withdraw []netip.Addr
	Attributes         bgp.Attributes
	Peers              []bgp.Peer // nil: they stay
}

// runNode is an Announcer in a process of its own. It ends like the program: SIGTERM
// withdraws everything first.
func runNode(name string) {
	a := bgp.New(bgp.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), NodeName: name, OnChange: func(s bgp.PeerStatus) {
		fmt.Printf("peer %s: %s: %s\n", s.Name, s.State, s.Reason)
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
			if o.Peers != nil {
				a.SetPeers(o.Peers)
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

// bird is a BGP speaker that others use, on a host that forwards.
type bird struct {
	*testbed.Host
	t      *testing.T
	socket string
}

const (
	routerAS = 64512
	nodeAS   = 64513
)

// startBird starts BIRD with a session for each neighbor, given as the body of its
// protocol: "neighbor 192.0.2.1 as 64513;". Routes go into the host's kernel, all of
// equal value beside each other.
func startBird(t *testing.T, h *testbed.Host, neighbors ...string) *bird {
	t.Helper()
	program, err := exec.LookPath("bird")
	if err != nil {
		program = "/usr/sbin/bird"
		if _, err := os.Stat(program); err != nil {
			t.Skip("BIRD is not installed (Debian: bird2)")
		}
	}
	dir := t.TempDir()
	var c strings.Builder
	fmt.Fprintf(&c, `router id %s;
log stderr all;
protocol device { scan time 1; }
protocol kernel { ipv4 { export all; }; merge paths yes; }
protocol kernel { ipv6 { export all; }; merge paths yes; }
template bgp node {
	local as %d;
	passive;
	error wait time 1, 1;
	connect delay time 1;
	startup hold time 30;
	hold time 3;
	ipv4 { import all; export none; };
	ipv6 { import all; export none; };
}
`, h.Addr4(), routerAS)
	for i, n := range neighbors {
		fmt.Fprintf(&c, "protocol bgp n%d from node { %s }\n", i+1, n)
	}
	config := filepath.Join(dir, "bird.conf")
	if err := os.WriteFile(config, []byte(c.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	b := &bird{Host: h, t: t, socket: filepath.Join(dir, "ctl")}
	p := process.Start(t, h.Command(context.Background(), program, "-f", "-c", config, "-s", b.socket, "-P", filepath.Join(dir, "pid")))
	p.Says("Started")
	for _, f := range []string{"ipv4", "ipv6"} {
		h.Sysctl("net/"+f+"/fib_multipath_hash_policy", "1")
	}
	return b
}

// ask returns what birdc prints. It ends with an error if there is no such route.
func (b *bird) ask(command ...string) string {
	b.t.Helper()
	out, _ := process.Try(b.Command(context.Background(), "birdc", append([]string{"-r", "-s", b.socket}, command...)...))
	return out
}

// routes waits until the kernel's routes to p go over these next hops alone.
func (b *bird) routes(p string, hops ...netip.Addr) {
	b.t.Helper()
	prefix := netip.MustParsePrefix(p)
	family := "-4"
	if prefix.Addr().Is6() {
		family = "-6"
	}
	hop := regexp.MustCompile(`via (?:inet6 )?(\S+)`)
	testbed.Until(b.t, fmt.Sprintf("%s to have a route to %s over %v", b.Name(), p, hops), func() error {
		out, err := process.Try(b.Command(context.Background(), "ip", family, "route", "show", "exact", p))
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		got := map[string]bool{}
		for _, m := range hop.FindAllStringSubmatch(out, -1) {
			got[m[1]] = true
		}
		missing := len(got) != len(hops)
		for _, h := range hops {
			missing = missing || !got[h.String()]
		}
		if missing {
			return fmt.Errorf("it has %q", out)
		}
		return nil
	})
}

// control runs a command of birdc that changes something.
func (b *bird) control(command ...string) {
	b.t.Helper()
	process.Output(b.t, b.Command(context.Background(), "birdc", append([]string{"-s", b.socket}, command...)...))
}
