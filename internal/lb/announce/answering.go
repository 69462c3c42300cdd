package announce

import (
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

const (
	// askPeriod is how often a network that does not answer is asked.
	askPeriod = 200 * time.Millisecond
	// askLimit is after how long an interface is used although nothing answers there: a switch forwards
	// after 30 s at the latest (IEEE 802.1D-2004, 17.14), and the gateway may be gone.
	askLimit = 45 * time.Second
)

// newLink is an interface that has come up. It has a carrier, and its network may yet not answer: the
// port of a switch does not forward at once, nor do the ports of a bond that are negotiated.
type newLink struct {
	link link.Interface
	// asked are the gateways and speakers there, of which one has to answer.
	asked    []netip.Addr
	since    time.Time // of the first question
	answered atomic.Bool
}

// answering returns the interfaces whose network answers, and begins to ask at the others. The caller holds mu, as
// of asks.
func (a *Announcer) answering(found []link.Interface) (out []link.Interface) {
	if a.opts.Neighbours == nil {
		return found
	}
	now := map[int]MAC{}
	for _, l := range found {
		now[l.Index] = l.MAC
		switch n := a.newLinks[l.Index]; {
		case a.answered[l.Index] == l.MAC:
			out = append(out, l)
		case n == nil || n.link.MAC != l.MAC:
			a.newLinks[l.Index] = &newLink{link: l}
		default:
			n.link = l
		}
	}
	for index, mac := range a.answered {
		if now[index] != mac {
			delete(a.answered, index)
		}
	}
	for index, n := range a.newLinks {
		if now[index] != n.link.MAC {
			delete(a.newLinks, index)
		}
	}
	return out
}

// ask asks at each new interface whose time has come, and returns when to do so again. An interface that
// answers is used from the next refresh on.
func (a *Announcer) ask(now time.Time) (next time.Time) {
	if len(a.newLinks) == 0 {
		return now.Add(time.Hour)
	}
	next = now.Add(askPeriod)
	neighbours, ok := a.opts.Neighbours()
	for index, n := range a.newLinks {
		n.asked = n.asked[:0]
		if len(neighbours) > 0 {
			n.asked = append(n.asked, n.link.Gateways...)
		}
		for _, addr := range neighbours {
			if slices.ContainsFunc(n.link.Networks, func(p netip.Prefix) bool { return p.Contains(addr) }) {
				n.asked = append(n.asked, addr)
			}
		}
		late := !n.since.IsZero() && now.Sub(n.since) >= askLimit
		answered := n.answered.Load()
		if answered || late || ok && len(n.asked) == 0 {
			if late && !answered {
				a.log.Warn("no gateway and no speaker answers at an interface; using it nonetheless", "interface", n.link.Name, "asked", n.asked)
			}
			delete(a.newLinks, index)
			a.answered[index] = n.link.MAC
			a.reopen.Set()
			continue
		}
		if d := a.device(n.link); d != nil && len(n.asked) > 0 {
			if n.since.IsZero() {
				n.since = now
			}
			for _, addr := range n.asked {
				d.send(probe(addr, n.link.MAC))
			}
		}
	}
	return next
}

// heard takes a frame that may be the answer to ask. It is called with the lock held for reading.
func (a *Announcer) heard(d *device, q question) {
	n := a.newLinks[d.link.Index]
	if n != nil && q.mac != n.link.MAC && q.answer && slices.Contains(n.asked, q.target) && !n.answered.Swap(true) {
		a.wake.Set()
	}
}

// Unanswered returns the names of the interfaces that are up and not used, since their network does not answer.
func (a *Announcer) Unanswered() (names []string) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for _, n := range a.newLinks {
		names = append(names, n.link.Name)
	}
	slices.Sort(names)
	return names
}
