package connecttime

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// lookAgain is when sockets are looked at once more: one that connected while its endpoint left may have been noted after the first
	// look.
	lookAgain = time.Second
	// leastRest is the least time between two looks: at many changes in a second, each look would find what the one before has found. It is
	// shorter than the time after which the kernel repeats a SYN.
	leastRest = 500 * time.Millisecond
	// retry is when sockets are looked at again after an error.
	retry = 5 * time.Second
	// maxLeft bounds the endpoints of TCP that are noted to have left. Sweeps forget them, and at the bound there is one now and one after
	// detourTime. An attempt to connect with one beyond that is not led on.
	maxLeft = 1 << 14
	// lookForAnswers is how often the sweeper looks at attempts that were led on. The detours of answered ones can go.
	lookForAnswers = 5 * time.Second
)

// sockets is what the sweeper needs of connect.Programs.
type sockets interface {
	EndSockets(stay func(front, endpoint netip.AddrPort) bool) (int, error)
	Attempts(stay func(front, endpoint netip.AddrPort) bool) ([]connect.Attempt, error)
	Choose(a *connect.Attempt) (netip.AddrPort, error)
	EndAttempts(all []connect.Attempt) (int, error)
}

// leader is what the sweeper needs of detours.
type leader interface {
	to(r route) (netip.AddrPort, bool)
	leadsFrom(at netip.AddrPort) bool
	lead(r route, to netip.AddrPort) bool
	keep(of map[route]bool)
	size() int
	commit() error
}

// sweeper ends connected sockets of UDP whose endpoint does not serve their frontend any more, and leads attempts to connect by TCP on,
// as connection tracking is told to forget flows that rules have translated. It works beside the changes: a Pod may have very many sockets.
type sweeper struct {
	kernel sockets
	lead   leader
	log    *slog.Logger
	// wake is set when an endpoint has left, or attempts may find another one.
	wake loop.Signal

	mu sync.RWMutex
	// members are the sorted endpoints that serve a frontend of UDP, also one that only the rules translate now.
	members map[connect.Front][]netip.AddrPort
	// known are the families of which members has all.
	known map[svc.Family]bool
	// left has the endpoints that connections to a frontend of TCP are not led to any more, and leftSize is their number.
	left     map[connect.Front]*leavers
	leftSize int
	// looks is the number of looks at sockets of UDP that are due.
	looks int
}

// leavers are endpoints of a frontend that have left. none is set while no endpoint serves it.
type leavers struct {
	of   map[netip.AddrPort]leaver
	none bool
}

// leaver is an endpoint that has left.
type leaver struct {
	since time.Time
	// serves is set while it serves nevertheless, since others are preferred.
	serves bool
}

func newSweeper(k sockets, lead leader, log *slog.Logger) *sweeper {
	return &sweeper{
		kernel: k, lead: lead, log: log, wake: loop.NewSignal(), members: map[connect.Front][]netip.AddrPort{},
		known: map[svc.Family]bool{}, left: map[connect.Front]*leavers{},
	}
}

// serve takes over what a Change has written, and has sockets looked at if an endpoint has left, or everything was compared.
func (s *sweeper) serve(family svc.Family, c *dataplane.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := c.Full
	if c.Full {
		for front := range s.members {
			k, of := frontKey(front)
			if _, f := c.Wanted(k); of == family && f == nil {
				delete(s.members, front)
			}
		}
		s.known[family] = true
	}
	for k := range c.Dirty {
		if k.Proto != svc.UDP {
			continue
		}
		front := keyOf(k, family)
		now := serving(c.Wanted(k))
		left = left || slices.ContainsFunc(s.members[front], func(at netip.AddrPort) bool { return !contains(now, at) })
		if s.members[front] = now; len(now) == 0 {
			delete(s.members, front)
		}
	}
	if left {
		s.look()
	}
}

// look has sockets of UDP looked at, now and after lookAgain. The caller holds s.mu.
func (s *sweeper) look() {
	s.looks = 2
	s.wake.Set()
}

// leave notes the endpoints that connections to a frontend of TCP are led to no more. had is what the programs did with the frontend, and
// want is what they do now, nil for nothing. If the two do not differ, both are nil. serving returns the endpoints that still serve.
func (s *sweeper) leave(front connect.Front, had, want *front, serving func() []netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.left[front]
	gone := without(had, want)
	if len(gone) == 0 && left == nil {
		return
	}
	now := serving()
	if left == nil {
		left = &leavers{of: map[netip.AddrPort]leaver{}}
		s.left[front] = left
	}
	for _, at := range gone {
		if _, has := left.of[at]; has || s.leftSize < maxLeft {
			if !has {
				s.leftSize++
			}
			left.of[at] = leaver{since: time.Now(), serves: true}
		}
		if s.leftSize >= maxLeft {
			s.wake.Set()
		}
	}
	none := len(now) == 0
	// Attempts that found no other endpoint before may find one now, or have to end.
	look := want != nil || none && !left.none
	left.none = none
	for at, was := range left.of {
		switch serves := contains(now, at); {
		case serves && !was.serves: // it is back
			delete(left.of, at)
			s.leftSize--
		case !serves && was.serves:
			left.of[at] = leaver{was.since, false}
			s.wake.Set()
		case !serves && look:
			s.wake.Set()
		}
	}
}

// without returns the endpoints of had that want has not.
func without(had, want *front) (out []netip.AddrPort) {
	if had == nil {
		return nil
	}
	kept := map[netip.AddrPort]bool{}
	for i := 0; want != nil && i < len(want.lists); i++ {
		for _, at := range want.lists[i].endpoints.list() {
			kept[at] = true
		}
	}
	for i := range had.lists {
		for _, at := range had.lists[i].endpoints.list() {
			if !kept[at] {
				out = append(out, at)
			}
		}
	}
	return out
}

// serves reports whether an endpoint may keep the sockets that are connected with a frontend or a node port.
func (s *sweeper) serves(front, at netip.AddrPort) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	family := svc.FamilyOf(front.Addr())
	if !s.known[family] {
		return true
	}
	address, node := keysOf(front, svc.UDP)
	members, ok := s.members[address]
	if !ok {
		members = s.members[node]
	}
	return contains(members, at)
}

// stays reports whether connections with an endpoint may go on, and if not, whether the frontend has others.
func (s *sweeper) stays(front, at netip.AddrPort) (stays, others bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	address, node := keysOf(front, svc.TCP)
	for _, k := range [...]connect.Front{address, node} {
		left := s.left[k]
		if left == nil {
			continue
		}
		if one, has := left.of[at]; has && !one.serves {
			return false, !left.none
		}
	}
	return true, true
}

// keysOf are the two frontends that may have led a connection with an address.
func keysOf(at netip.AddrPort, p svc.Protocol) (address, node connect.Front) {
	family := svc.FamilyOf(at.Addr())
	return keyOf(dataplane.FrontKey{Addr: at.Addr(), Port: at.Port(), Proto: p}, family),
		keyOf(dataplane.FrontKey{Port: at.Port(), Proto: p, Node: true}, family)
}

func contains(members []netip.AddrPort, at netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(members, at, netip.AddrPort.Compare)
	return found
}

// start runs the sweeper until stop is called, which returns when it has ended.
func (s *sweeper) start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.run(ctx) })
	return func() { cancel(); wg.Wait() }
}

// run works until ctx ends. Between two looks it rests for leastRest, or for as long as the last one took.
func (s *sweeper) run(ctx context.Context) {
	timer := time.NewTimer(retry)
	timer.Stop()
	defer timer.Stop()
	for failed := false; ; {
		woken := false
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
			woken = true
		case <-timer.C:
		}
		begin := time.Now()
		next, err := s.sweep()
		rest := max(leastRest, time.Since(begin))
		if err != nil && !failed {
			failed = true
			s.log.Warn("cannot end all sockets that are connected with endpoints which are gone, or lead them on; trying again", "err", err)
		}
		switch {
		case err != nil:
			timer.Reset(retry)
		case woken:
			timer.Reset(lookAgain)
		case next > 0:
			timer.Reset(next)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(rest):
		}
	}
}

// sweep looks at all sockets once. next is when to look again without a change, 0 for never.
func (s *sweeper) sweep() (next time.Duration, err error) {
	next, err = s.leadOn()
	return next, errors.Join(s.endSockets(), err)
}

// endSockets ends connected sockets of UDP, if an endpoint has left that may have some.
func (s *sweeper) endSockets() error {
	s.mu.Lock()
	looks := s.looks
	s.looks = max(0, looks-1)
	s.mu.Unlock()
	if looks == 0 {
		return nil
	}
	ended, err := s.kernel.EndSockets(s.serves)
	if ended > 0 {
		s.log.Info("ended sockets of UDP that were connected with endpoints which are gone", "sockets", ended)
	}
	if err != nil {
		s.mu.Lock()
		s.looks++
		s.mu.Unlock()
	}
	return err
}

// leadOn has attempts to connect by TCP go on with another endpoint, and ends the ones whose Service has none. An attempt that only the
// packet filter can lead to another endpoint goes on trying.
func (s *sweeper) leadOn() (next time.Duration, err error) {
	begin := time.Now()
	if !s.haveLeft() && s.lead.size() == 0 {
		return 0, s.lead.commit()
	}
	all, err := s.kernel.Attempts(func(front, at netip.AddrPort) bool {
		stays, _ := s.stays(front, at)
		return stays && !s.lead.leadsFrom(at) // which may serve again, while the endpoint that the attempt was led to has left
	})
	errs := []error{err}
	var ended []connect.Attempt
	tried, routes, led, gone := map[netip.AddrPort]bool{}, map[route]bool{}, 0, 0
	for i := range all {
		a := &all[i]
		r := route{a.From, a.To}
		at, has := s.lead.to(r)
		if !has {
			at = a.To
		}
		tried[a.To], tried[at], routes[r] = true, true, true
		stays, others := s.stays(a.Front, at)
		if stays {
			continue
		}
		if !others {
			ended = append(ended, *a)
			continue
		}
		to, err := s.kernel.Choose(a)
		errs = append(errs, err)
		if to.IsValid() && s.lead.lead(r, to) {
			tried[to] = true
			led++
		}
	}
	if len(ended) > 0 {
		n, err := s.kernel.EndAttempts(ended)
		gone, errs = n, append(errs, err)
	}
	if err == nil { // all has all attempts
		s.forget(begin, tried)
		s.lead.keep(routes)
	}
	errs = append(errs, s.lead.commit())
	switch {
	case s.lead.size() > 0:
		next = lookForAnswers
	case s.full():
		next = detourTime
	}
	if led+gone > 0 {
		s.log.Info("connections without an answer from endpoints which are gone", "led-on", led, "ended", gone)
	}
	return next, errors.Join(errs...)
}

// haveLeft reports whether an endpoint has left that something may try to connect with.
func (s *sweeper) haveLeft() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.leftSize > 0
}

// full reports whether no more endpoints can be noted.
func (s *sweeper) full() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.leftSize >= maxLeft
}

// forget drops the endpoints that no attempt names any more, as a look at a time has shown: new connections are not led to them.
func (s *sweeper) forget(looked time.Time, tried map[netip.AddrPort]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for front, left := range s.left {
		for at, one := range left.of {
			age := looked.Sub(one.since)
			if age > detourTime || age >= lookAgain && !one.serves && !tried[at] {
				delete(left.of, at)
				s.leftSize--
			}
		}
		if len(left.of) == 0 {
			delete(s.left, front)
		}
	}
}
