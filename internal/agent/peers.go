package agent

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/clock"
	"github.com/fairlead/fairlead/internal/kernel/echo"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/peers"
	"github.com/fairlead/fairlead/internal/svc"
)

// Peers watches the machines of some other nodes (docs/design/011-dead-nodes.md): it asks each
// whether it is there, by ICMP and, if that has no answer, by a TCP connection to its agent's port. It is the machine
// that is watched: one whose agent is dead answers. It asks further nodes for its own use: the endpoints of those
// that it does not reach come last (docs/design/019-broken-paths.md).
type Peers struct {
	self    string
	log     *slog.Logger
	now     func() time.Duration // CLOCK_BOOTTIME
	events  *events.Recorder
	turned  func() // Unreached has changed
	changed loop.Signal
	sockets map[bool]*echo.Conn // by whether it is IPv4's
	id      uint16

	mu          sync.Mutex
	nodes       map[string]peer
	stale       bool // nodes have changed since the ring was made
	watched     []string
	watch       peers.Watch
	nonces      map[string]uint64 // of the requests to each node since its last answer
	unreachable []string          // of watched
	unreached   []string
	broken      brokenPaths
	beyond      beyond
}

// peer is a node that takes part.
type peer struct {
	addrs []netip.Addr // one of each family at most
	pods  []netip.Prefix
	port  int32
	up    bool
}

// NewPeers returns what watches other nodes for the one called self. Run does it. turned, which must not block, is called after
// Unreached has changed.
func NewPeers(client kubernetes.Interface, self string, log *slog.Logger, turned func()) *Peers {
	return &Peers{
		self: self, log: log, now: clock.Boot, changed: loop.NewSignal(), sockets: map[bool]*echo.Conn{}, id: uint16(rand.Uint32()),
		events: events.NewRecorder(client, corev1.EventSource{Component: "fairlead-agent", Host: self}, log), turned: turned,
		nodes: map[string]peer{}, nonces: map[string]uint64{},
	}
}

// Changed holds a token when Unreachable or Condition may have changed since the last receive. It is for one receiver.
func (p *Peers) Changed() <-chan struct{} { return p.changed }

// Unreachable returns the names of the nodes that this one watches and that do not answer any more, sorted.
func (p *Peers) Unreachable() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.unreachable)
}

// Set takes a Node as it is now.
func (p *Peers) Set(n *corev1.Node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was, known := p.nodes[n.Name]
	if n.Annotations[svc.PeerWatchAnnotation] != "true" {
		delete(p.nodes, n.Name)
		p.stale = p.stale || known
		return
	}
	is := peerOf(n)
	if known && was.up == is.up && was.port == is.port && slices.Equal(was.addrs, is.addrs) && slices.Equal(was.pods, is.pods) {
		return
	}
	if known && !slices.Equal(was.addrs, is.addrs) {
		p.watch.Forget(n.Name)
		delete(p.beyond.answered, n.Name)
	}
	p.nodes[n.Name] = is
	p.stale = p.stale || !known || was.up != is.up || !slices.Equal(was.addrs, is.addrs) || !slices.Equal(was.pods, is.pods)
}

// Unset takes the name of a Node that is no more.
func (p *Peers) Unset(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.nodes[name]; known {
		delete(p.nodes, name)
		p.stale = true
	}
}

func peerOf(n *corev1.Node) peer {
	is := peer{port: n.Status.DaemonEndpoints.KubeletEndpoint.Port, up: true}
	for i := range n.Status.Conditions {
		if k := &n.Status.Conditions[i]; k.Type == corev1.NodeReady && k.Status == corev1.ConditionUnknown {
			is.up = false
		}
	}
	for _, text := range n.Spec.PodCIDRs {
		if c, err := netip.ParsePrefix(text); err == nil {
			is.pods = append(is.pods, c.Masked())
		}
	}
	families := map[bool]bool{}
	for i := range n.Status.Addresses {
		at := &n.Status.Addresses[i]
		a, err := netip.ParseAddr(at.Address)
		if err != nil || at.Type != corev1.NodeInternalIP || a.IsLoopback() || a.IsMulticast() || a.IsUnspecified() || a.IsLinkLocalUnicast() {
			continue // a Node may say anything of itself
		}
		if a = a.Unmap(); !families[a.Is4()] {
			families[a.Is4()] = true
			is.addrs = append(is.addrs, a)
		}
	}
	return is
}

// Run watches until ctx ends, and always returns nil.
func (p *Peers) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	defer p.events.Start()()
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		c, err := echo.Open(f)
		if err != nil {
			p.log.Warn("cannot ask other nodes by ICMP; only asking them by TCP", "family", f, "err", err)
			continue
		}
		p.sockets[f == svc.IPv4] = c
		running.Go(func() { p.receive(c) })
		defer func() { _ = c.Close() }()
	}
	running.Go(func() { p.lookBeyond(ctx) })
	tick := time.NewTicker(peers.Step)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			p.tick(ctx, &running)
		}
	}
}

// tick asks the nodes whose turn it is, and judges all.
func (p *Peers) tick(ctx context.Context, running *sync.WaitGroup) {
	p.mu.Lock()
	if p.stale {
		p.stale = false
		var up []string
		for name, n := range p.nodes {
			if n.up {
				up = append(up, name)
			}
		}
		ring := peers.NewRing(up)
		p.watched = ring.WatchedBy(p.self)
		asked := ring.AskedBy(p.self)
		p.watch.Set(asked, p.keptLost()...)
		p.beyond.set(p.self, asked, up, p.nodes)
		clear(p.nonces)
	}
	now := p.now()
	p.watch.Suspect(p.beyond.suspects)
	questions := append(p.watch.Tick(now), p.beyond.next()...)
	for _, q := range questions {
		n := p.nodes[q.Name]
		p.ping(q, n.addrs)
		for _, a := range n.addrs {
			if port := n.port; port > 0 && port <= 1<<16-1 && (q.Again || p.sockets[a.Is4()] == nil) {
				running.Go(func() { p.connect(ctx, q.Name, netip.AddrPortFrom(a, uint16(port))) })
			}
		}
	}
	was := p.unreachable
	p.unreachable = slices.DeleteFunc(p.watch.Unreachable(now), func(name string) bool { return !slices.Contains(p.watched, name) })
	is := p.unreachable
	p.mu.Unlock()
	p.judgePaths(now)
	if slices.Equal(was, is) {
		return
	}
	for _, name := range is {
		if !slices.Contains(was, name) {
			p.log.Warn("a node's machine does not answer; reporting it", "peer", name)
		}
	}
	for _, name := range was {
		if !slices.Contains(is, name) {
			p.log.Info("no longer reporting a node", "peer", name)
		}
	}
	p.changed.Set()
}

// keptLost returns the nodes to ask on because this one does not reach them, whatever the API has of them, with the lock
// held. A Node becomes Unknown before its endpoints are taken out of service, and endpoints that people wrote never are.
func (p *Peers) keptLost() []string {
	kept := slices.DeleteFunc(slices.Clone(p.unreached), func(name string) bool { _, known := p.nodes[name]; return !known })
	return kept[:min(len(kept), peers.MaxAsked)]
}

// ping sends requests to a node, with the lock held. Replies to those before its last answer do not count.
func (p *Peers) ping(q peers.Question, addrs []netip.Addr) {
	if _, open := p.nonces[q.Name]; !open || !q.Again {
		p.nonces[q.Name] = rand.Uint64()
	}
	for _, a := range addrs {
		if c := p.sockets[a.Is4()]; c != nil {
			_ = c.Send(a, echo.Message{ID: p.id, Nonce: p.nonces[q.Name]}) // no way there is no answer
		}
	}
}

func (p *Peers) receive(c *echo.Conn) {
	for {
		_, m, err := c.Receive()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || m.ID != p.id {
			continue // another program's
		}
		p.mu.Lock()
		for name, nonce := range p.nonces {
			if nonce == m.Nonce {
				p.heard(name)
			}
		}
		p.mu.Unlock()
	}
}

// heard takes in an answer, with the lock held. What was asked needs no other one.
func (p *Peers) heard(name string) {
	delete(p.nonces, name)
	p.watch.Heard(p.now(), name)
	p.beyond.heard(p.now(), name)
}

// connect asks by TCP: a machine without a listener answers, too. The connection is reset, which leaves
// nothing behind.
func (p *Peers) connect(ctx context.Context, name string, at netip.AddrPort) {
	d := net.Dialer{Timeout: 2 * peers.Retry}
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(at.Addr().String(), strconv.Itoa(int(at.Port()))))
	if err == nil {
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = c.Close()
	} else if !errors.Is(err, syscall.ECONNREFUSED) {
		return
	}
	p.mu.Lock()
	p.heard(name)
	p.mu.Unlock()
}
