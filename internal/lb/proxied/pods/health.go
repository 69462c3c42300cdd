package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/proxyproto"
)

// Checks is how Pods are checked.
type Checks struct {
	dialect.Health
	// Proxy is the version of the PROXY protocol that Pods expect.
	Proxy int
	// TLS is how TLS to Pods begins.
	TLS TLS
}

// check starts health checks of a member. It begins as good, since its readiness is known, or keeps its result if stays
// is set. The caller holds mu.
func (p *Pool) check(m *Member, stays bool) {
	if m.stop != nil {
		m.stop()
	}
	ctx, cancel := context.WithCancel(p.ctx)
	m.stop = cancel
	if m.bad && !stays {
		m.bad = false
		p.absences.remove(m, false)
	}
	if c := p.o.Checks; c.Enabled {
		p.wg.Go(func() { p.watch(ctx, m, c) })
	}
}

// watch checks a member each interval until ctx ends.
func (p *Pool) watch(ctx context.Context, m *Member, c Checks) {
	failed, passed := 0, 0
	timer := time.NewTimer(rand.N(c.Interval.Std())) // not all at once
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		timer.Reset(c.Interval.Std())
		err := p.probe(ctx, m, c)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			failed, passed = failed+1, 0
		} else {
			failed, passed = 0, passed+1
		}
		if p.conclude(ctx, m, failed >= c.Unhealthy, passed >= c.Healthy, err) {
			p.log.Info("the health of an endpoint has changed", "endpoint", m.addr, "healthy", err == nil, "err", err)
		}
	}
}

// conclude takes over that checks have failed, or passed, often enough. It reports whether that changes the member's health. Checks
// that have ended conclude nothing: how the member is, other ones find, or nothing does.
func (p *Pool) conclude(ctx context.Context, m *Member, fails, passes bool, err error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil || m.bad && !passes || !m.bad && !fails {
		return false
	}
	m.bad = fails
	p.turned(m, err)
	return true
}

// turned notes that checks find a member's health changed. The caller holds mu.
func (p *Pool) turned(m *Member, err error) {
	p.ready = nil
	switch {
	case m.gone:
	case m.bad && err != nil:
		p.absences.add(m, Absence{Service: p.service, Pod: m.addr, Reason: "health check: " + err.Error(), Since: time.Now()})
	default:
		m.since = time.Now()
		p.absences.remove(m, false)
	}
}

// probe checks a member once.
func (p *Pool) probe(ctx context.Context, m *Member, c Checks) (err error) {
	err = panics.Err // if there is one
	defer p.panics.Recover(p.service)
	return c.Probe(ctx, m.addr)
}

// Probe checks a Pod once, and returns why it is not healthy.
func (c Checks) Probe(ctx context.Context, at netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout.Std())
	defer cancel()
	proxy := c.Proxy
	if c.Port != 0 && c.Port != at.Port() {
		at, proxy = netip.AddrPortFrom(at.Addr(), c.Port), 0
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", at.String())
		if err != nil || proxy == 0 {
			return conn, err
		}
		_ = conn.SetWriteDeadline(time.Now().Add(c.Timeout.Std()))
		if _, err := conn.Write(proxyproto.OwnHeader(proxy)); err != nil {
			_ = conn.Close()
			return nil, err
		}
		return conn, nil
	}
	switch c.Protocol {
	case dialect.HTTP, dialect.HTTPS:
		return c.http(ctx, at, dial)
	case dialect.GRPC:
		return askGRPC(ctx, at, dial)
	}
	conn, err := dial(ctx, "", "")
	if err != nil {
		return err
	}
	return conn.Close()
}

type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// maxHealthHeader bounds the header of an answer to a check.
const maxHealthHeader = 64 << 10

// http asks for the path, and follows no redirect.
func (c Checks) http(ctx context.Context, at netip.AddrPort, dial dialer) error {
	path := c.Path
	if path == "" {
		path = "/"
	}
	r, err := http.NewRequestWithContext(ctx, cmp.Or(c.Method, http.MethodGet), string(c.Protocol)+"://"+at.String()+path, nil)
	if err != nil {
		return err
	}
	r.Host = c.Host // "" is the address
	r.Header.Set("User-Agent", "fairlead-lb-health")
	t := &http.Transport{
		DialContext: dial, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxHealthHeader,
		TLSClientConfig: c.TLS.Config(),
	}
	answer, err := t.RoundTrip(r)
	if err != nil {
		return err
	}
	_ = answer.Body.Close()
	codes, err := dialect.ParseCodes(c.Codes)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(codes, func(r dialect.CodeRange) bool { return r.First <= answer.StatusCode && answer.StatusCode <= r.Last }) {
		return fmt.Errorf("status %d", answer.StatusCode)
	}
	return nil
}

var errNotServing = errors.New("the service grpc.health.v1.Health does not answer SERVING")

// askGRPC asks the standard health service (https://github.com/grpc/grpc/blob/master/doc/health-checking.md).
func askGRPC(ctx context.Context, at netip.AddrPort, dial dialer) error {
	conn, err := grpc.NewClient("passthrough:///"+at.String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(), grpc.WithUserAgent("fairlead-lb-health"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx, "", "") }))
	if err != nil {
		return err
	}
	defer conn.Close()
	answer, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err == nil && answer.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		err = errNotServing
	}
	return err
}
