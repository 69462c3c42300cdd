package bgp

import (
	"net/netip"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/fairlead/fairlead/internal/lb/bfd"
)

// bfdDown is the subcode of a Cease after BFD found the path dead (RFC 9384).
const bfdDown = 10

// watchPath begins the BFD session of an established session, if its peer has one. failed receives why the path is dead, once.
// A session that cannot begin is only reported: BGP works without it.
func (c *connection) watchPath() (failed <-chan string, end func()) {
	s := c.session
	if s.peer.BFD == (bfd.Config{}) {
		return nil, func() {}
	}
	broken := make(chan string, 1)
	local, _ := netip.ParseAddrPort(c.conn.LocalAddr().String())
	remote, _ := netip.ParseAddrPort(c.conn.RemoteAddr().String())
	x, err := s.announcer.paths.Open(bfd.Options{
		Config: s.peer.BFD, Local: local.Addr().Unmap(), Peer: remote.Addr().Unmap(), Multihop: s.peer.severalHops(),
		OnChange: func(now bfd.Status) {
			s.showPath(now.State.String())
			if now.Failed {
				select {
				case broken <- now.Reason:
				default:
				}
			}
		},
	})
	if err != nil {
		s.announcer.options.Log.Warn("no BFD with a router; a dead path is noticed by the hold time", "peer", s.peer.String(), "err", err)
		s.showPath(err.Error())
		return nil, func() { s.showPath("") }
	}
	s.showPath(x.Status().State.String())
	return broken, func() {
		x.Close()
		s.showPath("")
	}
}

// showPath puts the state of the BFD session into the status.
func (s *session) showPath(state string) {
	s.mu.Lock()
	changed := s.current.BFD != state
	s.current.BFD = state
	s.mu.Unlock()
	if changed && s.announcer.options.OnPath != nil {
		s.announcer.options.OnPath()
	}
}

// deadPath tells the router, which may hear it, why the session ends.
func (c *connection) deadPath(reason string) error {
	return reject(c.conn, wire.NewMessageError(wire.BGP_ERROR_CEASE, bfdDown, nil, reason))
}

// severalHops reports whether the router is not on one of the node's networks: BFD has another port then (RFC 5883).
func (p Peer) severalHops() bool {
	if !p.Internal() {
		return p.MultihopTTL > 1
	}
	return !onLink(p.Address)
}
