package connecttime

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
)

// endSockets ends connected sockets of UDP whose endpoint does not serve their frontend any more, as connection tracking is
// told to forget flows of nft's. What fails is tried again with the next change.
func (t *target) endSockets(c *dataplane.Change) {
	if !t.left && !c.Full {
		return
	}
	serves := serving(c)
	ended, err := t.kernel.EndSockets(func(front, at netip.AddrPort) bool {
		return svc.FamilyOf(front.Addr()) != t.family || serves(front, at)
	})
	if ended > 0 {
		t.log.Info("ended sockets of UDP that were connected with endpoints which are gone", "sockets", ended)
	}
	if err != nil && !t.unended {
		t.unended = true
		t.log.Warn("cannot end all sockets of UDP that are connected with endpoints which are gone; trying again", "err", err)
	}
	t.left = err != nil
}

// serving returns a function that reports whether an endpoint may keep the sockets that are connected with a frontend or a node
// port. Many sockets have the same frontend: its endpoints are sorted once.
func serving(c *dataplane.Change) func(front, at netip.AddrPort) bool {
	known := map[netip.AddrPort][]netip.AddrPort{}
	return func(front, at netip.AddrPort) bool {
		members, ok := known[front]
		if !ok {
			k := dataplane.FrontKey{Addr: front.Addr(), Port: front.Port(), Proto: svc.UDP}
			p, f := c.Wanted(k)
			if f == nil {
				p, f = c.Wanted(dataplane.FrontKey{Port: k.Port, Proto: k.Proto, Node: true})
			}
			if f != nil {
				members = membersOf(p.Serving, f.Endpoints, f.LocalClients)
			}
			known[front] = members
		}
		_, found := slices.BinarySearchFunc(members, at, netip.AddrPort.Compare)
		return found
	}
}
