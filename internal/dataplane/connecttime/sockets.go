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
	// retry is when sockets are looked at again after an error.
	retry = 5 * time.Second
	// maxLeft bounds the endpoints of TCP that have left within detourTime. An attempt to connect with one beyond that is not led on.
	maxLeft = 1 << 14
)

// sockets is what the sweeper needs of connect.Programs.
type sockets interface {
	EndSockets(stay func(front, endpoint netip.AddrPort) bool) (int, error)
	Attempts(stay func(front, endpoint netip.AddrPort) bool) ([]connect.Attempt, error)
	Choose(a *connect.Attempt) (to netip.AddrPort, vain bool, err error)
	EndAttempt(a *connect.Attempt) error
}

// leader is what the sweeper needs of detours.
type leader interface {
	to(r route) (netip.AddrPort, bool)
	lead(r route, to netip.AddrPort) bool
	expire() (next time.Duration)
	commit(begun []route) error
}

// sweeper ends connected sockets of UDP whose endpoint does not serve their frontend any more, and leads attempts to connect by TCP on,
// as connection tracking is told to forget flows of nft's. It works beside the changes: a Pod may have very many sockets.
type sweeper struct {
	kernel sockets
	lead   leader
	log    *slog.Logger
	// wake is set when an endpoint has left.
	wake loop.Signal

	mu sync.RWMutex
	// members are the sorted endpoints that serve a frontend of UDP, also one that only nft translates now.
	members map[connect.Front][]netip.AddrPort
	// known are the families of which members has all.
	known map[svc.Family]bool
	// left are the endpoints that frontends of TCP were led to, and leftSize is their number.
	left     map[connect.Front]map[netip.AddrPort]leaver
	leftSize int
	// looks is how often sockets of UDP are to be looked at.
	looks int
}

// leaver is an endpoint that connections are not led to any more.
type leaver struct {
	since time.Time
	// serves is set while it serves nevertheless, since others are preferred.
	serves bool
}

func newSweeper(k sockets, lead leader, log *slog.Logger) *sweeper {
	return &sweeper{
		kernel: k, lead: lead, log: log, wake: loop.NewSignal(), members: map[connect.Front][]netip.AddrPort{},
		known: map[svc.Family]bool{}, left: map[connect.Front]map[netip.AddrPort]leaver{},
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

// leave takes over which endpoints a frontend of TCP had, and which ones serve it now; nil are none.
func (s *sweeper) leave(front connect.Front, had *front, serving func() []netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.left[front]
	if had == nil && left == nil {
		return
	}
	var now []netip.AddrPort
	if serving != nil {
		now = serving()
	}
	for at, was := range left {
		if serves := contains(now, at); serves != was.serves {
			left[at] = leaver{was.since, serves}
			s.wake.Set()
		}
	}
	for i := 0; had != nil && i < len(had.lists); i++ {
		for _, at := range had.lists[i].endpoints {
			s.leaves(front, at, contains(now, at))
		}
	}
}

// leaves notes an endpoint that a frontend had. The caller holds s.mu.
func (s *sweeper) leaves(front connect.Front, at netip.AddrPort, serves bool) {
	left := s.left[front]
	if _, has := left[at]; !has {
		if s.leftSize >= maxLeft {
			return
		}
		s.leftSize++
	}
	if left == nil {
		left = map[netip.AddrPort]leaver{}
		s.left[front] = left
	}
	left[at] = leaver{time.Now(), serves}
	if !serves {
		s.wake.Set()
	}
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

// stays reports whether an attempt to connect with an endpoint may go on.
func (s *sweeper) stays(front, at netip.AddrPort) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	address, node := keysOf(front, svc.TCP)
	for _, k := range [...]connect.Front{address, node} {
		if one, left := s.left[k][at]; left && !one.serves {
			return false
		}
	}
	return true
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

// run works until ctx ends. Between two looks it rests for as long as the last one took.
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
		rest := time.Since(begin)
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

// sweep does everything once. next is when something is to be done without a change, 0 if nothing is.
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

// leadOn has attempts to connect by TCP go on with another endpoint, and ends the ones for which there is none.
func (s *sweeper) leadOn() (next time.Duration, err error) {
	begin := time.Now()
	if !s.haveLeft() {
		next = s.lead.expire()
		return next, s.lead.commit(nil)
	}
	all, err := s.kernel.Attempts(s.stays)
	errs := []error{err}
	var begun []route
	ended := 0
	tried := map[netip.AddrPort]bool{}
	for i := range all {
		a := &all[i]
		tried[a.To] = true
		r := route{a.From, a.To}
		if to, led := s.lead.to(r); led && s.stays(a.Front, to) {
			continue
		}
		to, vain, err := s.kernel.Choose(a)
		switch {
		case vain:
			ended++
			err = s.kernel.EndAttempt(a)
		case to.IsValid() && s.lead.lead(r, to):
			begun = append(begun, r)
		}
		errs = append(errs, err)
	}
	if err == nil {
		s.forget(begin, tried)
	}
	next = s.lead.expire()
	errs = append(errs, s.lead.commit(begun))
	if len(begun)+ended > 0 {
		s.log.Info("connections without an answer from endpoints which are gone", "led-on", len(begun), "ended", ended)
	}
	return next, errors.Join(errs...)
}

func (s *sweeper) haveLeft() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.leftSize > 0
}

// forget is for endpoints that nothing tries to connect with any more, as a look at a time has shown: new connections are not led to
// them.
func (s *sweeper) forget(looked time.Time, tried map[netip.AddrPort]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for front, left := range s.left {
		for at, one := range left {
			age := looked.Sub(one.since)
			if age > detourTime || age >= lookAgain && !one.serves && !tried[at] {
				delete(left, at)
				s.leftSize--
			}
		}
		if len(left) == 0 {
			delete(s.left, front)
		}
	}
}
