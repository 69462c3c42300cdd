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
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	"github.com/fairlead/fairlead/internal/loop"
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
	// Leaving, if not nil, reports whether the process that is told to end is not started again soon, as far as is known.
	// Otherwise the others keep its addresses for a moment.
	Leaving func(context.Context) bool
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
	unused   *unused
	members  []quorum.Member
	// membersKnown is true once a majority of the voters was heard: without members, no
	// node may announce.
	membersKnown bool
	attrs        string // the interfaces that this node reports to the others
	// returning is what an earlier process of this node had when it was restarted, spread the last request to rebalance.
	returning []netip.Addr
	spread    *string
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
	s.status.soon = loop.NewSignal()
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
		guests: map[netip.Addr]struct{}{}, began: o.Now(),
	}
	s.routing = routing{
		name: o.NodeName, known: s.known, forwards: s.forwards, log: o.Log, changed: s.status.poke,
		rebooted: clock.Boot() < forgetful,
		began:    time.Now(), since: map[netip.Addr]time.Time{}, unprogrammed: map[netip.Addr]struct{}{},
		only: map[netip.Addr][]string{},
	}
	s.unused = newUnused(s.known, s.forwards, o.Log)
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
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
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
	running.Go(func() { s.unused.run(inner) })
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

// AwayTime is how long the others keep the addresses of a speaker that is restarted. In that time its node goes on to
// forward, and answers no new ARP or NDP requests.
const AwayTime = 5 * time.Second

const (
	// heartbeat is how often the loop checks what it holds without a reason.
	heartbeat = quorum.Heartbeat
	// decideTimeout bounds how long Run waits for the API server to tell whether the node is left for good. Its connections are lost if a
	// busy server answers too late.
	decideTimeout = 2 * time.Second
	// releaseTimeout bounds how long Run waits until the voters know that it ends.
	releaseTimeout = 500 * time.Millisecond
	// endRepeats and endPause are how often the others hear of the end: messages may be lost.
	endRepeats = 3
	endPause   = 20 * time.Millisecond
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
	s.returning = s.earlier(ctx)
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	done, late, returns := ctx.Done(), (<-chan time.Time)(nil), false
	answered := make(chan bool, 1) // the loop goes on until then: promises last for less than a second
	for over := false; !over; {
		select {
		case <-done:
			done = nil
			go func() { answered <- s.returns(inner) }()
		case returns = <-answered:
			late = time.After(replaceTimeout)
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
		over = over || late != nil && s.mayEnd(returns)
		timer.Reset(s.pause())
	}
	s.release(inner, returns)
}

// returns reports whether the process is restarted, as far as is known, so that its addresses need not move. A node that is
// drained or shut down is left for good. While the API server is away the next process waits for it, so that others take over.
func (s *Speaker) returns(ctx context.Context) bool {
	limited, cancel := context.WithTimeout(ctx, decideTimeout)
	defer cancel()
	node, err := s.o.Client.CoreV1().Nodes().Get(limited, s.o.NodeName, metav1.GetOptions{}) // it may have been cordoned a moment ago
	return err == nil && s.excluded(node) == "" && !departs(node) && (s.o.Leaving == nil || !s.o.Leaving(ctx))
}

// departs reports whether a Node is about to end: it is cordoned, or reports that it is not ready, as a kubelet does before
// it ends the Pods of a machine that shuts down.
func departs(n *corev1.Node) bool {
	return n.Spec.Unschedulable || slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionFalse
	})
}

// mayEnd reports whether the process may end now without an address that is left to none. One that is restarted leaves a majority
// that votes, also if it has no address: else the holder of one would lose it when nodes are restarted one right after the other.
func (s *Speaker) mayEnd(returns bool) bool {
	holds := s.holdings.count() > 0
	if returns && !s.node.Alone() && (holds || s.holdings.replaceable()) {
		return s.node.Keepable(s.o.Now(), holds)
	}
	return s.holdings.replaceable()
}

// release gives up all addresses. If the process is restarted, the voters keep for its successor the ones of the direct way, to
// which the kernel goes on to forward.
func (s *Speaker) release(ctx context.Context, returns bool) {
	begin := time.Now()
	needed := s.node.HasWitness() && s.node.Replaceable(s.o.Now())
	if returns {
		s.routing.withdraw(s.proxied) // a router that keeps routes over the restart must not keep these
	}
	withdrawn := make(chan struct{})
	go func() { defer close(withdrawn); s.routing.close(ctx, returns) }()
	lost := func(a netip.Addr) bool { return !returns || s.proxied(a) }
	s.holdings.drop(lost)
	s.votes.change(func(now time.Duration) {
		s.node.SetAttrs(now, "")
		s.node.Want(now, nil, slices.DeleteFunc(s.holdings.wanted(), func(a netip.Addr) bool { return !lost(a) && s.node.Holds(now, a) }))
	})
	s.votes.witness.End()
	deadline, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	// With two speakers the other one needs this one's vote until it has the witness's and, if it
	// was just restarted, its own.
	linger := func() bool {
		return needed && !(s.votes.witness.HandedOver() && len(s.node.Reached(s.o.Now())) == len(s.node.List().Voters))
	}
	s.voteOn(withdrawn, deadline.Done(), func() bool { return linger() || !s.node.Released(s.o.Now()) })
	released := s.node.Released(s.o.Now())
	away := time.Duration(0)
	if returns {
		away = AwayTime
	}
	s.votes.end(away)
	select {
	case <-s.votes.witness.Released():
	case <-deadline.Done():
	}
	if released {
		s.log.Info("gave up all addresses", "took", time.Since(begin).Round(time.Millisecond), "kept-for-the-next", away)
	} else {
		s.log.Warn("other speakers did not confirm that this one ends; they take over after a second")
	}
	s.reportEnd(away)
	limited, cancel := context.WithTimeout(ctx, time.Second) // the API server may be away
	defer cancel()
	_ = s.status.flush(limited, s.o.LB, s.o.NodeName)
}

// voteOn takes part in the votes until withdrawn is closed, and while waits returns true, for which deadline is the end.
func (s *Speaker) voteOn(withdrawn, deadline <-chan struct{}, waits func() bool) {
	for withdrawn != nil || deadline != nil && waits() {
		timer := time.NewTimer(max(0, s.node.Next()-s.o.Now()))
		select {
		case <-withdrawn:
			withdrawn = nil
		case <-deadline:
			deadline = nil
		case r := <-s.votes.wire.In():
			s.votes.receive(r)
		case <-timer.C:
			s.votes.change(s.node.Tick)
		}
		timer.Stop()
	}
}

// proxied reports whether an address has a Service of the proxied way, whose connections end with this process.
func (s *Speaker) proxied(a netip.Addr) bool {
	known := s.known.one(a)
	return slices.ContainsFunc(known.services, s.o.Front.Serves)
}

// reportEnd has the last status written.
func (s *Speaker) reportEnd(away time.Duration) {
	s.status.poke()
	if away == 0 {
		s.report(false, "the speaker has ended")
		return
	}
	s.report(false, "the speaker restarts")
	next := s.status.last()
	next.ReturnBy = new(metav1.NewMicroTime(time.Now().Add(away)))
	s.status.set(next)
}

// earlier returns the addresses that this node's last process had when it was restarted.
func (s *Speaker) earlier(ctx context.Context) (addrs []netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	have, err := s.o.LB.Speakers.Get(ctx, s.o.NodeName, metav1.GetOptions{})
	if err != nil || have.Status.ReturnBy == nil {
		return nil
	}
	for _, a := range have.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Via != "bgp" {
			addrs = append(addrs, addr)
		}
	}
	return addrs
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
