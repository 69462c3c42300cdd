package proxied

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// udpIdle is after how long without a datagram the next one of a client may go to another Pod, as at AWS's Network Load
// Balancer; a shorter idle timeout of the Service counts.
const udpIdle = 2 * time.Minute

// requeueInterval is how often what a client sends changes the order in which sessions give way, which has one lock for all.
const requeueInterval = 100 * time.Millisecond

// udpListener is a socket at which datagrams arrive. Those of a client, by address and port, go to one Pod while they
// have no pause: a session.
type udpListener struct {
	server *Server
	socket *net.UDPConn
	config atomic.Pointer[Config]

	mu       sync.Mutex
	sessions map[netip.AddrPort]*udpSession
}

// udpSession is the datagrams of a client. pod is connected, so that the kernel accepts only datagrams of the Pod.
type udpSession struct {
	config *Config // as it began
	pool   *pods.Pool
	member *pods.Member
	pod    *net.UDPConn
	last   atomic.Int64 // when the client has sent something last, since began
	began  time.Time

	answered atomic.Bool   // the Pod has
	queued   time.Duration // when it was put into the queues last, since began; the listener's goroutine has it

	// What follows is guarded by the Server's openMu.

	confirmed           bool          // the client has sent something after an answer
	inService, inServer *list.Element // of the queues
}

// listenUDP gives the listener of datagrams at an address a configuration. The caller holds mu.
func (s *Server) listenUDP(at netip.AddrPort, c *Config) error {
	if l := s.udp[at]; l != nil {
		l.config.Store(c)
		return nil
	}
	made, err := s.insides.listenPackets(s.ctx, at)
	if err != nil {
		return fmt.Errorf("port %d is not served: cannot listen at %s, UDP: %w", at.Port(), at, err)
	}
	l := &udpListener{server: s, socket: made, sessions: map[netip.AddrPort]*udpSession{}}
	l.config.Store(c)
	s.udp[at] = l
	s.wg.Go(l.run)
	return nil
}

// close ends the sessions, too: their answers need the socket.
func (l *udpListener) close() { _ = l.socket.Close() }

// run takes datagrams until the listener is closed.
func (l *udpListener) run() {
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, u := range l.sessions {
			_ = u.pod.Close()
		}
	}()
	buf := make([]byte, 64<<10)
	for {
		n, from, err := l.socket.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // of a datagram before
			continue
		}
		l.pass(buf[:n], from)
	}
}

// pass carries a datagram of a client.
func (l *udpListener) pass(datagram []byte, from netip.AddrPort) {
	defer l.server.panics.Recover(l.config.Load().Service)
	client := netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port())
	if u := l.session(client, from); u != nil {
		now := time.Since(u.began)
		u.last.Store(int64(now))
		if now-u.queued >= requeueInterval {
			u.queued = now
			l.server.admission.requeue(u, u.answered.Load())
		}
		l.count(u, len(datagram), 0)
		_, _ = u.pod.Write(datagram) // a refusal is seen by answers, too, which end the session
	}
}

// count counts bytes of a client, and to it.
func (l *udpListener) count(u *udpSession, received, sent int) {
	u.config.usage.traffic.Carried(int64(received), int64(sent))
}

// session returns that of a client, nil if it has none and gets none.
func (l *udpListener) session(client, from netip.AddrPort) *udpSession {
	c := l.config.Load()
	l.mu.Lock()
	u := l.sessions[client]
	l.mu.Unlock()
	if !c.Admits(client.Addr()) { // of now, also if it was when the session began
		if u != nil {
			_ = u.pod.Close()
		}
		return nil
	}
	if u != nil && u.config.Service == c.Service {
		return u
	}
	u = l.begin(c, client)
	if u == nil {
		return nil
	}
	l.mu.Lock()
	if old := l.sessions[client]; old != nil { // the address has passed on
		_ = old.pod.Close()
	}
	l.sessions[client] = u
	l.mu.Unlock()
	l.server.wg.Go(func() { l.answer(u, client, from) })
	return u
}

// begin returns a session with a Pod, nil if there is none, or too many clients are there.
func (l *udpListener) begin(c *Config, client netip.AddrPort) *udpSession {
	s := l.server
	to, route := c.target()
	if to == nil {
		s.log.Debug("dropped a datagram, for which there is no route", "service", c.Service, "client", client)
		return nil
	}
	m, err := to.Pool.Pick(client.Addr(), nil)
	if err != nil {
		s.log.Debug("dropped a datagram", "service", c.Service, "client", client, "err", err)
		return nil
	}
	var d net.Dialer
	pod, err := d.DialContext(context.Background(), "udp", m.Addr().String())
	if err != nil {
		s.log.Debug("dropped a datagram", "service", c.Service, "client", client, "endpoint", m.Addr(), "err", err)
		return nil
	}
	u := &udpSession{config: c, pool: to.Pool, member: m, pod: pod.(*net.UDPConn), began: time.Now()}
	if !s.admission.admitSession(u) {
		_ = pod.Close()
		return nil
	}
	route.Opened()
	return u
}

// answer carries what the Pod sends to the client until the session ends: neither has sent anything for the idle timeout,
// the Pod refuses, or it is drained.
func (l *udpListener) answer(u *udpSession, client, from netip.AddrPort) {
	s, c := l.server, u.config
	k := &pods.Link{Close: func() { _ = u.pod.Close() }}
	defer func() {
		_ = u.pod.Close()
		l.mu.Lock()
		if l.sessions[client] == u {
			delete(l.sessions, client)
		}
		l.mu.Unlock()
		s.admission.forgetSession(u)
	}()
	defer s.panics.Recover(c.Service)
	if !u.pool.Add(u.member, k) {
		return
	}
	defer u.pool.Remove(u.member, k)
	idle := min(udpIdle, c.Spec.IdleTimeout.Std())
	buf := stream.GetBuffer()
	defer stream.PutBuffer(buf)
	large := buf
	heard := time.Now()
	for {
		last := u.began.Add(time.Duration(u.last.Load()))
		if heard.After(last) {
			last = heard
		}
		if time.Since(last) >= idle || u.pod.SetReadDeadline(last.Add(idle)) != nil {
			return
		}
		n, err := u.pod.Read(large)
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			continue
		}
		if err != nil {
			return
		}
		heard = time.Now()
		u.answered.Store(true)
		if n == len(buf) && len(large) == n { // it was larger, and is lost; later ones have room
			large = make([]byte, 64<<10)
			continue
		}
		if wait := c.usage.bandwidth.Take(n, heard); wait > stream.Burst {
			continue // a datagram may be dropped, and must not wait for long
		}
		l.count(u, 0, n)
		_, _ = l.socket.WriteToUDPAddrPort(large[:n], from)
	}
}

// datagramChecks returns how Pods of a port of UDP are checked: a connection by TCP says nothing about it.
func datagramChecks(h dialect.Health) dialect.Health {
	h.Enabled = h.Enabled && (h.Protocol != dialect.TCP || h.Port != 0)
	return h
}
