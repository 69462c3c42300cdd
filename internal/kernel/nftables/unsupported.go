package nftables

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// IsUnsupported reports whether the kernel rejected something because it has no
// such thing: no table, no expression, no module, no nf_tables.
func IsUnsupported(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EPROTONOSUPPORT)
}

// UnsupportedError is the error of a table that this kernel cannot have. Until a module is
// installed, or another kernel started, each attempt fails alike: Retry says when to make one.
type UnsupportedError struct {
	Table Table
	// What is the Batch.Tag of what the kernel lacks, "" if it blamed nothing with a tag.
	What string
	Err  error
}

// Error names the table, what the kernel lacks, and its reason.
func (e *UnsupportedError) Error() string {
	what := e.What
	if what == "" {
		what = "something of it"
	}
	return fmt.Sprintf("this kernel cannot have nft table %s: it lacks %s: %v", e.Table, what, e.Err)
}

// Unwrap returns the kernel's reasons.
func (e *UnsupportedError) Unwrap() error { return e.Err }

// InetTables is a Batch.Tag for a table of family inet, which kernels may lack as a whole.
const InetTables = "tables of family inet (CONFIG_NF_TABLES_INET)"

// CommitTable commits a transaction that writes the whole table t again (Batch.ReplaceTable), or makes
// it and removes it. Such a one needs nothing that is there already, so what the kernel does not
// find, it does not have: the error is an *UnsupportedError then.
func (c *Conn) CommitTable(t Table, b *Batch) error {
	err := c.Commit(b)
	switch {
	case err == nil:
		return nil
	case !IsUnsupported(err):
		return fmt.Errorf("write nft table %s: %w", t, err)
	}
	u := &UnsupportedError{Table: t, Err: err}
	var r *Refusal
	if errors.As(err, &r) && len(r.Tags) > 0 {
		u.What = fmt.Sprint(r.Tags[0])
	}
	return u
}

// Pauses before what the kernel lacked is tried again: the first, and the longest.
const (
	firstPause = time.Minute
	maxPause   = 30 * time.Minute
)

// Retry says when to try again what the kernel lacked. The zero value says at once.
type Retry struct {
	pause time.Duration
	at    time.Time
}

// Lacked records an attempt at now that ended with an *UnsupportedError: the next one is due after
// a minute, and after twice as long each time, up to half an hour.
func (r *Retry) Lacked(now time.Time) {
	r.pause = min(max(2*r.pause, firstPause), maxPause)
	r.at = now.Add(r.pause)
}

// Waits reports whether no attempt is due at now.
func (r *Retry) Waits(now time.Time) bool { return now.Before(r.at) }
