package web

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
	"github.com/fairlead/fairlead/internal/lb/proxied/muxes"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/proxyproto"
	"github.com/fairlead/fairlead/internal/svc"
)

// Configure sets the transport of c. Host.MaxKept bounds all connections that wait for a request of HTTP/1.1 together.
func (e *engine) Configure(c, old *proxied.Config) {
	k := transportKind{c.Backend, c.Spec.ProxyProtocol, c.Spec.IdleTimeout.Std(), c.Pods}
	if old != nil && old.Transport != nil {
		before := transportOf(old)
		if before.kind == k {
			c.Transport = before
			return
		}
		before.CloseIdleConnections()
	}
	c.Transport = &transport{kind: k, service: c.Service, upstreams: upstreams{all: &e.kept, most: e.host.MaxKept}}
}

// transportOf returns the transport that Configure has given to c.
func transportOf(c *proxied.Config) *transport { return c.Transport.(*transport) }

// Connections to a Pod that wait for requests: how many, and how long. Servers should keep theirs for longer.
const (
	maxIdle = 256
	podIdle = 50 * time.Second
)

// transport has the connections to the Pods of a port, which are kept.
type transport struct {
	kind      transportKind
	service   svc.Name
	upstreams upstreams    // of HTTP/1.1
	muxes     muxes.Pods   // of HTTP/2
	mirrors   atomic.Int64 // copies of requests on their way
	retries   budget.Budget
}

// isHTTP1 reports whether Pods are spoken to by HTTP/1.1.
func (t *transport) isHTTP1() bool {
	return t.kind.backend != dialect.H2C && t.kind.backend != dialect.GRPC && !t.kind.tls.Second
}

type transportKind struct {
	backend dialect.Protocol
	proxy   int
	silence time.Duration
	tls     pods.TLS
}

// dialError means that no byte of a request was sent.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

func isUndialed(err error) bool {
	_, is := errors.AsType[*dialError](err)
	return is
}

// open connects to a Pod for the client at, and sends the header of the PROXY protocol if the Pod expects one.
func (t *transport) open(ctx context.Context, pod string, client, at netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Timeout: pods.DialTimeout}
	conn, err := d.DialContext(ctx, "tcp", pod)
	if err != nil {
		return nil, &dialError{err}
	}
	if t.kind.proxy != 0 {
		_ = conn.SetWriteDeadline(time.Now().Add(pods.DialTimeout))
		if _, err := conn.Write(proxyproto.Header(t.kind.proxy, client, at)); err != nil {
			_ = conn.Close()
			return nil, &dialError{err}
		}
		_ = conn.SetWriteDeadline(time.Time{})
	}
	return conn, nil
}
