// Package userspace is the mode in which this process carries the bytes of
// every connection: it is the only one that can try another endpoint when the
// first does not answer (behaviour 40), and the endpoint does not see the client's
// address (behaviour 41). See README.md.
package userspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// mode is this mode's name.
const mode = "userspace"

// Config is what a Mode needs to know; the zero value is usable.
type Config struct {
	// Random chooses endpoints at random rather than in turn (behaviour 39).
	Random bool
	// ServiceCIDRs are the ranges of ClusterIPs. What is sent to an address
	// there that no Service has is dropped.
	ServiceCIDRs []netip.Prefix
	// Ports are those to listen on; the zero value leaves it to the kernel,
	// which chooses among net.ipv4.ip_local_port_range.
	Ports svc.PortRange
	// ConnectTimeout is how long an endpoint may take to answer before the next
	// one is tried, UDPTimeout how long a silent UDP client keeps its endpoint;
	// 0 stands for relay's defaults.
	ConnectTimeout, UDPTimeout time.Duration
	// Avoid is for how long an endpoint that did not answer is not chosen if
	// there are others; it doubles with each further time, up to maxAvoid times
	// that. 0 stands for DefaultAvoid.
	Avoid time.Duration
	// Drain bounds how long Close waits for open connections; 0 stands for
	// DefaultDrain, a negative time does not wait.
	Drain time.Duration
	// MaxFiles bounds the open files of connections, see relay.Config.
	MaxFiles int
	// Log is told when connections have to wait for want of files; nil discards
	// it.
	Log *slog.Logger
}

// The defaults of Config.
const (
	DefaultAvoid = 5 * time.Second
	DefaultDrain = 5 * time.Second
)

func (c *Config) complete() error {
	for _, d := range []time.Duration{c.ConnectTimeout, c.UDPTimeout, c.Avoid} {
		if d < 0 {
			return fmt.Errorf("userspace: %s is no time to wait; use a positive one", d)
		}
	}
	if c.Avoid == 0 {
		c.Avoid = DefaultAvoid
	}
	if c.Drain == 0 {
		c.Drain = DefaultDrain
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// kernel is what the Mode needs of nftables.Conn.
type kernel interface {
	Commit(*nftables.Batch) error
	nftables.Dumper
	Elems(t nftables.Table, set string, begin func(), f func(nftables.Elem)) error
	Close() error
}

// Mode is a dataplane.Applier. It works in the network namespace in which it is
// called. Unlike what other modes write, its connections end with the process.
type Mode struct {
	cfg      Config
	kernel   kernel
	engine   atomic.Pointer[relay.Engine] // nil before the first Apply
	failing  atomic.Int64                 // endpoints, see target
	families []*family
	repaired []string
	lost     *drops.Tables
	told     relay.Stats // when complain looked last
	closed   bool
}

// New returns a Mode. It does nothing yet.
func New(cfg Config) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	k, err := nftables.Dial()
	if err != nil {
		return nil, fmt.Errorf("userspace: %w", err)
	}
	p := newMode(cfg, k)
	if p.lost, err = drops.OpenTables(tableName); err != nil {
		_ = k.Close()
		return nil, fmt.Errorf("userspace: %w", err)
	}
	return p, nil
}

func newMode(cfg Config, k kernel) *Mode {
	p := &Mode{cfg: cfg, kernel: k}
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		p.families = append(p.families, newFamily(f, &p.cfg, &p.failing, k))
	}
	return p
}

// Apply is dataplane.Applier's. Open connections go on whatever happens to their
// Service; UDP clients of an endpoint that is gone get another one.
func (p *Mode) Apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	engine := p.engine.Load()
	if engine == nil {
		var err error
		engine, err = relay.Start(relay.Config{
			ConnectTimeout: p.cfg.ConnectTimeout, UDPTimeout: p.cfg.UDPTimeout, MaxFiles: p.cfg.MaxFiles,
		})
		if err != nil {
			return err
		}
		p.engine.Store(engine)
	}
	if changed == nil {
		p.repaired = nil
		p.complain(engine.Stats())
	}
	var errs []error
	for _, f := range p.families {
		first := f.have == nil
		err := f.apply(ctx, engine, t, changed)
		if err != nil {
			err = fmt.Errorf("userspace, table %s: %w", f.layout.table, err)
		}
		errs = append(errs, err)
		if changed == nil && !first {
			p.repaired = append(p.repaired, f.repaired...)
		}
	}
	return dataplane.Both(errs...)
}

// complain tells of what happened since the last time.
func (p *Mode) complain(now relay.Stats) {
	if now.Paused > p.told.Paused {
		p.cfg.Log.Warn("new connections had to wait, since there were too few open files: raise the limit (ulimit -n, or LimitNOFILE= of the unit)",
			"times", now.Paused-p.told.Paused, "connections", now.Connections, "udp clients", now.UDPClients)
	}
	p.told = now
}

// Repaired says what the last Apply with changed nil found missing or foreign
// and put right, one line each. The first Apply of a process repairs nothing.
func (p *Mode) Repaired() []string { return p.repaired }

// Carried is dataplane.Carrier's.
func (p *Mode) Carried() dataplane.Carried {
	e := p.engine.Load()
	if e == nil {
		return dataplane.Carried{}
	}
	s := e.Stats()
	return dataplane.Carried{
		Connections: s.Connections, UDPFlows: s.UDPClients, FailingEndpoints: p.failing.Load(),
		Accepted: s.Accepted, Retried: s.Retried, Failed: s.Failed, EndpointFailures: s.EndpointFailures, Paused: s.Paused,
		ToEndpoints: s.ToEndpoints, ToClients: s.ToClients,
	}
}

// Close stops listening, waits for open connections as long as Config.Drain
// says, and ends those that are left. New connections to Services are refused
// from now on, by rules that stay until another process takes them over or
// Cleanup removes them.
func (p *Mode) Close() error {
	if p.closed {
		return nil
	}
	p.closed = true
	var err error
	if e := p.engine.Load(); e != nil {
		ctx, cancel := context.WithTimeout(context.Background(), max(p.cfg.Drain, 0))
		defer cancel()
		err = e.Close(ctx)
	}
	return errors.Join(err, p.kernel.Close(), p.lost.Close())
}

// Drops is dataplane.Counter's.
func (p *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return p.lost.Drops(ctx) }

// forget removes what connection tracking remembers of UDP clients of
// frontends that are answered on another port than before.
func forget(ctx context.Context, moved []conntrack.Flow) error {
	if len(moved) == 0 {
		return nil
	}
	if _, err := conntrack.Delete(ctx, moved); err != nil {
		return fmt.Errorf("forget tracked UDP clients of %d frontends: %w", len(moved), err)
	}
	return nil
}
