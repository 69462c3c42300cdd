package lb

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// newAddress is the reason for which a node announces what none did before, as far as it knows.
const newAddress = "new address"

// gain begins to announce what this node has got.
func (s *Speaker) gain() {
	now := s.o.Now()
	s.unprogrammed = false
	for addr := range s.waiting {
		if !s.node.Holds(now, addr) {
			continue
		}
		a := s.known.one(addr)
		if !s.programmed(&a) {
			s.unprogrammed = true
			continue // looked at again soon, see pause
		}
		delete(s.waiting, addr)
		o := s.since[addr]
		o.taken, o.interfaces = true, a.ways.interfaces
		if a.fresh && o.reason == newAddress {
			s.announce.TakeNew(o.interfaces, addr)
		} else {
			s.announce.Take(o.interfaces, addr)
		}
	}
	s.answered()
}

// rewire moves an address to the interfaces of its pool if these have changed.
func (s *Speaker) rewire(a *address) {
	o := s.since[a.addr]
	if o == nil || !o.taken || slices.Equal(o.interfaces, a.ways.interfaces) {
		return
	}
	o.interfaces, o.announced = a.ways.interfaces, time.Time{}
	o.reason = "the pool's interfaces have changed"
	s.announce.Leave(a.addr)
	s.announce.Take(o.interfaces, a.addr)
	s.status.poke()
}

// answered follows for which addresses the announcer has begun to answer after its probe, or has
// ended to since a foreign machine has the address or the interface is gone.
func (s *Speaker) answered() {
	unreported := 0
	for _, addr := range s.announce.Moved() {
		o := s.since[addr]
		if o == nil || !o.taken {
			continue
		}
		s.status.poke()
		answers := len(s.announce.Where(addr)) > 0
		if answers == !o.announced.IsZero() {
			continue
		}
		if !answers {
			o.announced = time.Time{}
			continue
		}
		o.announced = time.Now()
		s.metrics.moves.Inc()
		if !s.quota.take(o.announced) {
			unreported++
			continue
		}
		how := "ARP"
		if addr.Is6() {
			how = "NDP"
		}
		a := s.known.one(addr)
		for _, ref := range a.refs {
			s.events.Event(&ref, corev1.EventTypeNormal, "AddressAnnounced",
				fmt.Sprintf("node %s answers for %s by %s: %s", s.o.NodeName, addr, how, o.reason))
		}
		s.log.Info("announcing an address", "address", addr, "service", names(a.services), "reason", o.reason)
	}
	if unreported > 0 {
		s.log.Info("announcing more addresses, without an Event and a line for each; the Speaker object has them", "count", unreported)
	}
}

// A take-over of thousands of addresses must not displace all other Events.
const (
	quotaSize   = 100
	quotaPeriod = 10 * time.Second
)

// quota bounds what is reported in quotaPeriod to quotaSize.
type quota struct {
	since time.Time
	used  int
}

// take reports whether one more is within the quota.
func (q *quota) take(now time.Time) bool {
	if now.Sub(q.since) >= quotaPeriod {
		*q = quota{since: now}
	}
	q.used++
	return q.used <= quotaSize
}
