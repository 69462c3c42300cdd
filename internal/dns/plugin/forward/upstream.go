package forward

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// Upstream is one resolver.
type Upstream struct {
	// Name is its address as text.
	Name   string
	tls    *tls.Config // nil: plain
	source netip.Addr  // invalid: the kernel's choice
	idle   idleConns
	// suspect is whether the last question had no answer, so that health checks ask.
	suspect atomic.Bool
	// fails is the number of consecutive health checks without an answer.
	fails atomic.Int32
	// plain is whether it does not repeat the case of letters.
	plain atomic.Bool
	// Observe, if not nil, gets each answer's code and time.
	Observe func(rcode int, took time.Duration)
	// HealthFailures counts health checks without an answer.
	HealthFailures, Reused, OpenedUDP, OpenedTCP atomic.Uint64
}

func newUpstream(c *corefile.Forward, to corefile.Upstream, base *tls.Config) *Upstream {
	u := &Upstream{source: c.Source, Name: to.Addr.String(), idle: idleConns{expire: c.Expire, max: maxIdle}}
	if c.MaxIdle > 0 {
		u.idle.max = min(c.MaxIdle, maxIdle)
	}
	if to.TLS {
		u.tls = base.Clone()
		switch {
		case to.Name != "":
			u.tls.ServerName = to.Name
		case u.tls.ServerName == "":
			u.tls.ServerName = to.Addr.Addr().WithZone("").String()
		}
	}
	return u
}

// Healthy reports whether the resolver is asked first.
func (u *Upstream) Healthy() bool { return u.fails.Load() == 0 }

func (u *Upstream) down(maxFails int) bool { return maxFails > 0 && int(u.fails.Load()) > maxFails }

// check asks for the health check's domain, and reports whether it is healthy again.
func (u *Upstream) check(ctx context.Context, c *corefile.Forward) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	m := new(mdns.Msg).SetQuestion(c.HealthDomain, mdns.TypeNS)
	m.RecursionDesired = !c.HealthNoRecursion
	network := "udp"
	if c.ForceTCP || u.tls != nil {
		network = "tcp"
	}
	if _, err := u.try(ctx, c, m, network, false); err != nil && !errors.Is(err, errCase) {
		u.HealthFailures.Add(1)
		u.fails.Add(1)
		return false
	}
	u.suspect.Store(false)
	return u.fails.Swap(0) > int32(c.MaxFails)
}

// Errors of one attempt.
var (
	errNoAnswer = errors.New("no answer to the question among the packets received")
	errCase     = errors.New("the answer does not repeat the case of the name")
)

// exchange asks the resolver and returns an answer to q's message.
func (u *Upstream) exchange(ctx context.Context, c *corefile.Forward, q *plugin.Query) (*mdns.Msg, error) {
	network := "udp"
	if u.tls != nil || c.ForceTCP || q.Network == "tcp" && !c.PreferUDP {
		network = "tcp"
	}
	ask := outgoing(q.Msg)
	start := time.Now()
	mix := network == "udp" && !u.plain.Load()
	m, err := u.try(ctx, c, ask, network, mix)
	if errors.Is(err, errCase) {
		// It changes the case of letters, or the answer is forged: TCP is hard to forge.
		if m, err = u.try(ctx, c, ask, "tcp", false); err == nil {
			u.plain.Store(true)
		}
	}
	if err == nil && m.Truncated && network == "udp" && c.PreferUDP {
		m, err = u.try(ctx, c, ask, "tcp", false)
	}
	if err != nil {
		return nil, err
	}
	if u.Observe != nil {
		u.Observe(m.Rcode, time.Since(start))
	}
	m.Id, m.Question = q.Msg.Id, []mdns.Question{*q.Question()}
	return m, nil
}

// outgoing is the question as it is sent: of the options only the client's subnet (RFC 7871)
// concerns the resolver.
func outgoing(m *mdns.Msg) *mdns.Msg {
	out := new(mdns.Msg)
	out.Question = m.Question
	out.RecursionDesired, out.CheckingDisabled, out.AuthenticatedData = m.RecursionDesired, m.CheckingDisabled, m.AuthenticatedData
	if o := m.IsEdns0(); o != nil {
		out.SetEdns0(min(max(o.UDPSize(), mdns.MinMsgSize), maxUDP), o.Do())
		for _, e := range o.Option {
			if e.Option() == mdns.EDNS0SUBNET {
				sent := out.IsEdns0()
				sent.Option = append(sent.Option, e)
			}
		}
	}
	return out
}

// try makes one attempt over one connection. A kept connection that the resolver has closed
// is replaced by a new one.
func (u *Upstream) try(ctx context.Context, c *corefile.Forward, m *mdns.Msg, network string, mix bool) (*mdns.Msg, error) {
	m.Id = randomID()
	req, err := m.Pack()
	if err != nil {
		return nil, err
	}
	nameEnd, err := skipQuestion(req)
	if err != nil {
		return nil, err
	}
	original := append([]byte(nil), req[headerSize:nameEnd]...)
	if mix {
		mixLetters(req[headerSize:nameEnd])
	}
	for {
		conn, reused, err := u.dial(ctx, network)
		if err != nil {
			return nil, err
		}
		reply, err := u.over(ctx, c, conn, network, req, original)
		if err != nil && reused && ctx.Err() == nil && !errors.Is(err, errCase) {
			conn.Close()
			continue
		}
		if err == nil && network == "tcp" {
			u.idle.put(conn)
		} else {
			conn.Close()
		}
		return reply, err
	}
}

// over sends the packed question and reads its answer.
func (u *Upstream) over(ctx context.Context, c *corefile.Forward, conn net.Conn, network string, req, original []byte) (*mdns.Msg, error) {
	deadline := time.Now().Add(c.ReadTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	// Unblocks the read when ctx ends.
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	co := &mdns.Conn{Conn: conn}
	if _, err := co.Write(req); err != nil {
		return nil, err
	}
	buf := make([]byte, bufferSize(network))
	for range maxMismatches {
		n, err := co.Read(buf)
		if err != nil {
			return nil, err
		}
		m, err := readReply(buf[:n], req, original)
		if errors.Is(err, errNoAnswer) && network == "udp" {
			continue // it answers something else, or is forged
		}
		return m, err
	}
	return nil, errNoAnswer
}

const (
	headerSize = 12
	// maxMismatches is how many packets that do not answer the question are read.
	maxMismatches = 64
	maxUDP        = 4096
)

// bufferSize is how long an answer may be.
func bufferSize(network string) int {
	if network == "udp" {
		return maxUDP
	}
	return mdns.MaxMsgSize
}

// readReply reads buf as the answer to req. The name of the question is put back as the
// client wrote it, before compressed names that point to it are read.
func readReply(buf, req, original []byte) (*mdns.Msg, error) {
	end, err := skipQuestion(buf)
	if err != nil || len(buf) < headerSize || buf[0] != req[0] || buf[1] != req[1] || buf[2]&0x80 == 0 {
		return nil, errNoAnswer
	}
	if binary.BigEndian.Uint16(buf[4:]) != 1 || end != headerSize+len(original) || len(buf) < end+4 {
		return nil, errNoAnswer
	}
	if string(buf[end:end+4]) != string(req[end:end+4]) || !equalFold(buf[headerSize:end], original) {
		return nil, errNoAnswer
	}
	if string(buf[headerSize:end]) != string(req[headerSize:end]) {
		return nil, errCase
	}
	copy(buf[headerSize:end], original)
	m := new(mdns.Msg)
	if err := m.Unpack(buf); err != nil {
		if m.Truncated && len(m.Question) == 1 {
			return m, nil
		}
		return nil, fmt.Errorf("malformed answer: %w", err)
	}
	return m, nil
}

// skipQuestion returns the offset behind the name of the question, which is not compressed.
func skipQuestion(msg []byte) (int, error) {
	at := headerSize
	for at < len(msg) {
		switch n := int(msg[at]); {
		case n == 0:
			return at + 1, nil
		case n > 63:
			return 0, errNoAnswer
		default:
			at += n + 1
		}
	}
	return 0, errNoAnswer
}

// equalFold reports whether two names in wire form are equal but for the case of letters.
func equalFold(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if lower(a[i]) != lower(b[i]) {
			return false
		}
	}
	return true
}

func lower(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// mixLetters gives each letter of a name in wire form random case. Length octets are no letters.
func mixLetters(name []byte) {
	var bits [32]byte
	rand.Read(bits[:]) // never fails: it ends the process
	for i, c := range name {
		if l := lower(c); l >= 'a' && l <= 'z' {
			name[i] = l - bits[i/8]>>(i%8)&1*('a'-'A')
		}
	}
}

func randomID() uint16 {
	var b [2]byte
	rand.Read(b[:])
	return binary.BigEndian.Uint16(b[:])
}

// dial returns a new socket, or a kept connection.
func (u *Upstream) dial(ctx context.Context, network string) (net.Conn, bool, error) {
	if network == "tcp" {
		if c := u.idle.get(); c != nil {
			u.Reused.Add(1)
			return c, true, nil
		}
	}
	d := &net.Dialer{Timeout: dialTimeout}
	if u.source.IsValid() && network == "udp" {
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(u.source, 0))
	} else if u.source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(u.source, 0))
	}
	if network == "udp" {
		u.OpenedUDP.Add(1)
		c, err := d.DialContext(ctx, network, u.Name)
		return c, false, err
	}
	u.OpenedTCP.Add(1)
	if u.tls != nil {
		c, err := (&tls.Dialer{NetDialer: d, Config: u.tls}).DialContext(ctx, network, u.Name)
		return c, false, err
	}
	c, err := d.DialContext(ctx, network, u.Name)
	return c, false, err
}

const (
	dialTimeout = 2 * time.Second
	maxIdle     = 64
)

// idleConns are connections without a question in flight; the last used is used first.
type idleConns struct {
	expire time.Duration
	max    int

	mu     sync.Mutex
	closed bool
	conns  []idleConn
}

type idleConn struct {
	net.Conn
	since time.Time
}

// get takes a connection, and closes the ones that have been idle for too long.
func (p *idleConns) get() net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := time.Now().Add(-p.expire)
	for len(p.conns) > 0 && p.conns[0].since.Before(old) {
		p.conns[0].Close()
		p.conns = p.conns[1:]
	}
	n := len(p.conns) - 1
	if n < 0 {
		return nil
	}
	c := p.conns[n]
	p.conns = p.conns[:n]
	return c.Conn
}

func (p *idleConns) put(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.expire == 0 || len(p.conns) >= p.max {
		c.Close()
		return
	}
	p.conns = append(p.conns, idleConn{c, time.Now()})
}

func (p *idleConns) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}
