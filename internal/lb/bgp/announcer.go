// Package bgp announces addresses to routers by BGP (RFC 4271), over one session with
// each for both families (RFC 4760). It only announces: whatever a router announces is
// dropped unread, so that no route goes from one router to another through a node,
// and a router's whole table costs no memory here. It connects out and listens to
// nothing. Messages are encoded and decoded by GoBGP's packet library.
package bgp

import (
	"context"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/fairlead/fairlead/internal/lb/bfd"
)

// Options are what an Announcer is made of.
type Options struct {
	Log *slog.Logger
	// NodeName names this node. Its hash is the BGP identifier unless SetRouterID sets one.
	NodeName string
	// OnChange, if set, is called when a session begins, and when it ends or cannot
	// begin for a new reason. It must not call the Announcer's SetPeers or Close.
	OnChange func(PeerStatus)
	// OnPath, if set, is called when a PeerStatus has another BFD. The same holds for it.
	OnPath func()
}

// PeerStatus is the state of the session with a peer.
type PeerStatus struct {
	Name    string
	Address netip.Addr
	// State is that of RFC 4271, section 8.2.2: Idle, Connect, OpenSent, OpenConfirm or
	// Established.
	State string
	// Since is when State was entered.
	Since time.Time
	// Reason is why the last session ended or could not begin, or what an established
	// one lacks; empty if there is nothing to say.
	Reason string
	// BFD is the state of the BFD session beside an established one, or why there is none; empty if none is wanted.
	BFD string
	// Prefixes counts the routes that the peer has been sent.
	Prefixes int
	// Ended counts the sessions that ended.
	Ended int
}

// Established reports whether the session is up.
func (s PeerStatus) Established() bool { return s.State == established }

// Announcer announces addresses to peers. Its methods may be called by several
// goroutines.
type Announcer struct {
	options Options
	table   *table
	paths   *bfd.Sessions
	// complete is closed by Complete.
	complete chan struct{}
	once     sync.Once

	mu       sync.Mutex
	routerID netip.Addr
	sessions map[string]*session // by name of the peer
	ending   []*session          // sessions of former peers that still end
	closed   bool
}

// New makes an Announcer without peers.
func New(o Options) *Announcer {
	h := fnv.New32a()
	_, _ = h.Write([]byte(o.NodeName))
	id := netip.AddrFrom4([4]byte(h.Sum(nil)))
	return &Announcer{options: o, routerID: id, table: newTable(), paths: bfd.New(), complete: make(chan struct{}),
		sessions: map[string]*session{}}
}

// Complete reports that all is announced that an earlier process of this node did. A router with graceful restart then drops the
// other routes of that process. Before, it is not sent the End-of-RIB, so it keeps them beside the ones that it is sent.
func (a *Announcer) Complete() { a.once.Do(func() { close(a.complete) }) }

// SetRouterID sets the BGP identifier of sessions that begin later: an IPv4 address
// that no other speaker in the network has, best one of the node.
func (a *Announcer) SetRouterID(id netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if id.Is4() && !id.IsUnspecified() {
		a.routerID = id
	}
}

// SetPeers replaces the peers: sessions with other peers end, sessions with changed peers
// start again, and sessions with unchanged peers go on.
// Each peer is valid, and its name is its own.
func (a *Announcer) SetPeers(peers []Peer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	wanted := map[string]Peer{}
	for _, p := range peers {
		wanted[p.Name] = p.withDefaults()
	}
	a.ending = slices.DeleteFunc(a.ending, (*session).ended)
	restarted := map[string]bool{}
	for name, s := range a.sessions {
		p, ok := wanted[name]
		if ok && p == s.peer {
			continue
		}
		subcode := uint8(wire.BGP_ERROR_SUB_PEER_DECONFIGURED)
		if ok {
			subcode = wire.BGP_ERROR_SUB_OTHER_CONFIGURATION_CHANGE
		}
		s.stop(subcode)
		delete(a.sessions, name)
		a.ending = append(a.ending, s)
		restarted[name] = true
	}
	for name, p := range wanted {
		if a.sessions[name] == nil {
			s := newSession(a, p)
			s.hadSession = restarted[name]
			a.sessions[name] = s
			s.start(slices.Clone(a.ending))
		}
	}
}

// Announce announces an address with a route for each of some attributes, or changes the routes of an announced one. A peer for which
// several of them make the same prefix gets one route, with the communities of all and the highest local preference.
func (a *Announcer) Announce(address netip.Addr, attributes ...Attributes) {
	a.changed(a.table.announce(address.Unmap(), attributes))
}

// Withdraw ends the announcement of an address.
func (a *Announcer) Withdraw(address netip.Addr) {
	a.changed(a.table.withdraw(address.Unmap()))
}

// Networks returns the prefixes that are announced for more than one address, as aggregates.
func (a *Announcer) Networks() []netip.Prefix { return a.table.networks() }

func (a *Announcer) changed(prefixes []netip.Prefix) {
	if len(prefixes) == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		s.mark(prefixes)
	}
}

// Peers returns the state of all sessions, sorted by name.
func (a *Announcer) Peers() []PeerStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]PeerStatus, 0, len(a.sessions))
	for _, s := range a.sessions {
		out = append(out, s.status())
	}
	slices.SortFunc(out, func(x, y PeerStatus) int { return strings.Compare(x.Name, y.Name) })
	return out
}

// Restart ends the sessions of a process that is followed by another one at once. Routers with graceful restart keep the routes
// until that one has announced its own: their sessions end without a withdrawal and a NOTIFICATION (RFC 4724, section 4).
// For the others it is Close.
func (a *Announcer) Restart(ctx context.Context) {
	a.mu.Lock()
	for _, s := range a.sessions {
		s.returns.Store(true)
	}
	a.mu.Unlock()
	a.Close(ctx)
}

// Close withdraws everything, ends all sessions, and returns when the routers have
// closed their ends, which they do after they have read the withdrawals, or when ctx
// ends or a router has not done it for a second. The Announcer is of no use then.
func (a *Announcer) Close(ctx context.Context) {
	a.mu.Lock()
	a.closed = true
	all := a.ending
	for _, s := range a.sessions {
		s.stop(wire.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN)
		all = append(all, s)
	}
	a.sessions, a.ending = map[string]*session{}, nil
	a.mu.Unlock()
	for _, s := range all {
		select {
		case <-s.done:
		case <-ctx.Done():
			return
		}
	}
}
