package bfd

import (
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// receiver is the socket to which packets for one address of the node come, with the sessions that share it.
type receiver struct {
	of   *Sessions
	at   netip.AddrPort
	conn *net.UDPConn
	done chan struct{}

	mu       sync.Mutex
	sessions map[uint32]*Session // by discriminator
}

// join adds a session to the socket for at, which is opened for the first one, and gives it a discriminator.
func (s *Sessions) join(at netip.AddrPort, x *Session) (*receiver, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.receivers[at]
	if r == nil {
		conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return nil, err
		}
		read, err := reader(conn, at.Addr())
		if err != nil {
			_ = conn.Close()
			return nil, err
		}
		r = &receiver{of: s, at: at, conn: conn, done: make(chan struct{}), sessions: map[uint32]*Session{}}
		s.receivers[at] = r
		go r.run(read)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	d := rand.Uint32()
	for d == 0 || r.sessions[d] != nil {
		d = rand.Uint32()
	}
	x.m = newMachine(x.o.Config, d)
	r.sessions[d] = x
	return r, nil
}

// leave removes a session, and the socket with the last one.
func (r *receiver) leave(x *Session) {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	r.mu.Lock()
	maps.DeleteFunc(r.sessions, func(_ uint32, y *Session) bool { return y == x })
	empty := len(r.sessions) == 0
	r.mu.Unlock()
	if empty {
		delete(r.of.receivers, r.at)
		_ = r.conn.Close()
		<-r.done
	}
}

// run reads packets until the socket is closed.
func (r *receiver) run(read func([]byte) (int, netip.Addr, int, error)) {
	defer close(r.done)
	b := make([]byte, 1500)
	for {
		n, from, ttl, err := read(b)
		if err != nil {
			return
		}
		if x, p := r.find(b[:n], from, ttl); x != nil {
			x.take(p)
		}
	}
}

// find returns the packet in a datagram and the session that it is for, nil without one.
func (r *receiver) find(b []byte, from netip.Addr, ttl int) (*Session, packet) {
	if r.at.Port() == port && ttl != maxTTL { // it came from farther than one hop (RFC 5881, section 5)
		return nil, packet{}
	}
	p, err := decode(b)
	if err != nil {
		return nil, p
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for discriminator, x := range r.sessions {
		if x.o.Peer == from && (p.yours == 0 || p.yours == discriminator) {
			return x, p
		}
	}
	return nil, p
}

func setTTL(c *net.UDPConn, a netip.Addr) error {
	if a.Is4() {
		return ipv4.NewConn(c).SetTTL(maxTTL)
	}
	return ipv6.NewConn(c).SetHopLimit(maxTTL)
}

// reader returns a function that reads a datagram with its sender and its TTL, 0 if that is not known.
func reader(c *net.UDPConn, a netip.Addr) (read func([]byte) (n int, from netip.Addr, ttl int, err error), err error) {
	sender := func(at net.Addr) netip.Addr {
		if u, ok := at.(*net.UDPAddr); ok {
			return u.AddrPort().Addr().Unmap()
		}
		return netip.Addr{}
	}
	if a.Is4() {
		p := ipv4.NewPacketConn(c)
		return func(b []byte) (int, netip.Addr, int, error) {
			n, m, at, err := p.ReadFrom(b)
			if m == nil {
				return n, sender(at), 0, err
			}
			return n, sender(at), m.TTL, err
		}, p.SetControlMessage(ipv4.FlagTTL, true)
	}
	p := ipv6.NewPacketConn(c)
	return func(b []byte) (int, netip.Addr, int, error) {
		n, m, at, err := p.ReadFrom(b)
		if m == nil {
			return n, sender(at), 0, err
		}
		return n, sender(at), m.HopLimit, err
	}, p.SetControlMessage(ipv6.FlagHopLimit, true)
}
