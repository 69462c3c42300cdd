package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// briefPort is where endpoints say their name and end the connection, so that
// the client's port is free at once while IPVS still knows the connection.
const briefPort = 9378

func serveBriefly(t *testing.T, h *testbed.Host) {
	t.Helper()
	l := h.ListenTCP(netip.AddrPortFrom(netip.IPv4Unspecified(), briefPort))
	testbed.Serve(t, l, func(c net.Conn) { _, _ = io.WriteString(c, h.Name()) })
}

// brief is a Service with the endpoints named, on the port of serveBriefly.
func brief(e *flows.Env, names string) *table.ServicePort {
	p := web(e, "", names)
	for i := range p.Frontends[0].Endpoints {
		ep := &p.Frontends[0].Endpoints[i]
		ep.Addr = netip.AddrPortFrom(ep.Addr.Addr(), briefPort)
	}
	return p
}

// askBriefly asks from a port of c, and returns who answered and how often a
// packet had to be sent again. The port may be that of the connection before,
// whose last packet is still under way.
func askBriefly(t *testing.T, e *flows.Env, port uint16) (name string, again int) {
	t.Helper()
	from := netip.AddrPortFrom(e.Host("c").Addr4(), port)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var c net.Conn
	var err error
	for {
		c, err = e.Host("c").DialFrom(ctx, svc.TCP, from, vip)
		if !errors.Is(err, syscall.EADDRINUSE) || ctx.Err() != nil {
			break
		}
		<-time.After(time.Millisecond)
	}
	if err != nil {
		t.Fatalf("from port %d: %v\n%s", port, err, dumpOf(t, e))
	}
	text, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("from port %d: %v", port, err)
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	var got error
	err = raw.Control(func(fd uintptr) { info, got = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err := errors.Join(err, got, c.Close()); err != nil {
		t.Fatal(err)
	}
	return string(text), int(info.Total_retrans)
}

// kubernetes/kubernetes#70747, #81775 and #92019: a client that uses a port again
// within the two minutes that IPVS remembers its connection gets an endpoint that
// serves, not the one it had, which has left meanwhile; and at once, since its
// first packet is not dropped. Linux sends that again after a second.
func TestPortUsedAgain(t *testing.T) {
	e := flows.NewEnv(t, create("rr"))
	serveBriefly(t, e.Host("a"))
	serveBriefly(t, e.Host("b"))
	apply(t, e, brief(e, "a"))
	if name, _ := askBriefly(t, e, 40001); name != "a" {
		t.Fatalf("reached %q, want a", name)
	}
	again := 0
	for i := range 10 {
		left, next := "ab"[i%2:i%2+1], "ab"[1-i%2:2-i%2]
		apply(t, e, brief(e, "a b"))
		apply(t, e, brief(e, next))
		if d := dumpOf(t, e); !strings.Contains(d, fmt.Sprintf("%s:%d weight 0", e.Host(left).Addr4(), briefPort)) {
			t.Fatalf("round %d: IPVS does not remember the connection to %s, so this shows nothing:\n%s", i, left, d)
		}
		name, n := askBriefly(t, e, 40001)
		if name != next {
			t.Fatalf("round %d: reached %q, which has left; want %q", i, name, next)
		}
		again += n
	}
	// A machine that stalls for a second may send one again by itself.
	if again > 2 {
		t.Errorf("%d packets of 10 connections had to be sent again", again)
	}
	// Nor does the port keep the client from an endpoint that is new: each is
	// balanced anew.
	apply(t, e, brief(e, "a b"))
	turns := func() map[string]int {
		seen := map[string]int{}
		for range 8 {
			name, _ := askBriefly(t, e, 40001)
			seen[name]++
		}
		return seen
	}
	if seen := turns(); seen["a"] != 4 || seen["b"] != 4 {
		t.Errorf("8 connections from one port went to %v, want 4 each", seen)
	}
	// What the two parameters are for: without the first all these go the same
	// way, without the other to an endpoint that has left. The next full comparison
	// puts both right.
	e.Node.Sysctl("net/ipv4/vs/conn_reuse_mode", "0")
	if seen := turns(); len(seen) != 1 {
		t.Errorf("without conn_reuse_mode 8 connections went to %v: the rounds before prove nothing", seen)
	}
	at, _ := askBriefly(t, e, 40001)
	next := strings.Trim("ab", at)
	e.Node.Sysctl("net/ipv4/vs/expire_nodest_conn", "0")
	apply(t, e, brief(e, next))
	if name, _ := askBriefly(t, e, 40001); name != at {
		t.Errorf("without expire_nodest_conn: reached %q; want %s, which has left, or the rounds before prove nothing", name, at)
	}
	e.Apply(t, table.New(brief(e, next)), nil)
	if name, _ := askBriefly(t, e, 40001); name != next {
		t.Errorf("after a full comparison: reached %q, want %s", name, next)
	}
}
