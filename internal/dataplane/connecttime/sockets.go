package connecttime

import (
	"context"
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
)

// sweeper ends connected sockets of UDP whose endpoint does not serve their frontend any more, as connection tracking is told to
// forget flows of nft's. It works beside the changes: a Pod may have very many sockets.
type sweeper struct {
	kernel interface {
		EndSockets(stay func(front, endpoint netip.AddrPort) bool) (int, error)
	}
	log *slog.Logger
	// wake is set when an endpoint has left.
	wake loop.Signal

	mu sync.RWMutex
	// members are the sorted endpoints that serve a frontend of UDP, also one that only nft translates now.
	members map[connect.Front][]netip.AddrPort
	// known are the families of which members has all.
	known map[svc.Family]bool
}

func newSweeper(k kernel, log *slog.Logger) *sweeper {
	return &sweeper{
		kernel: k, log: log, wake: loop.NewSignal(), members: map[connect.Front][]netip.AddrPort{}, known: map[svc.Family]bool{},
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
		front, now := keyOf(k, family), []netip.AddrPort(nil)
		p, f := c.Wanted(k)
		if p != nil && f != nil {
			now = membersOf(p.Serving, f.Endpoints, f.LocalClients)
		}
		left = left || slices.ContainsFunc(s.members[front], func(at netip.AddrPort) bool { return !contains(now, at) })
		if s.members[front] = now; len(now) == 0 {
			delete(s.members, front)
		}
	}
	if left {
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
	k := dataplane.FrontKey{Addr: front.Addr(), Port: front.Port(), Proto: svc.UDP}
	members, ok := s.members[keyOf(k, family)]
	if !ok {
		members = s.members[keyOf(dataplane.FrontKey{Port: k.Port, Proto: k.Proto, Node: true}, family)]
	}
	return contains(members, at)
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

// run ends sockets until ctx ends. Between two looks it rests for as long as the last one took.
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
		err := s.sweep()
		rest := time.Since(begin)
		if err != nil && !failed {
			failed = true
			s.log.Warn("cannot end all sockets of UDP that are connected with endpoints which are gone; trying again", "err", err)
		}
		switch {
		case err != nil:
			timer.Reset(retry)
		case woken:
			timer.Reset(lookAgain)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(rest):
		}
	}
}

func (s *sweeper) sweep() error {
	ended, err := s.kernel.EndSockets(s.serves)
	if ended > 0 {
		s.log.Info("ended sockets of UDP that were connected with endpoints which are gone", "sockets", ended)
	}
	return err
}
