package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// Watch notices what other programs do to the chains of one program. Of variant nft
// the kernel reports it. Of variant legacy it does not, and Intact finds it; there
// every change of the tables counts, but for a rule in the place of another of the
// same size.
type Watch struct {
	conn   *nftables.Conn // nil without notifications
	tables []string
	tools  []*WatchedTool
}

// NewWatch returns a Watch of tables in the network namespace of the calling thread.
// ours reports which chains count. changed is called as that of
// nftables.Conn.WatchChains, of variant legacy never.
func NewWatch(v Variant, tables []string, ours func(chain string) bool, changed func()) (*Watch, error) {
	w := &Watch{tables: tables}
	if v == Legacy {
		return w, nil
	}
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	if err := c.WatchChains(tables, ours, changed); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	w.conn = c
	return w, nil
}

// Close ends the notifications, and the use of the tools.
func (w *Watch) Close() error {
	var errs []error
	for _, t := range w.tools {
		if t.ownLock != nil {
			errs = append(errs, t.ownLock.Close())
		}
	}
	if w.conn != nil {
		errs = append(errs, w.conn.Close())
	}
	return errors.Join(errs...)
}

// Intact reports whether the tables of variant legacy are as the tools have left
// them. It costs a system call for each table.
func (w *Watch) Intact() (bool, error) {
	for _, t := range w.tools {
		if err := t.look(); err != nil || len(t.foreign) > 0 {
			return false, err
		}
	}
	return true, nil
}

// Tool returns t with its own changes left out of the Watch.
func (w *Watch) Tool(t *Tool) *WatchedTool {
	own := *t
	wt := &WatchedTool{Tool: &own, plain: t, conn: w.conn, known: map[string]info{}, foreign: map[string]bool{}}
	if t.variant != Legacy {
		return wt
	}
	wt.tables = w.tables
	if takesLockFile(context.Background(), t.restore) {
		own.ownLock, _ = newLockFile() // without one the program takes the real lock
	}
	w.tools = append(w.tools, wt)
	return wt
}

// WatchedTool is a Tool of a Watch. Changes of a table by others count until a Save of it, or
// SaveAll, has read them.
type WatchedTool struct {
	*Tool
	plain *Tool
	conn  *nftables.Conn
	// tables are the tables of the Watch, if they have to be looked at, and known what
	// they were last; foreign has the tables that others have changed since.
	tables  []string
	known   map[string]info
	foreign map[string]bool
}

// Unwatched is the Tool for others than the user of the Watch, beside it: what they read does not count.
func (t *WatchedTool) Unwatched() *Tool { return t.plain }

// Restore is Tool's. Each COMMIT is a transaction.
func (t *WatchedTool) Restore(ctx context.Context, input []byte) error {
	if t.conn != nil {
		return t.conn.Unwatched(bytes.Count(input, []byte("COMMIT\n")), func() error { return t.Tool.Restore(ctx, input) })
	}
	if t.ownLock != nil {
		// A change by others between the end of the program and the look at what it has
		// left would be taken for ours.
		unlock, err := lock(ctx)
		if err != nil {
			return &Error{Program: t.name() + "-restore", Code: busy, err: err}
		}
		defer unlock()
	}
	_ = t.look()
	err := t.Tool.Restore(ctx, input)
	t.learn(t.tables...)
	return err
}

// Save is Tool's.
func (t *WatchedTool) Save(ctx context.Context, table string, chain func(name string), rule func(chain, line string)) error {
	watched := slices.Contains(t.tables, table)
	if watched {
		delete(t.foreign, table)
		t.learn(table)
	}
	err := t.Tool.Save(ctx, table, chain, rule)
	if err != nil && watched {
		t.foreign[table] = true // not all of it was read
	}
	return err
}

// SaveAll is Tool's.
func (t *WatchedTool) SaveAll(ctx context.Context, chain func(table, name string), rule func(table, chain, line string)) error {
	clear(t.foreign)
	// To look at others would make the kernel have them.
	known := slices.Collect(maps.Keys(t.known))
	t.learn(known...)
	err := t.Tool.SaveAll(ctx, chain, rule)
	if err != nil {
		for _, name := range known {
			t.foreign[name] = true // not all of it was read
		}
	}
	return err
}

// learn remembers what tables are now.
func (t *WatchedTool) learn(tables ...string) {
	for _, name := range tables {
		now, err := t.info(name)
		if t.known[name] = now; err != nil {
			delete(t.known, name)
		}
	}
}

// look finds out whether others have changed a table.
func (t *WatchedTool) look() error {
	for name, was := range t.known {
		now, err := t.info(name)
		if err != nil {
			return err
		}
		if now != was {
			t.foreign[name] = true
		}
	}
	return nil
}

// info is the kernel's description of a table, the struct ipt_getinfo of
// linux/netfilter_ipv4/ip_tables.h, which is the same for IPv6: the name, where its
// chains begin and end, the number of rules and their size.
type info [tableNameBytes + 13*4]byte

func (t *Tool) info(table string) (out info, err error) {
	domain, level := unix.AF_INET, unix.SOL_IP
	if t.family == svc.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return out, os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	copy(out[:tableNameBytes-1], table)
	if err := getsockopt(fd, level, getInfo, out[:]); err != nil {
		return out, fmt.Errorf("look at table %s of %s: %w", table, t.name(), err)
	}
	return out, nil
}
