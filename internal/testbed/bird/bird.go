// Package bird runs BIRD, a BGP speaker that others use, as a router of the testbed.
package bird

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Router is a host that forwards and has BIRD.
type Router struct {
	*testbed.Host
	t      testing.TB
	socket string
}

// AS is the router's autonomous system.
const AS = 64512

// Start starts BIRD with a session for each neighbor, given as the body of its
// protocol: "neighbor 192.0.2.1 as 64513; bfd on;". Routes go into the host's kernel, all of
// equal value beside each other.
func Start(t testing.TB, h *testbed.Host, neighbors ...string) *Router {
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
protocol bfd { interface "*" { min rx interval 200 ms; min tx interval 200 ms; }; }
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
`, h.Addr4(), AS)
	for i, n := range neighbors {
		fmt.Fprintf(&c, "protocol bgp n%d from node { %s }\n", i+1, n)
	}
	config := filepath.Join(dir, "bird.conf")
	if err := os.WriteFile(config, []byte(c.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &Router{Host: h, t: t, socket: filepath.Join(dir, "ctl")}
	p := process.Start(t, h.Command(context.Background(), program, "-f", "-c", config, "-s", r.socket, "-P", filepath.Join(dir, "pid")))
	p.Says("Started")
	for _, f := range []string{"ipv4", "ipv6"} {
		h.Sysctl("net/"+f+"/fib_multipath_hash_policy", "1")
	}
	return r
}

// Ask returns what birdc prints. It ends with an error if there is no such route.
func (r *Router) Ask(command ...string) string {
	r.t.Helper()
	out, _ := process.Try(r.Command(context.Background(), "birdc", append([]string{"-r", "-s", r.socket}, command...)...))
	return out
}

// Routes waits until the kernel's routes to p go over these next hops alone.
func (r *Router) Routes(p string, hops ...netip.Addr) {
	r.t.Helper()
	prefix := netip.MustParsePrefix(p)
	family := "-4"
	if prefix.Addr().Is6() {
		family = "-6"
	}
	hop := regexp.MustCompile(`via (?:inet6 )?(\S+)`)
	testbed.Until(r.t, fmt.Sprintf("%s to have a route to %s over %v", r.Name(), p, hops), func() error {
		out, err := process.Try(r.Command(context.Background(), "ip", family, "route", "show", "exact", p))
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

// Connect makes a TCP connection of client over routers like this one, and returns the name
// of the host that answers. One that is reset is made again: Linux gives a SYN that it sends
// again another flow hash (sk_rethink_txhash), which crosses a veth and decides about
// the next hop, so that on a busy machine two hosts may get one connection.
func Connect(t testing.TB, client *testbed.Host, to netip.AddrPort) (name string) {
	t.Helper()
	testbed.Until(t, "a connection to "+to.String(), func() error {
		ctx, cancel := context.WithTimeout(context.Background(), testbed.Patience)
		defer cancel()
		answer, err := client.Ask(ctx, svc.TCP, to)
		if err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		name = answer.Name
		return err
	})
	return name
}

// Control runs a command of birdc that changes something.
func (r *Router) Control(command ...string) {
	r.t.Helper()
	process.Output(r.t, r.Command(context.Background(), "birdc", append([]string{"-s", r.socket}, command...)...))
}
