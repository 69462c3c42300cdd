package service

import (
	"context"
	"net/netip"
	"sync"

	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/registry/networking"
)

// Run keeps the allocators informed, looks after ServiceCIDRs and repairs
// claims, until ctx ends. Services can be created once it has read what is
// there, a moment after its start; until then creation waits for it. Events of
// the repair are written through client; without one they are only logged.
func (s Storage) Run(ctx context.Context, client kubernetes.Interface) {
	var wg sync.WaitGroup
	defer wg.Wait()
	addrs, ports, ranges := newGate(), newGate(), newGate()
	wg.Go(func() {
		a := s.alloc.addrs
		networking.Feed(ctx, "ipaddresses", a.claims.store, feedOf(a.ledger, parseAddr, addrs.open))
	})
	wg.Go(func() {
		p := s.alloc.ports
		networking.Feed(ctx, "nodeports", p.claims.store, feedOf(p.ledger, parsePort, ports.open))
	})
	wg.Go(func() {
		s.ranges.Run(ctx, func(prefixes map[netip.Prefix]bool) {
			if s.alloc.addrs.setRanges(prefixes) {
				ranges.open()
			}
		})
	})
	for _, g := range []*gate{addrs, ports, ranges} {
		select {
		case <-g.opened:
		case <-ctx.Done():
			return
		}
	}
	close(s.ready)
	recorder, stop := newRecorder(ctx, client)
	defer stop()
	s.repair.run(ctx, recorder)
}

// Destroy lets go of what no API shows; the shown storages are the API server's
// to destroy. It may be called more than once.
func (s Storage) Destroy() { s.alloc.ports.claims.store.Destroy() }

// gate is opened once and stays open.
type gate struct {
	once   sync.Once
	opened chan struct{}
}

func newGate() *gate { return &gate{opened: make(chan struct{})} }

func (g *gate) open() { g.once.Do(func() { close(g.opened) }) }

func parseAddr(name string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(name)
	return a, err == nil
}

// feedOf makes the ledger follow the claims; synced is called after every list.
func feedOf[K comparable](l *ledger[K], parse func(string) (K, bool), synced func()) reflector.Sink[any] {
	with := func(f func(K)) func(any) {
		return func(obj any) {
			if k, ok := parse(nameOf(obj)); ok {
				f(k)
			}
		}
	}
	return reflector.Sink[any]{
		Set: with(l.seen), Delete: with(l.gone),
		Replace: func(objs []any) {
			keys := map[K]bool{}
			for _, o := range objs {
				if k, ok := parse(nameOf(o)); ok {
					keys[k] = true
				}
			}
			l.replace(keys)
			synced()
		},
	}
}

// newRecorder writes Events through client until stop is called.
func newRecorder(ctx context.Context, client kubernetes.Interface) (recorder events.EventRecorder, stop func()) {
	if client == nil {
		return nil, func() {}
	}
	b := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	if err := b.StartRecordingToSinkWithContext(ctx); err != nil {
		return nil, func() {}
	}
	return b.NewRecorder(clientscheme.Scheme, "fairlead-allocation-repair"), b.Shutdown
}
