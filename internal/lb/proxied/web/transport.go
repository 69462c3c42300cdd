package web

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/proxyproto"
)

// Configure sets the transport of c. Host.MaxKept bounds all connections that wait for a request of HTTP/1.1 together;
// for the requests of clients that speak HTTP/2 net/http applies it to each port of a Service.
func (e *engine) Configure(c, old *proxied.Config) {
	k := transportKind{c.Backend, c.Spec.ProxyProtocol, c.Spec.IdleTimeout.Std(), c.Pods}
	if old != nil && old.Transport != nil {
		before := transportOf(old)
		if before.kind == k {
			c.Transport = before
			return
		}
		go before.CloseIdleConnections() // net/http ends TLS properly, for which it waits
	}
	t := &transport{kind: k, upstreams: upstreams{all: &e.kept, most: e.host.MaxKept}}
	t.Transport = http.Transport{
		DialContext: t.dial, ResponseHeaderTimeout: k.silence, ExpectContinueTimeout: time.Second, DisableCompression: true,
		MaxIdleConns: e.host.MaxKept(), MaxIdleConnsPerHost: maxIdle, IdleConnTimeout: podIdle, MaxResponseHeaderBytes: maxAnswerHeader,
		Protocols:           new(http.Protocols),
		TLSHandshakeTimeout: pods.DialTimeout, ReadBufferSize: 8 << 10, WriteBufferSize: 8 << 10,
		// The header of the PROXY protocol is of one client: so is the connection then.
		DisableKeepAlives: k.proxy != 0,
		TLSClientConfig:   k.tls.Config(),
	}
	t.Protocols.SetHTTP1(t.isHTTP1())
	t.Protocols.SetUnencryptedHTTP2(!t.isHTTP1())
	// A request of HTTP/2 goes on by that if the Pod offers it (ALPN), as gRPC needs.
	t.Protocols.SetHTTP2(k.backend.IsTLS() && k.proxy == 0)
	c.Transport = t
}

// transportOf returns the transport that Configure has given to c.
func transportOf(c *proxied.Config) *transport { return c.Transport.(*transport) }

// Connections to a Pod that wait for requests: how many, and how long. Servers should keep theirs for longer.
const (
	maxIdle = 256
	podIdle = 50 * time.Second
)

// transport carries requests to the Pods of a port, on connections that are kept.
type transport struct {
	http.Transport
	kind      transportKind
	upstreams upstreams
}

// isHTTP1 reports whether Pods are spoken to by HTTP/1.1.
func (t *transport) isHTTP1() bool {
	return t.kind.backend != dialect.H2C && t.kind.backend != dialect.GRPC
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

func (t *transport) dial(ctx context.Context, _, pod string) (net.Conn, error) {
	var client, at netip.AddrPort
	if x, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		client, at = x.conn.client, x.conn.at
	}
	return t.open(ctx, pod, client, at)
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

// chooser sends a request to a Pod, and to another one while no byte of it was sent. If the Pod closes a kept connection
// during a request that is idempotent and has no body, net/http sends it again.
type chooser struct{}

// RoundTrip returns the answer of a Pod.
func (chooser) RoundTrip(r *http.Request) (*http.Response, error) {
	x := exchangeOf(r)
	body := r.Body
	var tried []*pods.Member
	var last error
	for range pods.MaxDials {
		m, err := x.config.Sticky.Choose(x.config.Pool, x.conn.client.Addr(), r.Header["Cookie"], tried)
		if err != nil {
			return nil, cmp.Or(last, err)
		}
		if !x.use(m) {
			continue // it has left just now
		}
		to := *r.URL
		to.Host = m.Addr().String()
		once := r.WithContext(r.Context())
		once.URL = &to
		if body != nil && body != http.NoBody {
			once.Body = io.NopCloser(body) // closed by the caller, after the last try
		}
		x.pod, x.asked = m.Addr(), time.Now()
		answer, err := transportOf(x.config).RoundTrip(once)
		var undialed *dialError
		if err == nil {
			x.podStatus, x.answered = answer.StatusCode, time.Now()
			answer.Request = r
			if c := x.config.Sticky.Keep(x.config.Pool, m, r.Header["Cookie"], answer.Header["Set-Cookie"], x.conn.secure); c != "" {
				answer.Header.Add("Set-Cookie", c)
			}
			return answer, nil
		}
		if !errors.As(err, &undialed) || r.Context().Err() != nil {
			return nil, err
		}
		x.leave()
		tried, last = append(tried, m), err
	}
	return nil, cmp.Or(last, pods.ErrNone)
}
