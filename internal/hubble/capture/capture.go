// Package capture records the flows of a node: new connections, as the kernel's connection tracking reports them, and packets to
// Services that reached no endpoint, as the rules log them.
package capture

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/nflog"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Rate is how many connections a second are recorded for a longer time, and Burst how many at once. Of more a sample is taken:
// the kernel reports none of the others, so that they cost nothing.
const (
	Rate  = 200
	Burst = 400
)

const (
	// pause is about how long no connections are recorded after too many.
	pause = 500 * time.Millisecond
	// indexPeriod is the least time between two indexes of all Services, which takes time that grows with them.
	indexPeriod = time.Second
)

// Options configure a Recorder.
type Options struct {
	Ring  *hubble.Ring
	Peers *Peers
	// Table is what is programmed, nil before anything is; Index is its index.
	Table func() *table.Table
	Index *dataplane.OwnerIndex
	// Lost, which may be nil, gets the packets that reach no endpoint. Run closes it.
	Lost *nflog.Log
	Log  *slog.Logger
}

// Recorder records flows in a Ring.
type Recorder struct {
	o Options

	mu      sync.Mutex // guards owners
	owners  *dataplane.Owners
	indexed time.Time
}

// New returns a Recorder, which records nothing before Run.
func New(o Options) *Recorder { return &Recorder{o: o} }

// Run records flows of the network namespace of the calling thread until ctx ends.
func (r *Recorder) Run(ctx context.Context) error {
	events, err := conntrack.Watch()
	if err != nil {
		return fmt.Errorf("cannot watch connections: %w", err)
	}
	if conntrack.EventsOff() {
		r.o.Log.Warn("the kernel reports no connections, so that no flows of them are shown: set net.netfilter.nf_conntrack_events to 2")
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer context.AfterFunc(ctx, func() { _ = events.Close() })()
	wg.Go(func() { r.connections(ctx, events) })
	if r.o.Lost != nil {
		defer context.AfterFunc(ctx, func() { _ = r.o.Lost.Close() })()
		wg.Go(r.lost)
	}
	<-ctx.Done()
	return nil
}

// connections records new connections until events are closed.
func (r *Recorder) connections(ctx context.Context, events *conntrack.Events) {
	bucket := newBudget(Rate, Burst, time.Now())
	for {
		err := events.Receive(func(c *conntrack.Connection) {
			now := time.Now()
			if bucket.take(now) {
				r.connection(c, now)
			}
		})
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, conntrack.ErrMissed):
			bucket.missed(1)
		case err != nil:
			r.o.Log.Error("cannot watch connections; no flows are recorded", "err", err)
			return
		}
		if bucket.empty() && !r.rest(ctx, events, bucket) {
			return
		}
	}
}

// rest has no connections reported for a moment. It returns false when events are closed.
func (r *Recorder) rest(ctx context.Context, events *conntrack.Events, bucket *budget) bool {
	discarded, err := events.Pause()
	if err != nil {
		return !errors.Is(err, os.ErrClosed)
	}
	bucket.missed(uint64(discarded))
	began := time.Now()
	timer := time.NewTimer(pause/2 + rand.N(pause))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	}
	now := time.Now()
	r.o.Ring.Add(hubble.MissedFlow(now, bucket.skipped(began, now)))
	if err := events.Resume(); err != nil {
		if !errors.Is(err, os.ErrClosed) {
			r.o.Log.Error("cannot watch connections any more; no flows are recorded", "err", err)
		}
		return false
	}
	return true
}

// connection records one. What stays on the loopback interface and belongs to no Service is not recorded.
func (r *Recorder) connection(c *conntrack.Connection, now time.Time) {
	translated := c.Endpoint != c.Destination
	if c.Destination.Addr().IsLoopback() && !translated {
		return
	}
	f := hubble.Flow{Time: now, Protocol: c.Protocol, Source: c.Source, Destination: c.Endpoint, SYN: c.SYN}
	if translated {
		f.Service = r.owner(c.Protocol, c.Destination).Name
	}
	if c.AnsweredTo.Addr() != c.Source.Addr() {
		f.SourceXlated = c.AnsweredTo.Addr()
	}
	r.add(&f)
}

// add completes a flow by who its ends are.
func (r *Recorder) add(f *hubble.Flow) {
	var fromHere, toHere bool
	f.From, fromHere = r.o.Peers.Of(f.Source)
	f.To, toHere = r.o.Peers.Of(f.Destination)
	f.Direction = directionOf(fromHere, toHere)
	r.o.Ring.Add(*f)
}

// directionOf is the direction of a flow by which of its ends are on this node.
func directionOf(fromHere, toHere bool) flow.TrafficDirection {
	switch {
	case fromHere:
		return flow.TrafficDirection_EGRESS
	case toHere:
		return flow.TrafficDirection_INGRESS
	}
	return flow.TrafficDirection_TRAFFIC_DIRECTION_UNKNOWN
}

// owner returns the port of the Service that has an address, without a name if the Service has no such port; zero if no Service has
// the address.
func (r *Recorder) owner(p svc.Protocol, to netip.AddrPort) svc.PortName {
	t, owners := r.o.Table(), r.index(false)
	if owners == nil || t == nil {
		return svc.PortName{}
	}
	id, known := owners.Of(p, to)
	if known && frontendOf(t, id, to) != nil {
		return id
	}
	// The index may be older than the table.
	id, known = r.index(true).Of(p, to)
	if !known {
		return svc.PortName{}
	}
	return id
}

// index returns an index of the Services, a new one at most every indexPeriod.
func (r *Recorder) index(renew bool) *dataplane.Owners {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); r.owners == nil || renew && now.Sub(r.indexed) >= indexPeriod {
		r.owners, r.indexed = r.o.Index.Owners(), now
	}
	return r.owners
}

// lost records packets that reach no endpoint until the log is closed.
func (r *Recorder) lost() {
	for {
		err := r.o.Lost.Receive(func(p *nflog.Packet) {
			id := r.owner(p.Protocol, p.Destination)
			f := hubble.Flow{
				Time: time.Now(), Protocol: p.Protocol, Source: p.Source, Destination: p.Destination, SYN: p.SYN, Service: id.Name,
			}
			f.Reason, f.Summary = reasonOf(r.o.Table(), id, p)
			r.add(&f)
		})
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, nflog.ErrMissed):
			r.o.Ring.Add(hubble.MissedFlow(time.Now(), 1))
		case err != nil:
			r.o.Log.Error("cannot receive the packets that reach no endpoint; they are not shown as flows", "err", err)
			return
		}
	}
}
