package lb

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// conns are connections of a machine that stay open through an address.
type conns struct {
	testing.TB
	from *testbed.Host
	vip  netip.Addr
	all  []net.Conn
}

// open opens a number of connections in place of the ones before, until the test ends.
func (h *conns) open(count int) {
	h.Helper()
	h.close()
	for range count {
		c, err := h.from.Dial(h.Context(), svc.TCP, netip.AddrPortFrom(h.vip, 80))
		if err != nil {
			h.Fatal(err)
		}
		h.all = append(h.all, c)
		if _, err = testbed.AskOn(c); err != nil {
			h.Fatal(err)
		}
	}
}

func (h *conns) close() {
	for _, c := range h.all {
		_ = c.Close()
	}
	h.all = nil
}

// lost returns how many connections are no longer answered, all of them within one deadline.
func (h *conns) lost() (n int) {
	deadline := time.Now().Add(testbed.Patience)
	written := make([]error, len(h.all))
	for i, c := range h.all {
		_ = c.SetDeadline(deadline)
		_, written[i] = c.Write([]byte("x"))
	}
	for i, c := range h.all {
		if written[i] == nil {
			_, written[i] = c.Read(make([]byte, 1))
		}
		if written[i] != nil {
			n++
		}
	}
	return n
}

// keep opens connections of a machine through an address.
func (c *cluster) keep(from *testbed.Host, vip netip.Addr, count int) *conns {
	c.Helper()
	h := &conns{TB: c.TB, from: from, vip: vip}
	c.Cleanup(h.close)
	h.open(count)
	return h
}

// held are connections of the client that stay open through an address that a node answers for.
type held struct {
	*cluster
	*conns
	owner *node     // of the address, when they were opened
	since time.Time // when they began to be opened
}

// heldConns is how many connections stay open.
const heldConns = 60

// hold opens connections.
func (c *cluster) hold(vip netip.Addr) *held {
	since, owner := time.Now(), c.owner(vip, c.nodes...)
	return &held{cluster: c, conns: c.keep(c.wire.Host(), vip, heldConns), owner: owner, since: since}
}

// moved reports whether another node has claimed the address since they were opened.
func (h *held) moved() bool { return len(h.claimedByOthers(h.vip, h.owner, h.since)) > 0 }

// outlast fails the test if one was lost in a restart that began at a time, unless the address moved: it may if the restart took
// longer than the others keep it, or if processes wait longer than a promise lasts, as on a busy machine. Then others are opened.
// It returns whether the address moved.
func (h *held) outlast(begin time.Time) (moved bool) {
	h.cluster.Helper()
	took, lost := time.Since(begin), h.lost()
	if h.moved() {
		h.cluster.Logf("%s moved from %s, whose restart or that of another node took %s: %d of %d kept connections were lost",
			h.vip, h.owner.name, took.Round(time.Millisecond), lost, heldConns)
		h.since, h.owner = time.Now(), h.cluster.owner(h.vip, h.nodes...)
		h.open(heldConns)
		return true
	}
	h.cluster.Logf("%d of %d kept connections were lost in a restart", lost, heldConns)
	if lost > 0 {
		h.cluster.Errorf("%d of %d kept connections were lost, and the address has not moved", lost, heldConns)
	}
	return false
}
