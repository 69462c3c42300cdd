package proxied

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// upstream is a connection to a Pod for requests of HTTP/1.1, one after the other.
type upstream struct {
	wire
	pod   netip.AddrPort
	probe *socket.Probe
	kept  bool      // it has had a request
	since time.Time // when it was kept
}

func (u *upstream) close() {
	_ = u.conn.Close()
	u.out = u.out[:0]
	u.r = u.w
	u.release()
}

// upstreams are those of a transport that wait for a request.
type upstreams struct {
	mu     sync.Mutex
	idle   map[netip.AddrPort][]*upstream // the last one is used first
	closed bool                           // none is kept any more
	sweeps bool
}

// get returns a connection to a Pod that is still open and of which nothing was sent meanwhile, nil if there is none.
func (p *upstreams) get(pod netip.AddrPort) *upstream {
	for {
		p.mu.Lock()
		list := p.idle[pod]
		if len(list) == 0 {
			p.mu.Unlock()
			return nil
		}
		u := list[len(list)-1]
		list[len(list)-1] = nil
		p.idle[pod] = list[:len(list)-1]
		p.mu.Unlock()
		if u.probe.Quiet() {
			return u
		}
		u.close()
	}
}

// put keeps a connection of which everything was taken, or closes it.
func (p *upstreams) put(u *upstream) {
	if len(u.buffered()) > 0 {
		u.close()
		return
	}
	u.release()
	u.kept, u.since = true, time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle[u.pod]) >= maxIdle {
		_ = u.conn.Close()
		return
	}
	if p.idle == nil {
		p.idle = map[netip.AddrPort][]*upstream{}
	}
	p.idle[u.pod] = append(p.idle[u.pod], u)
	if !p.sweeps {
		p.sweeps = true
		time.AfterFunc(podIdle/4, p.sweep)
	}
}

// sweep closes those that have waited for too long.
func (p *upstreams) sweep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	oldest := time.Now().Add(-podIdle)
	for pod, list := range p.idle {
		n := 0
		for n < len(list) && list[n].since.Before(oldest) {
			_ = list[n].conn.Close()
			n++
		}
		if list = append(list[:0:0], list[n:]...); len(list) == 0 {
			delete(p.idle, pod)
		} else {
			p.idle[pod] = list
		}
	}
	if p.sweeps = len(p.idle) > 0; p.sweeps {
		time.AfterFunc(podIdle/4, p.sweep)
	}
}

// close closes those that wait, and those in use when their request is done.
func (p *upstreams) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, list := range p.idle {
		for _, u := range list {
			_ = u.conn.Close()
		}
	}
	p.idle = nil
}

// CloseIdleConnections closes what waits for requests.
func (t *transport) CloseIdleConnections() {
	t.upstreams.close()
	t.Transport.CloseIdleConnections()
}

// connect opens a connection to a Pod for the client at.
func (t *transport) connect(ctx context.Context, pod, client, at netip.AddrPort) (*upstream, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*dialTimeout)
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
	config := t.kind.tls.config() // that of the Transport offers HTTP/2
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
