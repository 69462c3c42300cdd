package lb

import (
	"net"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// held are connections of the client that stay open through an address.
type held struct {
	*cluster
	vip   netip.Addr
	owner *node     // of the address, when they were opened
	since time.Time // when they began to be opened
	conns []net.Conn
}

// heldConns is how many connections stay open.
const heldConns = 60

// hold opens connections.
func (c *cluster) hold(vip netip.Addr) *held {
	h := &held{cluster: c, vip: vip}
	h.open()
	c.Cleanup(h.close)
	return h
}

func (h *held) open() {
	h.Helper()
	h.close()
	h.since = time.Now()
	h.owner = h.cluster.owner(h.vip, h.nodes...)
	for range heldConns {
		c, err := h.wire.Host().Dial(h.Context(), svc.TCP, netip.AddrPortFrom(h.vip, 80))
		h.must(err)
		h.conns = append(h.conns, c)
		_, err = testbed.AskOn(c)
		h.must(err)
	}
}

func (h *held) close() {
	for _, c := range h.conns {
		_ = c.Close()
	}
	h.conns = nil
}

// lost returns how many connections are no longer answered, all of them within one deadline.
func (h *held) lost() (n int) {
	deadline := time.Now().Add(testbed.Patience)
	written := make([]error, len(h.conns))
	for i, c := range h.conns {
		_ = c.SetDeadline(deadline)
		_, written[i] = c.Write([]byte("x"))
	}
	for i, c := range h.conns {
		if written[i] == nil {
			_, written[i] = c.Read(make([]byte, 1))
		}
		if written[i] != nil {
			n++
		}
	}
	return n
}

// outlast fails the test if one was lost in a restart that began at a time, unless the address moved: it may if the restart took long,
// or if most of the voters have restarted so soon one after the other that they no longer know whose it was. Then others are opened.
func (h *held) outlast(begin time.Time) {
	h.Helper()
	took, lost := time.Since(begin), h.lost()
	for _, x := range h.wire.Since(h.vip, h.since) {
		if x.MAC == h.owner.mac {
			continue
		}
		h.Logf("%s moved from %s, whose restart or that of another node took %s: %d of %d kept connections were lost",
			h.vip, h.owner.name, took.Round(time.Millisecond), lost, heldConns)
		h.open()
		return
	}
	h.Logf("%d of %d kept connections were lost in a restart", lost, heldConns)
	if lost > 0 {
		h.Errorf("%d of %d kept connections were lost, and the address has not moved", lost, heldConns)
	}
}
