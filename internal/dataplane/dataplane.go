// Package dataplane is the seam between what a node has decided (a table.Table) and
// the ways to make the kernel, or a process, carry it out. Each mode is a
// package below this one; what modes have in common is here.
//
// A mode is a Target for each address family, in a Reconciler, with its own Dump and
// Close. reconciler.go has the rules that a Target must follow.
package dataplane

import (
	"context"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/table"
)

// Applier writes Tables to one mechanism of the node.
//
// An Applier is used by one goroutine at a time. Constructors have no effect on
// the kernel; the first Apply adopts what an earlier process left, without a
// moment in which a packet to an unchanged frontend is lost (behaviour 50).
type Applier interface {
	// Apply makes the kernel answer as t says. changed holds the keys of the
	// service ports that differ from the Table of the last Apply that returned
	// nil or a *Rejected (including ports that are gone); nil means unknown and
	// asks for a full comparison with what is really there, which also repairs
	// what other programs removed. The work is proportional to changed. Apply is
	// idempotent: the same Table twice is a no-op. It applies what it can.
	//
	// An error in which errors.As finds a *Rejected names the ports that are not as
	// t has them; all others are. The caller names those keys again in changed when
	// it wants them tried again, and may leave them out until then. After any
	// other error it comes again with changed nil.
	Apply(ctx context.Context, t *table.Table, changed []table.Key) error
	// Dump returns what is in the kernel now as text to read and compare.
	Dump(ctx context.Context) (string, error)
	// Close releases what the Applier holds in this process. What it wrote to the
	// kernel stays and goes on working.
	Close() error
}

// Watcher is an Applier that notices when another program changes what it wrote.
type Watcher interface {
	// Changed returns a channel that holds a token after such a change, or what may
	// be one. An Apply with changed nil repairs it. It is for one receiver.
	Changed() <-chan struct{}
}

// Checker is an Applier with something in the kernel of which the kernel reports no
// changes.
type Checker interface {
	// Intact reports whether what can be read at little cost is as the last Apply left
	// it. If not, an Apply with changed nil finds out what is different, if anything,
	// and repairs it. It has the same caller as Apply.
	Intact() (bool, error)
}

// Changes is the Watcher of a mode: what watches the kernel calls Notify. It is
// made by NewChanges.
type Changes struct{ changed loop.Signal }

// NewChanges returns a Changes without a token.
func NewChanges() Changes { return Changes{loop.NewSignal()} }

// Changed is Watcher's.
func (c Changes) Changed() <-chan struct{} { return c.changed }

// Notify leaves a token in Changed. It does not block and is safe for concurrent
// use.
func (c Changes) Notify() { c.changed.Set() }
