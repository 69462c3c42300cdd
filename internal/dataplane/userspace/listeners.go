package userspace

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// listener is a port of the proxy, with the places whose connections it takes.
type listener struct {
	*relay.Listener
	balancer *balancer
	places   []place
}

// takes reports whether a listener takes the connections of a place.
func (l *listener) takes(pl place) bool { return slices.Contains(l.places, pl) }

// portOf returns where the connections of a place are listened for, 0 if
// nowhere.
func portOf(ls []*listener, pl place) uint16 {
	for _, l := range ls {
		if l.takes(pl) {
			return l.Port
		}
	}
	return 0
}

// opener opens the listeners of one family.
type opener struct {
	cfg     *Config
	failing *atomic.Int64
	family  svc.Family
	engine  *relay.Engine
	// hints are the ports that an earlier process had, as the rules in the
	// kernel have it: with the same ones UDP clients keep their endpoints.
	hints map[dataplane.FrontKey]uint16
}

// update returns the listeners that a service port needs: those it has, as far
// as they will do, and new ones. A listener that is not among them any more stays open.
func (o *opener) update(have []*listener, p *table.ServicePort) ([]*listener, error) {
	if p == nil {
		return nil, nil
	}
	var out []*listener
	var opened []*listener
	for _, w := range listenersFor(p) {
		l := taken(have, out, &w)
		if l == nil {
			b := newBalancer(o.cfg, o.failing)
			b.set(w.endpoints, p.Serving, p.Affinity)
			rl, err := o.open(p.Protocol, b, o.hints[w.places[0].front])
			if err != nil {
				for _, l := range opened {
					l.Close()
				}
				return nil, fmt.Errorf("%s: %w", p.ID, err)
			}
			l = &listener{Listener: rl, balancer: b}
			opened = append(opened, l)
		}
		out = append(out, &listener{Listener: l.Listener, balancer: l.balancer, places: w.places})
	}
	for i, w := range listenersFor(p) {
		out[i].balancer.set(w.endpoints, p.Serving, p.Affinity)
	}
	return out, nil
}

// taken finds the listener that most likely had these connections so far.
func taken(have, used []*listener, w *wanted) *listener {
	for _, pl := range w.places {
		for _, l := range have {
			if l.takes(pl) && !slices.ContainsFunc(used, func(u *listener) bool { return u.Listener == l.Listener }) {
				return l
			}
		}
	}
	return nil
}

// maxTries bounds the search for a free port in Config.Ports.
const maxTries = 100

func (o *opener) open(p svc.Protocol, b *balancer, hint uint16) (*relay.Listener, error) {
	r := o.cfg.Ports
	if hint != 0 && (r == svc.PortRange{} || r.Contains(hint)) {
		if l, err := o.engine.Listen(p, o.family, hint, b); err == nil {
			return l, nil
		}
	}
	if r == (svc.PortRange{}) {
		return o.engine.Listen(p, o.family, 0, b)
	}
	first := rand.IntN(r.Size())
	var err error
	for i := range min(r.Size(), maxTries) {
		var l *relay.Listener
		l, err = o.engine.Listen(p, o.family, r.First+uint16((first+i)%r.Size()), b)
		if err == nil || !errors.Is(err, relay.ErrPortTaken) {
			return l, err
		}
	}
	return nil, fmt.Errorf("no free port found in --proxy-port-range %s: %w", r, err)
}
