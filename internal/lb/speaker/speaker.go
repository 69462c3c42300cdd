// Package speaker announces addresses of load balancers on a node by ARP and NDP, or by BGP. The speakers of a cluster
// vote on who announces which address (package quorum); the controller gives the addresses.
package speaker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/clock"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/lb/routes"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/lb/wire"
	"github.com/fairlead/fairlead/internal/lb/witness"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are the options of a Speaker. NodeName, Peer, Client, LB, Events and Front are required.
type Options struct {
	Client kubernetes.Interface
	LB     *v1.Client
	Events *events.Recorder
	Log    *slog.Logger
	// NodeName names this node.
	NodeName string
	// Peer is where other speakers reach this one: an address of the node, and a port
	// that is the same on all (default svc.SpeakerPort).
	Peer netip.AddrPort
	// Interfaces are the interfaces to announce at (default: by the networks of the addresses).
	Interfaces []string
	// Announce is v1.AnnounceARP (default), v1.AnnounceBGP or v1.AnnounceNone. Addresses are announced to BGPPeers
	// beside the objects of that kind, unless it is AnnounceNone.
	Announce string
	BGPPeers []bgp.Peer
	// Healthy reports whether the node's proxy serves, and if not, why. By default it asks the
	// proxy's /healthz at port svc.ProxyHealthPort of this machine.
	Healthy func(context.Context) (ok bool, reason string)
	// Programmed, if not nil, reports whether the node forwards connections to a
	// Service's port at an address.
	Programmed func(id svc.PortName, family svc.Family, addr netip.Addr) bool
	// Front serves the Services of the proxied way.
	Front Front
	// Now is clock.Boot, unless a test wants another rate.
	Now func() time.Duration
}

// Speaker announces addresses of load balancers on one node.
type Speaker struct {
	o         Options
	log       *slog.Logger
	known     *Known
	forwards  *forwarding
	announcer *announce.Announcer
	metrics   *speakerMetrics
	votes     *votes
	health    health
	peers     peerMACs
	status    speakerStatus

	// The loop is the only user of what follows.

	node     *quorum.Node // of votes; the loop reads it without a lock
	links    *links
	holdings *holdings
	routing  routing
	members  []quorum.Member
	// membersKnown is true once a majority of the voters was heard: without members, no
	// node may announce.
	membersKnown bool
	attrs        string // the interfaces that this node reports to the others
}

// New returns a Speaker that does nothing before Run.
func New(o Options) (*Speaker, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = clock.Boot
	}
	o.Announce = cmp.Or(o.Announce, v1.AnnounceARP)
	if o.Healthy == nil {
		o.Healthy = askHealthz
	}
	if o.Peer.Port() == 0 {
		o.Peer = netip.AddrPortFrom(o.Peer.Addr(), svc.SpeakerPort)
	}
	if o.NodeName == "" || len(o.NodeName) > wire.MaxName || !o.Peer.Addr().IsValid() {
		return nil, errors.New("a speaker needs the name and an address of its node")
	}
	s := &Speaker{o: o, log: o.Log, known: NewKnown(o.NodeName, o.Front), metrics: newSpeakerMetrics(), links: newLinks(o.Log)}
	s.forwards = &forwarding{o.Front, o.Programmed}
	s.node = quorum.NewNode(o.NodeName, o.Now(), randomNumber)
	s.votes = &votes{name: o.NodeName, now: o.Now, node: s.node, sent: s.metrics.sent}
	s.votes.witness = witness.New(witness.Options{
		Client: o.Client, Identity: fmt.Sprintf("%s/%x", o.NodeName, randomNumber()), Now: o.Now, Log: o.Log,
		Changed: s.votes.useWitness, Taken: s.known.wake.Set,
	})
	neighbours := s.votes.neighbours
	if o.Announce != v1.AnnounceARP {
		neighbours = nil
	}
	s.announcer = announce.New(announce.Options{
		Neighbours: neighbours,
		Interfaces: o.Interfaces, May: s.votes.may, IsPeer: s.peers.has, Conflict: s.conflict, Changed: s.known.wake.Set,
		Off: o.Announce == v1.AnnounceNone, Log: o.Log,
	})
	s.holdings = &holdings{
		name: o.NodeName, now: o.Now, node: s.node, known: s.known, announcer: s.announcer, forwards: s.forwards, events: o.Events,
		log: o.Log, moves: s.metrics.moves, changed: s.status.poke, since: map[netip.Addr]*ownership{}, waiting: map[netip.Addr]struct{}{},
	}
	s.routing = routing{
		name: o.NodeName, known: s.known, forwards: s.forwards, log: o.Log, changed: s.status.poke,
		began: time.Now(), since: map[netip.Addr]time.Time{}, unprogrammed: map[netip.Addr]struct{}{},
	}
	if o.Announce != v1.AnnounceNone {
		s.routing.routes = routes.New(routes.Options{
			Client: o.Client, LB: o.LB, Node: o.NodeName, Peers: o.BGPPeers, Log: o.Log, Events: o.Events, Changed: s.known.wake.Set,
		})
		s.metrics.registry.MustRegister(s.routing.routes)
	}
	return s, nil
}

// Wake has the speaker look at everything again: the Front calls it when a Service may have become ready, or not.
func (s *Speaker) Wake() { s.known.wake.Set() }

// Registry returns the Speaker's metrics.
func (s *Speaker) Registry() *prometheus.Registry { return s.metrics.registry }

// Run announces until ctx ends. Then it gives up its addresses, so that others take
// them over at once, and returns when everything that it started has ended. It uses
// the network namespace of the calling thread.
func (s *Speaker) Run(ctx context.Context) error {
	keys, err := wire.FirstKeys(ctx, s.o.Client, s.log)
	if err != nil {
		return err
	}
	conn, err := wire.Listen(s.o.NodeName, s.o.Peer, keys, s.log)
	if err != nil {
		return err
	}
	s.votes.wire = conn
	// What runs goes on until the addresses are given up.
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { conn.Run(inner) })
	running.Go(func() { conn.FollowKeys(inner, s.o.Client) })
	running.Go(func() { s.votes.witness.Run(inner) })
	running.Go(func() { s.health.run(inner, s.o.Healthy, s.known.wake.Set) })
	s.known.follow(inner, &running, s.o.Client, s.o.LB)
	running.Go(func() { s.o.Front.Run(inner) })
	if r := s.routing.routes; r != nil {
		running.Go(func() { r.Run(inner) })
	}
	defer s.o.Events.Start()()
	running.Go(func() { s.status.run(inner, s.o.LB, s.o.NodeName, s.log) })
	announced := make(chan error, 1)
	running.Go(func() { s.loop(ctx, inner, cancel) })
	announced <- s.announcer.Run(inner) // on this thread, for its network namespace
	cancel()
	return <-announced
}

// pause returns after how long the loop has something to do although nothing happens.
func (s *Speaker) pause() time.Duration {
	pause := max(0, s.node.Next()-s.o.Now())
	if s.holdings.pollSoon() {
		pause = min(pause, programmedPoll)
	}
	return pause
}

const (
	// heartbeat is how often the loop checks what it holds without a reason.
	heartbeat = quorum.Heartbeat
	// releaseTimeout bounds how long Run waits until the voters know that it ends.
	releaseTimeout = 500 * time.Millisecond
	// replaceTimeout bounds how long Run waits for another node that can take over: a node that
	// was just restarted votes after quorum.Promise.
	replaceTimeout = 2 * quorum.Promise
)

// loop handles everything that happens, one thing after the other.
func (s *Speaker) loop(ctx, inner context.Context, end func()) {
	defer end()
	if !s.firstList(ctx) {
		return
	}
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	done, late := ctx.Done(), (<-chan time.Time)(nil)
	for over := false; !over; {
		select {
		case <-done:
			done, late = nil, time.After(replaceTimeout)
		case <-late:
			over = true
		case r := <-s.votes.wire.In():
			s.votes.receive(r)
		case <-timer.C:
			s.votes.change(s.node.Tick)
		case <-s.known.wake:
			s.learn()
		case <-tick.C:
			s.lookAround()
		}
		s.settle()
		over = over || done == nil && s.holdings.replaceable()
		timer.Reset(s.pause())
	}
	s.release(inner)
}

// release gives up all addresses.
func (s *Speaker) release(ctx context.Context) {
	begin := time.Now()
	needed := s.node.HasWitness() && s.node.Replaceable(s.o.Now())
	withdrawn := make(chan struct{})
	go func() { defer close(withdrawn); s.routing.close(ctx) }()
	defer func() { <-withdrawn }()
	s.holdings.drop(func(netip.Addr) bool { return true })
	s.votes.change(func(now time.Duration) {
		s.node.SetAttrs(now, "")
		s.node.Want(now, nil, s.holdings.wanted())
	})
	s.votes.witness.End()
	deadline, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	// With two speakers the other one needs this one's vote until it has the witness's and, if it
	// was just restarted, its own.
	linger := func() bool {
		return needed && !(s.votes.witness.HandedOver() && len(s.node.Reached(s.o.Now())) == len(s.node.List().Voters))
	}
	for over := false; !over && (linger() || !s.node.Released(s.o.Now())); {
		timer := time.NewTimer(max(0, s.node.Next()-s.o.Now()))
		select {
		case <-deadline.Done():
			over = true
		case r := <-s.votes.wire.In():
			s.votes.receive(r)
		case <-timer.C:
			s.votes.change(s.node.Tick)
		}
		timer.Stop()
	}
	<-withdrawn
	released := s.node.Released(s.o.Now())
	s.votes.change(s.node.End)
	select {
	case <-s.votes.witness.Released():
	case <-deadline.Done():
	}
	if released {
		s.log.Info("gave up all addresses", "took", time.Since(begin).Round(time.Millisecond))
	} else {
		s.log.Warn("other speakers did not confirm that this one ends; they take over after a second")
	}
	s.report(false, "the speaker has ended")
	limited, cancel := context.WithTimeout(ctx, time.Second) // the API server may be away
	defer cancel()
	_ = s.status.flush(limited, s.o.LB, s.o.NodeName)
}

// firstList waits for the list of voters as it is written, not out of a cache: this
// node may have confirmed it before a restart.
func (s *Speaker) firstList(ctx context.Context) bool {
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		l, err := claim.GetVoters(limited, s.o.Client)
		cancel()
		if err == nil {
			s.votes.change(func(now time.Duration) { s.node.SetList(now, l.Current) })
			s.known.setList(l.Current)
			return true
		}
		select {
		case <-ctx.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
	return false
}
