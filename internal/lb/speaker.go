package lb

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/clock"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// DefaultPeerPort is the UDP port at which speakers hear each other.
const DefaultPeerPort = 10262

// SpeakerOptions are the options of a Speaker.
type SpeakerOptions struct {
	// Config is how to reach the API. A copy of it is used.
	Config *rest.Config
	// NodeName names this node.
	NodeName string
	// Peer is where other speakers reach this one: an address of the node, and a port
	// that is the same on all (default DefaultPeerPort).
	Peer netip.AddrPort
	// Interfaces are those to announce at (default: by the networks of the addresses).
	Interfaces []string
	// Announce is AnnounceARP (default), AnnounceBGP or AnnounceNone. BGPPeers are announced
	// to beside the objects of that kind, unless it is AnnounceNone.
	Announce string
	BGPPeers []bgp.Peer
	// Healthy reports whether the node's proxy serves, and if not, why. By default the
	// proxy's /healthz on this machine's port 10256 is asked.
	Healthy func(context.Context) (ok bool, reason string)
	// Programmed, if not nil, reports whether the node forwards what is sent to a
	// Service's port at an address.
	Programmed func(id svc.PortName, family svc.Family, addr netip.Addr) bool
	Log        *slog.Logger
	// AccessLogs is the directory of the access logs that Services ask for. Without one none are written.
	AccessLogs string
	// UploadLogs is where they are uploaded to, nil if they are not.
	UploadLogs *LogUpload
	// Store, if not nil, keeps the listeners of the proxied way over a restart.
	Store proxied.Store
	// Now is clock.Boot, unless a test wants another rate.
	Now func() time.Duration
}

// Speaker announces addresses of load balancers on one node by ARP and NDP, or by BGP.
type Speaker struct {
	o        SpeakerOptions
	log      *slog.Logger
	client   kubernetes.Interface
	lb       *v1.Client
	known    *known
	proxying *proxying
	announce *announce.Announcer
	events   *events.Recorder
	metrics  *speakerMetrics
	wire     *transport

	// mu guards node: the announcer reads it, the loop changes it.
	mu   sync.RWMutex
	node *quorum.Node

	// What follows is used by the loop alone.

	members []quorum.Member
	// membersKnown is true once a majority of the voters was heard: without members, no
	// node may announce.
	membersKnown bool

	attrs   string                  // what it tells of itself
	links   map[string][]memberLink // parsed Attrs
	since   map[netip.Addr]*ownership
	waiting map[netip.Addr]struct{} // wanted, and not yet announced
	// unprogrammed is true if the proxy lacks one of them that the voters have promised.
	unprogrammed bool
	health       health
	witness      *witness
	peers        peerMACs
	status       speakerStatus
	quota        quota // of Events and lines about addresses
	routing      routing
}

// ownership is what is known of an address that this node announces or waits for.
type ownership struct {
	reason     string
	taken      bool      // by the announcer, which begins to answer after a probe
	interfaces []string  // with which it was taken
	announced  time.Time // zero while it is not answered for
}

// NewSpeaker returns a Speaker that does nothing before Run.
func NewSpeaker(o SpeakerOptions) (*Speaker, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = clock.Boot
	}
	o.Announce = cmp.Or(o.Announce, AnnounceARP)
	if o.Healthy == nil {
		o.Healthy = askHealthz
	}
	if o.Peer.Port() == 0 {
		o.Peer = netip.AddrPortFrom(o.Peer.Addr(), DefaultPeerPort)
	}
	if o.NodeName == "" || len(o.NodeName) > maxName || !o.Peer.Addr().IsValid() {
		return nil, errors.New("a speaker needs the name and an address of its node")
	}
	config := rest.CopyConfig(o.Config)
	config.QPS, config.RateLimiter = -1, nil // the limit is the API server's priority and fairness
	config.UserAgent = cmp.Or(config.UserAgent, "fairlead-lb-speaker")
	lb, err := v1.NewClient(config)
	binary := rest.CopyConfig(config)
	binary.ContentType = runtime.ContentTypeProtobuf
	binary.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err2 := kubernetes.NewForConfig(binary)
	if err := errors.Join(err, err2); err != nil {
		return nil, fmt.Errorf("client of a speaker: %w", err)
	}
	s := &Speaker{
		o: o, log: o.Log, client: client, lb: lb, proxying: newProxying(o, client),
		links: map[string][]memberLink{}, since: map[netip.Addr]*ownership{}, waiting: map[netip.Addr]struct{}{},
	}
	s.known = newKnown(o.NodeName, s.proxying)
	s.proxying.served = s.known.poke
	s.node = quorum.NewNode(o.NodeName, o.Now(), randomNumber)
	s.witness = newWitness(client, o.NodeName, o.Now, o.Log)
	s.witness.changed, s.witness.taken = s.copyWitness, s.known.poke
	s.events = events.NewRecorder(client, corev1.EventSource{Component: "fairlead-lb-speaker", Host: o.NodeName}, o.Log)
	s.proxying.events = s.events
	s.metrics = newSpeakerMetrics()
	s.proxying.register(s.metrics.registry)
	s.routing = newRouting(s)
	neighbours := s.neighbours
	if o.Announce != AnnounceARP {
		neighbours = nil
	}
	s.announce = announce.New(announce.Options{
		Neighbours: neighbours,
		Interfaces: o.Interfaces, May: s.may, IsPeer: s.peers.has, Conflict: s.conflict, Changed: s.known.poke,
		Off: o.Announce == AnnounceNone, Log: o.Log,
	})
	return s, nil
}

// copyWitness makes the node count on the witness as long as the rule does, and no longer.
func (s *Speaker) copyWitness() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node.SetWitness(s.witness.until())
}

func randomNumber() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // it does not fail (crypto/rand)
	return binary.NativeEndian.Uint64(b[:])
}

// may is how the announcer asks before each frame. The lock is held while the frame is
// sent, so that an address is not released between the question and the answer.
func (s *Speaker) may(a netip.Addr, send func()) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if !s.node.Holds(s.o.Now(), a) {
		return false
	}
	send()
	return true
}

// Run announces until ctx ends. Then it gives up its addresses, so that others take
// them over at once, and returns when everything that it started has ended. It uses
// the network namespace of the calling thread.
func (s *Speaker) Run(ctx context.Context) error {
	keys, err := s.firstKeys(ctx)
	if err != nil {
		return err
	}
	if s.wire, err = listen(s.o.NodeName, s.o.Peer, keys, s.log); err != nil {
		return err
	}
	// What runs goes on until the addresses are given up.
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { s.wire.run(inner) })
	running.Go(func() { s.followKeys(inner) })
	running.Go(func() { s.witness.run(inner) })
	running.Go(func() { s.health.run(inner, s.o.Healthy, s.known.poke) })
	s.known.follow(inner, &running, s.client, s.lb)
	running.Go(func() { s.proxying.run(inner) })
	if r := s.routing.routes; r != nil {
		running.Go(func() { r.Run(inner) })
	}
	defer s.events.Start()()
	running.Go(func() { s.status.run(inner, s.lb, s.o.NodeName, s.log) })
	announced := make(chan error, 1)
	running.Go(func() { s.loop(ctx, inner, cancel) })
	announced <- s.announce.Run(inner) // on this thread, for its network namespace
	cancel()
	return <-announced
}

// pause returns after how long the loop has something to do although nothing happens.
func (s *Speaker) pause() time.Duration {
	pause := max(0, s.node.Next()-s.o.Now())
	if s.unprogrammed && len(s.waiting) <= maxPolled {
		pause = min(pause, programmedPoll)
	}
	return pause
}

const (
	// programmedPoll is how often the proxy is looked at that has to program an address which this node could
	// announce, and maxPolled the most addresses for which that is done more often than at each heartbeat.
	programmedPoll = 10 * time.Millisecond
	maxPolled      = 100
)

// heartbeat is how often the loop looks at what it holds without a reason.
const heartbeat = quorum.Heartbeat

const (
	// releaseTimeout bounds how long Run waits until the voters know that it ends.
	releaseTimeout = 500 * time.Millisecond
	// replaceTimeout bounds how long Run goes on for want of another node that could take over: one that
	// was just restarted votes after quorum.Promise.
	replaceTimeout = 2 * quorum.Promise
)

// replaceable reports whether nothing is lost for long when the speaker ends now.
func (s *Speaker) replaceable() bool {
	holds := false
	for _, o := range s.since {
		holds = holds || o.taken
	}
	return !holds || s.node.Alone() || s.node.Replaceable(s.o.Now())
}

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
		case r := <-s.wire.in:
			s.receive(r)
		case <-timer.C:
			s.vote(s.node.Tick)
		case <-s.known.wake:
			s.learn()
		case <-tick.C:
			s.lookAround()
		}
		s.settle()
		over = over || done == nil && s.replaceable()
		timer.Reset(s.pause())
	}
	s.release(inner)
}

// receive handles a message of another speaker.
func (s *Speaker) receive(r received) {
	s.exchange(&r, func(now time.Duration) { s.node.Receive(now, r.from, r.message) })
}

// vote changes the node and sends what it wants to send.
func (s *Speaker) vote(f func(now time.Duration)) { s.exchange(nil, f) }

// exchange is vote, where f handles r if that is not nil.
func (s *Speaker) exchange(r *received, f func(now time.Duration)) {
	s.mu.Lock()
	s.node.SetWitness(s.witness.until())
	f(s.o.Now())
	out := s.node.Take()
	s.mu.Unlock()
	s.metrics.sent.Add(float64(len(out)))
	s.wire.send(out, r)
}

// release gives up all addresses.
func (s *Speaker) release(ctx context.Context) {
	begin := time.Now()
	needed := s.node.HasWitness() && s.node.Replaceable(s.o.Now())
	withdrawn := make(chan struct{})
	go func() { defer close(withdrawn); s.routing.close(ctx) }()
	defer func() { <-withdrawn }()
	s.drop(func(netip.Addr) bool { return true })
	s.vote(func(now time.Duration) {
		s.node.SetAttrs(now, "")
		s.node.Want(now, nil, s.wanted())
	})
	s.witness.end()
	deadline, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	// With two speakers the other one needs this one's vote until it has the witness's and, if it
	// was just restarted, its own.
	linger := func() bool {
		return needed && !(s.witness.handedOver() && len(s.node.Reached(s.o.Now())) == len(s.node.List().Voters))
	}
	for over := false; !over && (linger() || !s.node.Released(s.o.Now())); {
		timer := time.NewTimer(max(0, s.node.Next()-s.o.Now()))
		select {
		case <-deadline.Done():
			over = true
		case r := <-s.wire.in:
			s.receive(r)
		case <-timer.C:
			s.vote(s.node.Tick)
		}
		timer.Stop()
	}
	<-withdrawn
	released := s.node.Released(s.o.Now())
	s.vote(s.node.End)
	select {
	case <-s.witness.released:
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
	_ = s.status.flush(limited, s.lb, s.o.NodeName)
}

// firstList waits for the list of voters as it is written, not out of a cache: this
// node may have confirmed it before a restart.
func (s *Speaker) firstList(ctx context.Context) bool {
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		l, err := getLists(limited, s.client)
		cancel()
		if err == nil {
			s.vote(func(now time.Duration) { s.node.SetList(now, l.Current) })
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
