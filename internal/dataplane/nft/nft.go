// Package nft is the mode that lets the kernel's nf_tables translate addresses.
// A Service costs elements of maps, not chains or rules; see README.md.
package nft

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// Config is what a Mode needs to know; the zero value is usable.
type Config struct {
	Balance dataplane.Balance
	// MasqueradeBit is the bit of the packet mark for connections to
	// masquerade, 1 to 31; 0 stands for 14, kube-proxy's.
	MasqueradeBit int
	// DropInvalid drops what a local endpoint sends outside of any known
	// connection. Not wanted with net.netfilter.nf_conntrack_tcp_be_liberal.
	DropInvalid bool
	// LogLost logs packets that reach no endpoint to drops.LogGroup, a few of them. The kernel must have nfnetlink_log.
	LogLost bool
}

const defaultMasqueradeBit = 14

func (c *Config) complete() error {
	if c.MasqueradeBit == 0 {
		c.MasqueradeBit = defaultMasqueradeBit
	}
	if c.MasqueradeBit < 1 || c.MasqueradeBit > 31 {
		return fmt.Errorf("nft: masquerade bit %d is not within 1 and 31", c.MasqueradeBit)
	}
	return nil
}

// kernel is what the Mode needs of nftables.Conn.
type kernel interface {
	Commit(*nftables.Batch) error
	Generation() (uint32, error)
	MaxBatch() int
	nftables.Dumper
	Elems(t nftables.Table, set string, begin func(), f func(nftables.Elem)) error
	Get(t nftables.Table, set string, keys [][]byte, f func(nftables.Elem)) error
	Close() error
}

// Mode is the dataplane.Applier of this mode. It works in the network namespace in
// which New was called.
type Mode struct {
	*dataplane.Reconciler
	dataplane.Changes
	kernel  *watched
	targets []*target
	drops   *drops.Tables
	served  *served
	looks   looks
}

// looks reads single elements for Look, beside the user of the Mode.
type looks struct {
	mu   sync.Mutex
	conn kernel
	own  bool // conn is not the Mode's: only in tests it is
}

func (l *looks) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	conn := l.conn
	if l.conn = nil; conn == nil || !l.own {
		return nil
	}
	return conn.Close()
}

// New returns a Mode. It does nothing to the kernel's tables yet.
func New(cfg Config) (*Mode, error) {
	k, err := nftables.Dial()
	if err != nil {
		return nil, fmt.Errorf("nft: %w", err)
	}
	m, err := newMode(cfg, k)
	if err == nil {
		err = k.Watch(tableName, m.Notify)
	}
	if err == nil {
		m.drops, err = drops.OpenTables(tableName)
	}
	if err == nil {
		m.served, err = openServed()
	}
	var reader *nftables.Conn
	if err == nil {
		reader, err = nftables.Dial()
	}
	if err != nil {
		_ = k.Close()
		return nil, err
	}
	m.looks.conn, m.looks.own = reader, true
	return m, nil
}

func newMode(cfg Config, k kernel) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	m := &Mode{kernel: &watched{kernel: k}, Changes: dataplane.NewChanges(), looks: looks{conn: k}}
	m.Reconciler = dataplane.NewReconciler(mode, dataplane.Hooks{Begin: m.begin, Unchanged: m.kernel.unchanged})
	for _, f := range socket.Families() {
		t := &target{layout: newLayout(f, &cfg), kernel: m.kernel, direct: direct.New(f, m.kernel)}
		m.targets = append(m.targets, t)
		m.Add(f, t)
	}
	return m, nil
}

func (m *Mode) begin(_ context.Context, all bool) error {
	if all {
		m.kernel.begin()
	}
	return nil
}

// Close releases the connection to the kernel. The tables stay.
func (m *Mode) Close() error {
	return errors.Join(m.kernel.Close(), m.drops.Close(), m.served.close(), m.looks.close())
}

// Drops is dataplane.Counter's.
func (m *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return m.drops.Drops(ctx) }

// watched is the kernel, which counts the changes that anybody makes to its tables,
// and the last known count. A full comparison costs two system calls where
// it shows that no other program has changed any.
type watched struct {
	kernel
	alone bool   // no other program has changed anything since begin
	gen   uint32 // after the last change that is known
}

// begin is called before everything is read: the state read is the truth from
// now on, unless something changes in between.
func (w *watched) begin() {
	var err error
	w.gen, err = w.Generation()
	w.alone = err == nil
}

// unchanged reports whether no other process changed anything since begin.
func (w *watched) unchanged() bool {
	gen, err := w.Generation()
	return w.alone && err == nil && gen == w.gen
}

// Commit is the kernel's, and counts.
func (w *watched) Commit(b *nftables.Batch) error {
	if !w.alone {
		return w.kernel.Commit(b)
	}
	w.alone = w.unchanged()
	err := w.kernel.Commit(b)
	if err == nil {
		w.gen++
		w.alone = w.alone && w.unchanged()
	}
	return err
}
