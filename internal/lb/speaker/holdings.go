package speaker

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// holdings are the addresses that this node announces by ARP and NDP, or waits for. Only the loop uses it.
type holdings struct {
	name      string // of the node
	now       func() time.Duration
	node      *quorum.Node
	known     *Known
	announcer *announce.Announcer
	forwards  *forwarding
	events    *events.Recorder
	log       *slog.Logger
	moves     prometheus.Counter
	changed   func() // is called when the Speaker object has to show something else
	since     map[netip.Addr]*ownership
	waiting   map[netip.Addr]struct{} // wanted, and not yet announced
	// guests are the addresses that this node keeps although another one should have them, until it fails.
	guests map[netip.Addr]struct{}
	began  time.Duration // when the speaker did
	spread time.Duration // until then the node keeps no address that another one should have
	// unprogrammed is true if the proxy lacks an address that the voters have promised.
	unprogrammed bool
	quota        events.Quota // of Events and lines about addresses
}

// newAddress is the reason for which a node announces an address that no node had before, as far as it knows.
const newAddress = "new address"

const (
	// programmedPoll is how often a node checks whether its proxy has programmed an address that it could announce, and
	// maxPolled the most addresses for which it checks more often than at each heartbeat.
	programmedPoll = 10 * time.Millisecond
	maxPolled      = 100
)

// pollSoon reports whether an address waits only for the proxy.
func (h *holdings) pollSoon() bool { return h.unprogrammed && len(h.waiting) <= maxPolled }

// statusOf adds the announced addresses to a status.
func (h *holdings) statusOf(status *v1.SpeakerStatus) {
	for addr, o := range h.since {
		if o.announced.IsZero() {
			continue
		}
		a := v1.AnnouncedAddress{Address: addr.String(), Via: "arp", Since: metav1.NewMicroTime(o.announced), Reason: o.reason}
		if addr.Is6() {
			a.Via = "ndp"
		}
		if where := h.announcer.Where(addr); len(where) > 0 {
			a.Interface = where[0]
		}
		status.Addresses = append(status.Addresses, a)
	}
}

// count returns how many addresses are announced.
func (h *holdings) count() (n int) {
	for _, o := range h.since {
		if !o.announced.IsZero() {
			n++
		}
	}
	return n
}

// ownership is the state of an address that this node announces or waits for.
type ownership struct {
	reason     string
	taken      bool      // by the announcer, which begins to answer after a probe
	interfaces []string  // with which it was taken
	announced  time.Time // zero while it is not answered for
	// early is true if no other node had the address, as far as the speaker knew, which had just begun. It counts for evenPeriod.
	early bool
}

// gain begins to announce the addresses that the voters have promised to this node.
func (h *holdings) gain() {
	now := h.now()
	h.unprogrammed = false
	for addr := range h.waiting {
		if !h.node.Holds(now, addr) {
			continue
		}
		a := h.known.one(addr)
		if !h.forwards.has(&a) {
			h.unprogrammed = true
			continue // looked at again soon, see pollSoon
		}
		delete(h.waiting, addr)
		o := h.since[addr]
		o.taken, o.interfaces = true, a.ways.interfaces
		if a.fresh && o.reason == newAddress {
			h.announcer.TakeNew(o.interfaces, addr)
		} else {
			h.announcer.Take(o.interfaces, addr)
		}
	}
	h.answered()
}

// rewire moves an address to the interfaces of its pool if these have changed.
func (h *holdings) rewire(a *address) {
	o := h.since[a.addr]
	if o == nil || !o.taken || slices.Equal(o.interfaces, a.ways.interfaces) {
		return
	}
	o.interfaces, o.announced = a.ways.interfaces, time.Time{}
	o.reason = "the pool's interfaces have changed"
	h.announcer.Leave(a.addr)
	h.announcer.Take(o.interfaces, a.addr)
	h.changed()
}

// answered records for which addresses the announcer has begun to answer after its probe, or has
// stopped since a foreign machine has the address or the interface was removed.
func (h *holdings) answered() {
	unreported := 0
	for _, addr := range h.announcer.Moved() {
		o := h.since[addr]
		if o == nil || !o.taken {
			continue
		}
		h.changed()
		answers := len(h.announcer.Where(addr)) > 0
		if answers == !o.announced.IsZero() {
			continue
		}
		if !answers {
			o.announced = time.Time{}
			continue
		}
		o.announced = time.Now()
		h.moves.Inc()
		if !h.quota.Take(o.announced) {
			unreported++
			continue
		}
		how := "ARP"
		if addr.Is6() {
			how = "NDP"
		}
		a := h.known.one(addr)
		for _, ref := range a.refs {
			h.events.Event(&ref, corev1.EventTypeNormal, "AddressAnnounced",
				fmt.Sprintf("node %s answers for %s by %s: %s", h.name, addr, how, o.reason))
		}
		h.log.Info("announcing an address", "address", addr, "service", claim.Join(a.services), "reason", o.reason)
	}
	if unreported > 0 {
		h.log.Info("announcing more addresses, without an Event and a line for each; the Speaker object has them", "count", unreported)
	}
}

// drop stops announcing the addresses for which lost returns true: other nodes may have them by now.
func (h *holdings) drop(lost func(netip.Addr) bool) {
	var lostAddrs []netip.Addr
	for addr, o := range h.since {
		if o.taken && lost(addr) {
			o.taken, o.announced = false, time.Time{}
			o.reason = "took over: majority of speakers reachable"
			h.waiting[addr] = struct{}{}
			lostAddrs = append(lostAddrs, addr)
		}
	}
	if len(lostAddrs) > 0 {
		h.announcer.Leave(lostAddrs...)
		h.changed()
	}
}

// wanted returns all addresses that the speaker wants.
func (h *holdings) wanted() (out []netip.Addr) {
	for a := range h.since {
		out = append(out, a)
	}
	return out
}

// evenPeriod is how long after its start a speaker gives an address that no other one had to the node that should have it:
// when a cluster starts, the first node would keep all.
const evenPeriod = time.Minute

// rebalancePeriod is how long after 'fairlead lb rebalance' addresses go to nodes that take part again only then: the API
// shows a node that has returned before the other speakers count on it.
const rebalancePeriod = 30 * time.Second

// want begins to wait for an address.
func (h *holdings) want(a *address) {
	if h.since[a.addr] == nil {
		h.since[a.addr] = &ownership{reason: newAddress, early: h.now()-h.began < evenPeriod}
	}
	h.waiting[a.addr] = struct{}{}
}

// keeps reports whether this node keeps an address that another one should have: it changes hands when its node fails.
func (h *holdings) keeps(addr netip.Addr) bool {
	o, now := h.since[addr], h.now()
	return o != nil && !(o.early && now-h.began < evenPeriod) && now >= h.spread && h.node.Keeps(now, addr)
}

// lostGuests returns guests that are held no longer.
func (h *holdings) lostGuests() (out []address) {
	for addr := range h.guests {
		if !h.keeps(addr) {
			out = append(out, h.known.one(addr))
		}
	}
	return out
}

// lastOf records in what waits that a node no longer announces: it may get what that node had. No node had a new address.
func (h *holdings) lastOf(gone string) {
	for addr := range h.waiting {
		o := h.since[addr]
		if a := h.known.one(addr); !o.taken && !(o.reason == newAddress && a.fresh) {
			o.reason, o.early = fmt.Sprintf("node %s no longer announces", gone), false
		}
	}
}

// replaceable reports whether other nodes take the addresses over soon when the speaker ends now.
func (h *holdings) replaceable() bool {
	holds := false
	for _, o := range h.since {
		holds = holds || o.taken
	}
	return !holds || h.node.Alone() || h.node.Replaceable(h.now())
}
