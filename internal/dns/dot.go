package dns

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/netip"
	"sync"
	"time"
)

// TLSServer is an upstream that is asked over TLS (RFC 7858).
type TLSServer struct {
	// Addr is where it listens, usually on port 853.
	Addr netip.AddrPort
	// ServerName must be in its certificate; empty means its address must be.
	ServerName string
	// RootCAs are the authorities that may have signed its certificate; nil means the
	// system's.
	RootCAs *x509.CertPool
}

// Idle connections to an upstream: a handshake costs more than a question.
const (
	maxIdleTLS  = 8
	idleTLSTime = 10 * time.Second
)

// idleConns are connections that wait for another question.
type idleConns struct {
	mu   sync.Mutex
	list []idleConn
}

type idleConn struct {
	net.Conn
	since time.Time
}

// take returns the connection that was used last, or nil.
func (i *idleConns) take() net.Conn {
	i.mu.Lock()
	defer i.mu.Unlock()
	for n := len(i.list); n > 0; n = len(i.list) {
		c := i.list[n-1]
		i.list = i.list[:n-1]
		if time.Since(c.since) < idleTLSTime {
			return c.Conn
		}
		c.Close()
	}
	return nil
}

// put keeps a connection, and closes the one used longest ago if there are too
// many.
func (i *idleConns) put(c net.Conn) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.list = append(i.list, idleConn{c, time.Now()})
	if len(i.list) > maxIdleTLS {
		i.list[0].Close()
		i.list = append(i.list[:0], i.list[1:]...)
	}
}

func (i *idleConns) closeAll() {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, c := range i.list {
		c.Close()
	}
	i.list = nil
}

func newTLSUpstream(t TLSServer) *upstream {
	u := newUpstream(t.Addr)
	u.name = "tls://" + u.name
	name := t.ServerName
	if name == "" {
		name = t.Addr.Addr().String()
	}
	u.tls = &tls.Config{
		ServerName:         name,
		RootCAs:            t.RootCAs,
		MinVersion:         tls.VersionTLS12,
		ClientSessionCache: tls.NewLRUClientSessionCache(4),
	}
	return u
}

// exchangeTLS asks over an idle connection or a new one. An idle connection may
// have been closed by the upstream, so its failure is ignored.
func (u *upstream) exchangeTLS(ctx context.Context, a ask, timeout time.Duration) (*entry, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if c := u.idle.take(); c != nil {
		u.stats.reused.Add(1)
		if e, err := u.askConn(ctx, c, a); err == nil || ctx.Err() != nil {
			return e, err
		}
	}
	d := tls.Dialer{Config: u.tls}
	c, err := d.DialContext(ctx, "tcp", u.addr.String())
	if err != nil {
		return nil, err
	}
	u.stats.tcp.Add(1)
	return u.askConn(ctx, c, a)
}

// askConn asks over c and, if that succeeds, keeps it for another question.
func (u *upstream) askConn(ctx context.Context, c net.Conn, a ask) (*entry, error) {
	// Clear the deadline of an earlier question.
	_ = c.SetDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	// TLS cannot be forged: random case is not needed.
	e, err := exchangeTCP(c, u.request(a, false), a)
	if !stop() || err != nil {
		c.Close()
		return e, err
	}
	u.idle.put(c)
	return e, nil
}
