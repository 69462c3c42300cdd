package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Target is where a mode writes the frontends of one address family: all that a
// mode has to implement, besides a constructor, for a Reconciler to make it an
// Applier. Which frontends must exist, in which order the Target is called and
// what becomes of errors is the Reconciler's.
//
// A Target remembers what it has read and written, and its Write starts from
// that. It is used by one goroutine at a time.
type Target interface {
	// Read reads the installed state, which replaces all that the Target remembers.
	// It is called before the first Write, before a full comparison, when
	// Settings differ, and when what is remembered is in doubt: after an error,
	// ErrStale or Change.Reread. A Write with Change.Full follows.
	//
	// Where Change.Trusted is set, what is remembered was certain: report by
	// Change.Drift what differs from it.
	Read(ctx context.Context, c *Change) error

	// Write brings every frontend in Change.Dirty to what Change.Wanted has for it,
	// and does not touch the others: its cost depends on the dirty ones. With
	// Change.Full, which follows a Read, it also writes what is always there, and
	// removes whatever else of the mode's was found and nothing needs.
	//
	// At no moment may a packet to a frontend that was there before and will be
	// after meet less than one of the two, or a frontend lead to a missing chain or set:
	// what is led to is written before, and removed after, what leads to it. Write
	// is idempotent.
	//
	// A frontend that cannot be written, while others can, is left as it was and
	// given to Change.Reject. Everything else that goes wrong is returned, or given
	// to Change.Fail if the Write goes on; the Reconciler reads again before the
	// next Write then. ErrStale asks it to do so at once.
	Write(ctx context.Context, c *Change) error
}

// SettingsWriter is a Target that can write some changes of the Settings without
// a Read before. Others get one for any difference.
type SettingsWriter interface {
	// WritesSettings reports whether a Write that is not Full can bring old to next.
	WritesSettings(old, next *Settings) bool
}

// Unwatched is a Target whose state other programs can change without Hooks.Unchanged seeing it: every full comparison
// reads it.
type Unwatched interface{ Unwatched() }

// ErrStale is wrapped by the error of a Read or Write that met something else
// than what is remembered: another program has changed it. The Reconciler reads
// everything again and writes once more, up to MaxAttempts times.
var ErrStale = errors.New("another program changed the installed state")

// MaxAttempts is how often everything is compared within one Apply.
const MaxAttempts = 3

// Dirty are the frontends that may have to change, each with the key of the port
// for whose sake. The key is the zero value for frontends that belong to no port,
// such as frontends that a Target finds and no port has.
type Dirty map[FrontKey]table.Key

// Change is what one Read and Write of a Target are about. Its maps belong to the
// Target during the call.
type Change struct {
	// Plan is the desired state. It stays the same one for all calls of a Target,
	// which may keep it, and is changed only by the Reconciler.
	*Plan
	Dirty Dirty
	// Keys are the keys of service ports that were planned again, and may be gone,
	// for Targets that hold something for a whole port.
	Keys []table.Key
	// Full, Trusted: see Target.
	Full, Trusted bool
	// Attempt counts the Reads of this Apply from 1. After the last one, MaxAttempts,
	// a Write does what it can in spite of ErrStale.
	Attempt int

	rejected Rejections
	partial  bool // something was given to Reject or RejectPort
	reread   bool
	drift    []string
	errs     []error
}

// Reject leaves out a frontend that could not be written. It names the port for
// whose sake it was to change, and the one that it belongs to, in the error of the
// Apply; with the next version of either the frontend is dirty again. If there is
// no such port it is the error of the whole Apply.
func (c *Change) Reject(k FrontKey, err error) {
	named := false
	if port := c.Dirty[k]; port != (table.Key{}) {
		c.RejectPort(port, err)
		c.pending[port] = append(c.pending[port], k)
		named = true
	}
	if port, ok := c.claims.Owner(k); ok {
		c.RejectPort(port.Key(), err)
		named = true
	}
	if !named {
		c.Fail(err)
	}
}

// RejectPort names a port in the error of the Apply, of which something else than
// a frontend could not be written.
func (c *Change) RejectPort(k table.Key, err error) {
	c.partial = true
	c.rejected.Add(k, err)
}

// Partial reports whether anything was rejected by the Target so far. What only
// rejected frontends need may be garbage then, or not.
func (c *Change) Partial() bool { return c.partial }

// Fail makes err an error of the Apply, in which the Target goes on.
func (c *Change) Fail(err error) {
	if err != nil {
		c.errs = append(c.errs, err)
	}
}

// Reread asks for a Read before the next Write, although this one may end well.
func (c *Change) Reread() { c.reread = true }

// Drift reports something that was otherwise than this process left it, in one
// line. It counts only where that is known (Trusted).
func (c *Change) Drift(format string, args ...any) {
	if c.Trusted {
		c.drift = append(c.drift, fmt.Sprintf(format, args...))
	}
}

// Hooks are what a mode does for both families together. Each may be nil.
type Hooks struct {
	// Begin is called first in every Apply. all reports whether it reads all
	// Targets. An error ends the Apply.
	Begin func(ctx context.Context, all bool) error
	// Unchanged reports whether no other program has changed anything since the last
	// Begin with all: then a full comparison reads nothing.
	Unchanged func() bool
}

// Reconciler is the Apply of every mode: it plans a Table, and has the Targets of
// both families written.
//
//	changed known:  plan those keys ─► Write(dirty) ─► ErrStale? as below
//	changed nil:    plan all ─► Read ─► Write(all, Full) ─► ErrStale? once more
//
// A mode embeds it, and adds Dump and Close; dataplane.Counter, Carrier and the
// like are for the mode to implement.
type Reconciler struct {
	mode     string
	hooks    Hooks
	families []*family
	repaired []string
}

// family is one Target and its state.
type family struct {
	target Target
	plan   *Plan
	next   Settings // of the Table of this Apply
	// known reports whether what the target remembers is certain.
	known bool
	// garbage reports whether the last full comparison may have left what nothing
	// needs.
	garbage bool
	// rejected are the ports that the last Apply which tried them left out.
	rejected map[table.Key]bool
}

// NewReconciler returns a Reconciler without Targets. mode is the mode's name, for
// errors.
func NewReconciler(mode string, hooks Hooks) *Reconciler {
	return &Reconciler{mode: mode, hooks: hooks}
}

// Add gives the Reconciler the Target of a family. It is called before the first
// Apply.
func (r *Reconciler) Add(f svc.Family, t Target) {
	r.families = append(r.families, &family{target: t, plan: NewPlan(r.mode, f), rejected: map[table.Key]bool{}})
}

// Repaired returns what the last Apply with changed nil found missing or foreign
// and put right, one line each. The first Apply of a process repairs nothing: it
// only brings up to date what an earlier one left.
func (r *Reconciler) Repaired() []string { return r.repaired }

// Known reports whether it is certain what the last Apply left in the kernel; if not,
// the next one reads it.
func (r *Reconciler) Known() bool {
	return !slices.ContainsFunc(r.families, func(f *family) bool { return !f.known })
}

// Forget makes the next Apply read everything, as the first one does.
func (r *Reconciler) Forget() {
	for _, f := range r.families {
		f.known = false
	}
}

// Apply is Applier's.
func (r *Reconciler) Apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	if changed == nil {
		r.repaired = nil
	}
	all := changed == nil && !r.unchanged()
	for _, f := range r.families {
		f.next = SettingsOf(t, f.plan.family)
		all = all || f.needsRead()
	}
	if r.hooks.Begin != nil {
		if err := r.hooks.Begin(ctx, all); err != nil {
			return fmt.Errorf("%s: %w", r.mode, err)
		}
	}
	var errs []error
	for _, f := range r.families {
		_, unwatched := f.target.(Unwatched)
		c, err := f.apply(ctx, t, changed, all || changed == nil && unwatched)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %s: %w", r.mode, f.plan.family, err))
		}
		if changed == nil {
			r.repaired = append(r.repaired, c.drifted()...)
		}
	}
	return joinFamilies(errs...)
}

// unchanged reports whether the kernel has what this process wrote, for certain.
func (r *Reconciler) unchanged() bool {
	for _, f := range r.families {
		if !f.known || f.garbage {
			return false
		}
	}
	return r.hooks.Unchanged != nil && r.hooks.Unchanged()
}

// needsRead reports whether what is remembered does not do for the next Write.
func (f *family) needsRead() bool {
	if !f.known {
		return true
	}
	if f.next.Equal(&f.plan.Settings) {
		return false
	}
	w, ok := f.target.(SettingsWriter)
	return !ok || !w.WritesSettings(&f.plan.Settings, &f.next)
}

// apply writes the family's share of t and returns the last Change.
func (f *family) apply(ctx context.Context, t *table.Table, keys []table.Key, read bool) (*Change, error) {
	trusted := f.known
	f.known = false // until it is
	if !read {
		if keys == nil {
			keys = slices.AppendSeq([]table.Key{}, maps.Keys(f.rejected))
			keys = slices.AppendSeq(keys, f.plan.differing(t))
		}
		same := f.next.Equal(&f.plan.Settings)
		c := f.change(t, keys)
		if len(c.Keys) == 0 && same || !c.do(ctx, f.target.Write) {
			return c, f.done(c)
		}
	}
	var drift []string
	for attempt := 1; ; attempt++ {
		c := f.change(t, nil)
		c.Full, c.Attempt, c.Trusted, c.drift = true, attempt, trusted && attempt == 1, drift
		stale := c.do(ctx, f.target.Read)
		if len(c.errs) == 0 {
			stale = c.do(ctx, f.target.Write)
		}
		if !stale || attempt == MaxAttempts {
			return c, f.done(c)
		}
		drift = c.drift
	}
}

// change plans keys, all of t if nil.
func (f *family) change(t *table.Table, keys []table.Key) *Change {
	c := &Change{Plan: f.plan, Dirty: Dirty{}}
	f.plan.Settings = f.next
	c.Keys = f.plan.update(t, keys, c.Dirty, &c.rejected)
	return c
}

// do makes one call of a Target and reports whether that met ErrStale.
func (c *Change) do(ctx context.Context, call func(context.Context, *Change) error) bool {
	err := ctx.Err()
	if err == nil {
		err = call(ctx, c)
	}
	c.Fail(err)
	return slices.ContainsFunc(c.errs, func(err error) bool { return errors.Is(err, ErrStale) })
}

// done remembers how an Apply ended and returns its error.
func (f *family) done(c *Change) error {
	f.known = len(c.errs) == 0 && !c.reread
	if c.Full {
		f.garbage = len(c.errs) > 0 || c.partial
	}
	for _, k := range c.Keys {
		delete(f.rejected, k)
	}
	for k := range c.rejected.ports {
		f.rejected[k] = true
	}
	return c.rejected.Err(c.errs...)
}

// maxDrift bounds how many lines are reported of one family.
const maxDrift = 20

func (c *Change) drifted() []string {
	slices.Sort(c.drift)
	if more := len(c.drift) - maxDrift; more > 0 {
		return append(c.drift[:maxDrift:maxDrift], fmt.Sprintf("%s: and %d more", c.family, more))
	}
	return c.drift
}
