package web

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// upstream is a connection to a Pod for requests of HTTP/1.1, one after the other.
type upstream struct {
	wire
	pod   netip.AddrPort
	probe *socket.Probe
	kept  bool // it has had a request

	// While it is kept; guarded by of.all.mu:

	since        time.Time
	of           *upstreams
	older, newer *upstream // of all that are kept
	below, above *upstream // of the connections to the Pod
}

func (u *upstream) close() {
	stream.CloseNow(u.conn)
	u.out = u.out[:0]
	u.r = u.w
	u.release()
}

// CloseIdleConnections closes what waits for requests.
func (t *transport) CloseIdleConnections() {
	t.upstreams.close()
	t.Transport.CloseIdleConnections()
}

// connect opens a connection to a Pod for the client at.
func (t *transport) connect(ctx context.Context, pod, client, at netip.AddrPort) (*upstream, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*pods.DialTimeout)
	defer cancel()
	conn, err := t.open(ctx, pod.String(), client, at)
	if err != nil {
		return nil, err
	}
	tcp := conn.(*net.TCPConn)
	probe, err := socket.NewProbe(tcp)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	u := &upstream{pod: pod, probe: probe}
	if !t.kind.backend.IsTLS() {
		u.wire = newWire(tcp)
		return u, nil
	}
	config := t.kind.tls.Config() // that of the Transport offers HTTP/2
	if config.ServerName == "" {
		config.ServerName = pod.Addr().String()
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	u.wire = newWire(secure)
	return u, nil
}
