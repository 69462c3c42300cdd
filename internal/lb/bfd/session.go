package bfd

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/loop"
)

// The ports of RFC 5881, section 4, and RFC 5883, section 5.
const (
	port         = 3784
	multihopPort = 4784
	// firstSource to lastSource are where sessions over one hop send from.
	firstSource, lastSource = 49152, 65535
)

// maxTTL is what packets are sent with. One that came over one hop still has it.
const maxTTL = 255

// Options are what a Session is made of. Local and Peer are of one family; a link-local one has a zone.
type Options struct {
	Config      Config
	Local, Peer netip.Addr
	// Multihop is for a peer that is not on the node's own network.
	Multihop bool
	// OnChange, if set, is called after each change, by one goroutine. It must not call Close.
	OnChange func(Status)
}

// Status is that of a session.
type Status struct {
	State State
	// Reason is why the session is not up, empty if it is.
	Reason string
	// Failed is set once the session was up and ended for another reason than that the neighbor has switched it off.
	Failed bool
}

// Sessions are the sessions of a node. They share the sockets that packets come to.
type Sessions struct {
	mu        sync.Mutex
	receivers map[netip.AddrPort]*receiver
}

// New returns Sessions without any.
func New() *Sessions { return &Sessions{receivers: map[netip.AddrPort]*receiver{}} }

// Session is a session with one peer.
type Session struct {
	o        Options
	from     *receiver
	out      *net.UDPConn
	done     chan struct{}
	stop     chan struct{}
	received loop.Signal

	mu   sync.Mutex
	m    *machine
	last Status
	now  bool // an answer is due
}

// Open begins a session. The error tells if the port is another program's.
func (s *Sessions) Open(o Options) (*Session, error) {
	if err := o.Config.Validate(); err != nil {
		return nil, err
	}
	x := &Session{o: o, done: make(chan struct{}), stop: make(chan struct{}), received: loop.NewSignal()}
	to := uint16(port)
	if o.Multihop {
		to = multihopPort
	}
	out, err := dial(o.Local, netip.AddrPortFrom(o.Peer, to))
	if err != nil {
		return nil, fmt.Errorf("cannot send by BFD: %w", err)
	}
	x.out = out
	if x.from, err = s.join(netip.AddrPortFrom(o.Local, to), x); err != nil {
		_ = out.Close()
		return nil, fmt.Errorf("cannot receive by BFD: %w", err)
	}
	x.last = Status{State: Down, Reason: x.m.reason()}
	go x.run()
	return x, nil
}

// dial returns a socket that sends with the highest TTL from a port of the range.
func dial(local netip.Addr, to netip.AddrPort) (*net.UDPConn, error) {
	var last error
	for range 10 { // a random one of 16,384 ports is free
		from := netip.AddrPortFrom(local, uint16(firstSource+rand.IntN(lastSource-firstSource+1)))
		c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(to))
		if err != nil {
			last = err
			continue
		}
		if err := setTTL(c, local); err != nil {
			_ = c.Close()
			return nil, err
		}
		return c, nil
	}
	return nil, last
}

// Status returns that of the session.
func (x *Session) Status() Status {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.last
}

// Close tells the peer that the session was switched off, which is no failure, and ends it.
func (x *Session) Close() {
	close(x.stop)
	<-x.done
}

// take is called by the receiver with a packet for the session.
func (x *Session) take(p packet) {
	x.mu.Lock()
	if x.m.receive(p, time.Now()) {
		x.now = true
	}
	x.mu.Unlock()
	x.received.Set()
}

func (x *Session) run() {
	defer close(x.done)
	defer func() { _ = x.out.Close() }()
	defer x.from.leave(x)
	next, sent := time.Now(), AdminDown
	for {
		x.mu.Lock()
		now := time.Now()
		x.m.expire(now)
		interval, deadline := x.m.interval(), x.m.deadline
		state := x.m.state
		// A change of the state is told at once (RFC 5880, section 6.8.7).
		answer, due := x.now, interval > 0 && (!now.Before(next) || state != sent)
		out := x.m.packet(answer).encode()
		x.now = false
		x.mu.Unlock()
		x.show()
		if answer || due {
			_, _ = x.out.Write(out) // an unreachable peer is noticed by its silence
			sent = state
		}
		if due {
			next = now.Add(jitter(interval))
		}
		if limit := now.Add(interval); interval > 0 && next.After(limit) { // it has become shorter
			next = limit
		}
		if !x.wait(now, next, interval, deadline) {
			return
		}
	}
}

// wait returns when something is due or came, false when the session ends.
func (x *Session) wait(now, next time.Time, interval time.Duration, deadline time.Time) bool {
	wait := MaxInterval
	if interval > 0 {
		wait = next.Sub(now)
	}
	if !deadline.IsZero() {
		wait = min(wait, deadline.Sub(now))
	}
	timer := time.NewTimer(max(0, wait))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-x.received:
	case <-x.stop:
		x.mu.Lock()
		x.m.turn(AdminDown, diagAdminDown)
		out := x.m.packet(false).encode()
		x.mu.Unlock()
		_, _ = x.out.Write(out)
		return false
	}
	return true
}

// jitter takes up to a quarter off an interval (RFC 5880, section 6.8.7).
func jitter(d time.Duration) time.Duration {
	return time.Duration((0.75 + 0.25*rand.Float64()) * float64(d))
}

// show brings the status up to date.
func (x *Session) show() {
	x.mu.Lock()
	s := Status{State: x.m.state, Reason: x.m.reason(), Failed: x.m.failed}
	changed := s != x.last
	x.last = s
	x.mu.Unlock()
	if changed && x.o.OnChange != nil {
		x.o.OnChange(s)
	}
}
