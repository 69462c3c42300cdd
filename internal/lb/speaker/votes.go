package speaker

import (
	crand "crypto/rand"
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/lb/wire"
	"github.com/fairlead/fairlead/internal/lb/witness"
)

// votes is this node's part in the votes about addresses. The loop is the only writer of node.
type votes struct {
	name    string
	now     func() time.Duration
	witness *witness.Witness
	wire    *wire.Conn
	sent    prometheus.Counter // messages

	// mu guards node: the announcer reads it, the loop changes it.
	mu   sync.RWMutex
	node *quorum.Node
}

// randomNumber returns a number that no other process has.
func randomNumber() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // it does not fail (crypto/rand)
	return binary.NativeEndian.Uint64(b[:])
}

// useWitness makes the node count on the witness as long as the rule does, and no longer.
func (v *votes) useWitness() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.node.SetWitness(v.witness.Until())
}

// may is how the announcer asks before each frame. The lock is held while the frame is
// sent, so that an address is not released between the question and the answer.
func (v *votes) may(a netip.Addr, send func()) bool {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if !v.node.Holds(v.now(), a) {
		return false
	}
	send()
	return true
}

// receive handles a message of another speaker.
func (v *votes) receive(r wire.Received) {
	v.exchange(&r, func(now time.Duration) { v.node.Receive(now, r.From, r.Message) })
}

// change changes the node by f and sends the messages that follow.
func (v *votes) change(f func(now time.Duration)) { v.exchange(nil, f) }

// end ends the sessions with the voters, which keep for away what this node had, and sends the messages several times.
func (v *votes) end(away time.Duration) {
	v.mu.Lock()
	v.node.End(v.now(), away)
	out := v.node.Take()
	v.mu.Unlock()
	for i := range endRepeats {
		if i > 0 {
			time.Sleep(endPause)
		}
		v.sent.Add(float64(len(out)))
		v.wire.Send(out, nil)
	}
}

// exchange is change, where f handles r if that is not nil.
func (v *votes) exchange(r *wire.Received, f func(now time.Duration)) {
	v.mu.Lock()
	v.node.SetWitness(v.witness.Until())
	f(v.now())
	out := v.node.Take()
	v.mu.Unlock()
	v.sent.Add(float64(len(out)))
	v.wire.Send(out, r)
}

// neighbours returns the addresses of the other voters if other nodes may announce, or if it is not known whether
// they may (announce.Options): a node without a majority asks for the witness only when it has an interface.
func (v *votes) neighbours() (addrs []netip.Addr, ok bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	members, ok := v.node.Members(v.now())
	if ok && !slices.ContainsFunc(members, func(m quorum.Member) bool { return m.Name != v.name }) {
		return nil, true
	}
	for _, voter := range v.node.List().Voters {
		if at, err := netip.ParseAddrPort(voter.Address); err == nil && voter.Name != v.name {
			addrs = append(addrs, at.Addr())
		}
	}
	return addrs, ok
}
