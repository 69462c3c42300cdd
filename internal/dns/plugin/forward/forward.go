// Package forward is the step that asks other resolvers, as CoreDNS's plugin forward does.
// Unlike it, each question over UDP has its own socket and random case of letters, which
// makes answers harder to forge.
package forward

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// budget is the time for all attempts at one question, as in CoreDNS.
const budget = 5 * time.Second

// Forward asks the resolvers of one directive.
type Forward struct {
	c    *corefile.Forward
	log  *slog.Logger
	next plugin.Handler
	// nextForward is whether the next step is a forward too.
	nextForward bool
	upstreams   []*Upstream
	turn        atomic.Uint32
	inFlight    atomic.Int64
	Stats       Stats
}

// Stats are the counters of a Forward.
type Stats struct {
	Rejects, Broken atomic.Uint64
}

// New returns the step. It reads the certificates.
func New(c *corefile.Forward, log *slog.Logger, next plugin.Handler) (*Forward, error) {
	f := &Forward{c: c, log: log, next: next}
	_, f.nextForward = next.(*Forward)
	base, err := clientTLS(c)
	if err != nil {
		return nil, fmt.Errorf("%s: forward: %w", c.Pos, err)
	}
	for _, to := range c.To {
		f.upstreams = append(f.upstreams, newUpstream(c, to, base))
	}
	return f, nil
}

// clientTLS returns the configuration of connections over TLS.
func clientTLS(c *corefile.Forward) (*tls.Config, error) {
	base := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.TLSServerName, ClientSessionCache: tls.NewLRUClientSessionCache(len(c.To))}
	if c.TLS == nil {
		return base, nil
	}
	if c.TLS.CA != "" {
		pem, err := os.ReadFile(c.TLS.CA)
		if err != nil {
			return nil, err
		}
		base.RootCAs = x509.NewCertPool()
		if !base.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate", c.TLS.CA)
		}
	}
	if c.TLS.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.TLS.Cert, c.TLS.Key)
		if err != nil {
			return nil, err
		}
		base.Certificates = []tls.Certificate{pair}
	}
	return base, nil
}

// Upstreams returns the resolvers, for the metrics.
func (f *Forward) Upstreams() []*Upstream { return f.upstreams }

// Run asks resolvers that have failed until they answer, and ends with ctx.
func (f *Forward) Run(ctx context.Context) {
	if f.c.HealthEvery == 0 || f.c.MaxFails == 0 {
		<-ctx.Done()
	} else {
		f.probe(ctx)
	}
	for _, u := range f.upstreams {
		u.idle.close()
	}
}

func (f *Forward) probe(ctx context.Context) {
	tick := time.NewTicker(f.c.HealthEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var checks sync.WaitGroup
		for _, u := range f.upstreams {
			if !u.suspect.Load() {
				continue
			}
			checks.Go(func() {
				if u.check(ctx, f.c) {
					f.log.Info("resolver answers again", "upstream", u.Name)
				}
			})
		}
		checks.Wait()
	}
}

// Answer asks the resolvers if the name is theirs.
func (f *Forward) Answer(ctx context.Context, q *plugin.Query) plugin.Reply {
	name := q.Name()
	if !corefile.InZone(name, f.c.From) || name != f.c.From && corefile.LongestZone(name, f.c.Except) != "" {
		return f.next.Answer(ctx, q)
	}
	if n := f.inFlight.Add(1); f.c.MaxConcurrent > 0 && n > int64(f.c.MaxConcurrent) {
		f.inFlight.Add(-1)
		f.Stats.Rejects.Add(1)
		return plugin.Fail("forward", mdns.RcodeRefused, errors.New("forward: more questions at once than max_concurrent "+
			strconv.Itoa(f.c.MaxConcurrent)))
	}
	defer f.inFlight.Add(-1)
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	m, err := f.ask(ctx, q)
	switch {
	case m == nil:
		return plugin.Fail("forward", mdns.RcodeServerFailure, err)
	case f.nextForward && f.passOn(m):
		return f.next.Answer(ctx, q)
	}
	return plugin.Reply{Msg: m, Plugin: "forward"}
}

// passOn reports whether the next forward may have a better answer.
func (f *Forward) passOn(m *mdns.Msg) bool {
	noData := f.c.NextOnNoData && m.Rcode == mdns.RcodeSuccess && len(m.Answer) == 0
	return noData || slices.Contains(f.c.Next, m.Rcode)
}

// errUnhealthy is the error where no resolver is asked.
var errUnhealthy = errors.New("forward: no resolver is healthy")

// ask asks one resolver after the other until one answers.
func (f *Forward) ask(ctx context.Context, q *plugin.Query) (*mdns.Msg, error) {
	attempts := f.c.MaxConnectAttempts
	if attempts == 0 {
		attempts = 2 * len(f.upstreams)
	}
	order := f.order()
	last := errUnhealthy
	failovers, down := 0, 0
	for i := 0; attempts > 0 && ctx.Err() == nil; i++ {
		if i%len(order) == 0 {
			down = 0
		}
		u := order[i%len(order)]
		if u.down(f.c.MaxFails) {
			if down++; down < len(order) {
				continue
			}
			f.Stats.Broken.Add(1)
			if f.c.FailFast {
				return nil, errUnhealthy
			}
			// The health checks may be wrong.
			u = order[rand.IntN(len(order))]
		}
		attempts--
		m, err := u.exchange(ctx, f.c, q)
		if err != nil {
			// The resolver may wait for a server of the zone that is silent: only health checks count.
			u.suspect.Store(true)
			last = fmt.Errorf("forward: %s: %w", u.Name, err)
			continue
		}
		u.fails.Store(0)
		u.suspect.Store(false)
		if failovers++; slices.Contains(f.c.Failover, m.Rcode) && failovers < len(order) {
			attempts++
			continue
		}
		return m, nil
	}
	return nil, last
}

// order returns the resolvers in the order to ask them.
func (f *Forward) order() []*Upstream {
	n := len(f.upstreams)
	if n == 1 || f.c.Policy == "sequential" {
		return f.upstreams
	}
	if f.c.Policy == "round_robin" {
		at := int(f.turn.Add(1)-1) % n
		return slices.Concat(f.upstreams[at:], f.upstreams[:at])
	}
	out := slices.Clone(f.upstreams)
	rand.Shuffle(n, func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}
