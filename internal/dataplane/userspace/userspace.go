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
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

// mode is this mode's name.
const mode = "userspace"

// Config is what a Mode needs to know; the zero value is usable.
type Config struct {
	// Random chooses endpoints at random rather than in turn (behaviour 39).
	Random bool
	// Ports are the ports to listen on; the zero value leaves it to the kernel,
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
	// Log gets a warning when connections have to wait for want of files; nil
	// discards it.
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

// Mode is the dataplane.Applier of this mode. It works in the network namespace in
// which it is called. Unlike what other modes write, its connections end with the
// process: open ones go on whatever happens to their Service, and UDP clients of an
// endpoint that is gone get another one.
type Mode struct {
	*dataplane.Reconciler
	dataplane.Changes
	cfg      Config
	kernel   kernel
	engine   atomic.Pointer[relay.Engine] // nil before the first Apply
	failing  atomic.Int64                 // endpoints, see target
	targets  []*target
	drops    *drops.Tables
	reported relay.Stats // when warn looked last
	closed   bool

	looks  sync.Mutex // held by Look, guards what follows
	reader kernel     // not the kernel of Apply, but in tests; nil after Close
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
	m := newMode(cfg, k)
	reader, err := nftables.Dial()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("userspace: %w", err), k.Close())
	}
	m.reader = reader
	if err = k.Watch(tableName, m.Notify); err == nil {
		m.drops, err = drops.OpenTables(tableName)
	}
	if err != nil {
		_ = errors.Join(k.Close(), reader.Close())
		return nil, fmt.Errorf("userspace: %w", err)
	}
	return m, nil
}

func newMode(cfg Config, k kernel) *Mode {
	m := &Mode{cfg: cfg, kernel: k, reader: k, Changes: dataplane.NewChanges()}
	m.Reconciler = dataplane.NewReconciler(mode, dataplane.Hooks{Begin: m.begin})
	for _, f := range socket.Families() {
		t := newTarget(f, m)
		m.targets = append(m.targets, t)
		m.Add(f, t)
	}
	return m
}

// begin starts the threads that carry connections, if they do not run yet.
func (m *Mode) begin(_ context.Context, all bool) error {
	engine := m.engine.Load()
	if engine == nil {
		var err error
		engine, err = relay.Start(relay.Config{
			ConnectTimeout: m.cfg.ConnectTimeout, UDPTimeout: m.cfg.UDPTimeout, MaxFiles: m.cfg.MaxFiles,
		})
		if err != nil {
			return err
		}
		m.engine.Store(engine)
	}
	if all {
		m.warn(engine.Stats())
	}
	return nil
}

// warn logs that connections had to wait since the last time.
func (m *Mode) warn(now relay.Stats) {
	if now.Paused > m.reported.Paused {
		m.cfg.Log.Warn("new connections had to wait, since there were too few open files: raise the limit (ulimit -n, or LimitNOFILE= of the "+
			"unit)",
			"times", now.Paused-m.reported.Paused, "connections", now.Connections, "clients", now.UDPClients)
	}
	m.reported = now
}

// Carried is dataplane.Carrier's.
func (m *Mode) Carried() dataplane.Carried {
	e := m.engine.Load()
	if e == nil {
		return dataplane.Carried{}
	}
	s := e.Stats()
	return dataplane.Carried{
		Connections: s.Connections, UDPFlows: s.UDPClients, FailingEndpoints: m.failing.Load(),
		Accepted: s.Accepted, Retried: s.Retried, Failed: s.Failed, EndpointFailures: s.EndpointFailures, Paused: s.Paused,
		ToEndpoints: s.ToEndpoints, ToClients: s.ToClients,
	}
}

// Close stops listening, waits for open connections as long as Config.Drain
// says, and ends the remaining ones. New connections to Services are refused
// from now on, by rules that stay until another process takes them over or
// Cleanup removes them.
func (m *Mode) Close() error {
	if m.closed {
		return nil
	}
	m.closed = true
	var err error
	if e := m.engine.Load(); e != nil {
		ctx, cancel := context.WithTimeout(context.Background(), max(m.cfg.Drain, 0))
		defer cancel()
		err = e.Close(ctx)
	}
	m.looks.Lock()
	defer m.looks.Unlock()
	if m.reader != m.kernel {
		err = errors.Join(err, m.reader.Close())
	}
	m.reader = nil
	return errors.Join(err, m.kernel.Close(), m.drops.Close())
}

// Drops is dataplane.Counter's.
func (m *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return m.drops.Drops(ctx) }

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
