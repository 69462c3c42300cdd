package web

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// upstream is a connection to a Pod for requests of HTTP/1.1, one after the other.
type upstream struct {
	wire
	pod   netip.AddrPort
	tcp   *net.TCPConn
	probe *socket.Probe
	slow  bool // see allowSilence
	kept  bool // it has had a request
	used  bool // it was kept, and has answered nothing since
	body  wireSink
	from  wireSource

	// While it is kept; guarded by of.all.mu:

	since        time.Time
	of           *upstreams
	older, newer *upstream // of all that are kept
	below, above *upstream // of the connections to the Pod
}

// unacknowledged is how long a Pod may leave what it was sent without an acknowledgement: on a node that is dark it does for ever.
const unacknowledged = 10 * time.Second

// allowSilence lifts that bound to the time that a connection may be idle, or the system's: a Pod may take its time to read a body, or
// the bytes of another protocol, and keep its window closed meanwhile.
func (u *upstream) allowSilence(idle time.Duration) {
	if u.tcp != nil && !u.slow {
		u.slow = socket.SetUserTimeout(u.tcp, socket.UserTimeoutOf(idle)) == nil
	}
}

var errNotSecond = errors.New("the endpoint does not agree on HTTP/2")

// head sends the head of the request, with the next flush, and a body that is whole.
func (u *upstream) head(x *exchange, whole []byte, _ bool) {
	u.put(nil)
	w := heads.Writer{Encoder: http2.Encoder{Block: u.out}}
	w.Request(x.req, heads.Heading{
		Client: x.conn.client, At: x.conn.at, Secure: x.conn.secure, Once: transportOf(x.to).kind.proxy != 0, WebSocket: x.websocket,
		Key: x.key,
	})
	u.out = append(w.Block, whole...)
	u.body = wireSink{to: &u.wire, chunked: x.req.Chunked, timeout: x.limit()}
	u.used = u.kept
}

func (u *upstream) add(data []byte, last bool) error    { return u.body.add(data, last) }
func (u *upstream) flush() error                        { return u.body.flush() }
func (u *upstream) pending() bool                       { return u.body.pending() }
func (u *upstream) finish(trailers []http1.Field) error { return u.body.finish(trailers) }

// answer reads the next head of the answer, and takes it.
func (u *upstream) answer(r *http1.Response, poll time.Duration) error {
	for {
		n, err := r.Parse(u.buffered())
		if err != nil {
			return err
		}
		if n > 0 {
			u.take(n)
			u.used = false
			return nil
		}
		if err := u.fill(poll, maxAnswerHeader); err != nil {
			return err
		}
	}
}

func (u *upstream) source(x *exchange) source {
	u.from = wireSource{from: &u.wire, body: x.res.Body(x.isHead), fields: u.from.fields[:0]}
	x.reusable = x.reusable && x.res.Persists() && !u.from.body.Endless() && transportOf(x.to).kind.proxy == 0
	return &u.from
}

func (u *upstream) stale() bool { return u.used && len(u.buffered()) == 0 }

func (u *upstream) unseen(error) bool { return false }

func (u *upstream) abort() { stream.CloseNow(u.conn) }

func (u *upstream) release(x *exchange, reusable bool) {
	t := transportOf(x.to)
	if reusable {
		if u.slow {
			u.slow = socket.SetUserTimeout(u.tcp, unacknowledged) != nil
		}
		t.upstreams.put(u)
		return
	}
	if u.stale() {
		t.muxes.Forget(u.pod)
	}
	u.close()
}

func (u *upstream) close() {
	stream.CloseNow(u.conn)
	u.out = u.out[:0]
	u.r = u.w
	u.wire.release()
}

// CloseIdleConnections closes what waits for requests.
func (t *transport) CloseIdleConnections() {
	t.upstreams.close()
	t.muxes.Close()
}

// connect opens a connection to a Pod for requests of HTTP/1.1 of the client at.
func (t *transport) connect(ctx context.Context, pod, client, at netip.AddrPort) (*upstream, error) {
	u, _, err := t.dialPod(ctx, pod, client, at, false)
	return u, err
}

// dialPod opens a connection to a Pod for the client at. With multiplex, it reports whether that speaks HTTP/2.
func (t *transport) dialPod(ctx context.Context, pod, client, at netip.AddrPort, multiplex bool) (_ *upstream, second bool, _ error) {
	ctx, cancel := context.WithTimeout(ctx, 2*pods.DialTimeout)
	defer cancel()
	conn, err := t.open(ctx, pod.String(), client, at)
	if err != nil {
		return nil, false, err
	}
	tcp := conn.(*net.TCPConn)
	probe, err := socket.NewProbe(tcp)
	if err != nil {
		_ = conn.Close()
		return nil, false, err
	}
	_ = socket.SetUserTimeout(tcp, unacknowledged) // without it the Pod has the time for its answer
	u := &upstream{pod: pod, tcp: tcp, probe: probe}
	if !t.kind.backend.IsTLS() {
		u.wire = newWire(tcp)
		return u, multiplex, nil
	}
	config := t.kind.tls.Config()
	switch {
	case t.kind.tls.Second:
		config.NextProtos = []string{"h2"}
	case multiplex:
		config.NextProtos = []string{"h2", "http/1.1"}
	}
	if config.ServerName == "" {
		config.ServerName = pod.Addr().String()
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, false, err
	}
	u.wire = newWire(secure)
	second = secure.ConnectionState().NegotiatedProtocol == "h2"
	if t.kind.tls.Second && !second {
		u.close()
		return nil, false, errNotSecond
	}
	return u, multiplex && second, nil
}
