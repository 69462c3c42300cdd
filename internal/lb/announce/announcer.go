package announce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/loop"
)

// Options are what an Announcer needs.
type Options struct {
	// Interfaces are the names of the interfaces to use, for addresses of any network.
	// Without any, every interface is used whose network has the address.
	Interfaces []string
	// May calls send and returns true if this node may answer for the address at
	// this moment, and does neither otherwise. It is called concurrently.
	// It must not wait for a call of Take or Leave.
	May func(a netip.Addr, send func()) bool
	// IsPeer reports whether a hardware address is one of another speaker of the cluster, which
	// may have had the address before. It is called concurrently.
	IsPeer func(MAC) bool
	// Conflict is called when a machine that is none of the cluster's uses an
	// address, at most once a minute for each.
	Conflict func(Conflict)
	// Changed is called when what Links or Moved returns has changed.
	Changed func()
	// Neighbours, if not nil, returns addresses of other speakers, if some may announce. Then an interface that comes
	// up is used when a neighbour or a gateway has answered there, since another node is the better choice until then.
	// ok is false while it is unknown whether others may announce. It must not wait for a call of Take or Leave.
	Neighbours func() (addrs []netip.Addr, ok bool)
	// Off leaves the kernel's own answers to ARP as they are, for a node at which nothing is taken.
	Off bool
	Log *slog.Logger
}

const (
	// probeWait is how long the answer to a probe may take before an address is used.
	// RFC 5227 has seconds, for networks that people join by hand.
	probeWait = 40 * time.Millisecond
	// lateAnswer is until when after the probe a claim may be a late answer to it: of a
	// machine that sleeps or is busy, or that this one was too busy to hear.
	lateAnswer = 3 * time.Second
	// newProbes are sent for an address that no node of the cluster had, newWait apart: a
	// machine that saves power, or the frame, may miss the first. A new Service waits for all of
	// them; one that answers after that is seen by lateAnswer.
	newProbes = 3
	newWait   = 60 * time.Millisecond
	// conflictRetry is after how long an address with a foreign owner is probed again, at the earliest; after twice that at
	// the latest, by chance: of two clusters that begin at once both have given way.
	conflictRetry = 10 * time.Second
	// conflictReport is the least time between two calls of Conflict for one address.
	conflictReport = time.Minute
)

// repeats are when an address is announced after the probe: a switch or router may
// have been restarting, or have lost the first.
var repeats = []time.Duration{0, 200 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second}

// Announcer answers for addresses.
type Announcer struct {
	opts   Options
	log    *slog.Logger
	wake   loop.Signal
	reopen loop.Signal // set when a device has failed
	// probeWait, newWait and conflictRetry are the constants, but in tests.
	probeWait, newWait, conflictRetry time.Duration

	mu      sync.RWMutex
	entries map[netip.Addr]*entry
	devices map[int]*device // by index
	links   []link.Interface
	closed  bool
	failed  map[string]bool // interfaces whose error was logged
	moved   map[netip.Addr]struct{}
	// conflicts are the conflicts of the last conflictReport, and held ones.
	conflicts map[netip.Addr]seenConflict
	// newLinks are interfaces that are not used yet, by index, and answered the others.
	newLinks map[int]*newLink
	answered map[int]MAC
}

// state is how far an address is taken.
type state uint8

const (
	fresh state = iota // no device is open for it yet
	probing
	active
	conflicting
)

// entry is one address that this node holds.
type entry struct {
	addr     netip.Addr
	names    []string // its pool's interfaces
	devices  []*device
	state    state
	due      time.Time // of the next step, zero for none
	since    time.Time // the beginning of the announcements
	began    time.Time // the end of the probe
	step     int       // next of repeats
	probes   int       // to send before it is answered for
	left     int       // of probes
	reported time.Time
}

// New returns an Announcer for Run.
func New(o Options) *Announcer {
	return &Announcer{
		opts: o, log: o.Log, wake: loop.NewSignal(), reopen: loop.NewSignal(),
		entries: map[netip.Addr]*entry{}, devices: map[int]*device{}, failed: map[string]bool{}, moved: map[netip.Addr]struct{}{},
		newLinks: map[int]*newLink{}, answered: map[int]MAC{},
		probeWait: probeWait, newWait: newWait, conflictRetry: conflictRetry, conflicts: map[netip.Addr]seenConflict{},
	}
}

// Run answers and announces until ctx ends, in the network namespace of the calling
// thread. Nothing is answered before it, and nothing after it has returned.
func (a *Announcer) Run(ctx context.Context) error {
	changed := loop.NewSignal()
	stop, err := link.WatchInterfaces(changed.Set)
	if err != nil {
		return fmt.Errorf("watch interfaces: %w", err)
	}
	defer stop()
	defer a.close()
	a.refresh()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	// Notifications may be missed, and an interface may have failed for a moment.
	again := time.NewTicker(30 * time.Second)
	defer again.Stop()
	for {
		timer.Reset(a.advance(time.Now()))
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			a.refresh()
		case <-again.C:
			a.refresh()
		case <-a.reopen:
			a.refresh()
		case <-a.wake:
		case <-timer.C:
		}
	}
}

// Take begins to answer for addresses, at the interfaces called names or, without
// any, at the interfaces of Options. It first asks the network whether a foreign machine
// has the address.
func (a *Announcer) Take(names []string, addrs ...netip.Addr) { a.take(names, 1, addrs) }

// TakeNew is Take for addresses that no node of the cluster had before. It takes some tenths of
// a second, in which the network is asked several times.
func (a *Announcer) TakeNew(names []string, addrs ...netip.Addr) { a.take(names, newProbes, addrs) }

func (a *Announcer) take(names []string, probes int, addrs []netip.Addr) {
	if len(addrs) == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, addr := range addrs {
		if a.entries[addr] != nil || a.closed {
			continue
		}
		a.entries[addr] = &entry{addr: addr, names: names, probes: probes, due: time.Now()}
	}
	a.wake.Set()
}

// Leave ends what Take has begun.
func (a *Announcer) Leave(addrs ...netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, addr := range addrs {
		if e := a.entries[addr]; e != nil {
			e.move(nil)
			delete(a.entries, addr)
			delete(a.conflicts, addr)
		}
	}
}

// Where returns the names of the interfaces at which an address is answered for, none
// if it is not.
func (a *Announcer) Where(addr netip.Addr) (names []string) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	e := a.entries[addr]
	if e == nil || e.state != active {
		return nil
	}
	for _, d := range e.devices {
		names = append(names, d.name)
	}
	return names
}

// Moved returns the addresses for which the result of Where may have changed since the last call,
// other than by Take and Leave.
func (a *Announcer) Moved() []netip.Addr {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.moved) == 0 {
		return nil
	}
	out := slices.Collect(maps.Keys(a.moved))
	clear(a.moved)
	return out
}

// Links returns the usable interfaces: with a carrier, and named in Options or, without
// names, with a network.
func (a *Announcer) Links() []link.Interface {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.links
}

// refresh reads the interfaces and moves the addresses to the existing ones.
func (a *Announcer) refresh() {
	found, err := link.Interfaces()
	if err != nil {
		a.log.Warn("cannot read the interfaces; keeping the last ones", "err", err)
		return
	}
	found = slices.DeleteFunc(found, func(l link.Interface) bool { return !l.Running || !a.usable(l) })
	if !a.opts.Off {
		a.quietenNew(found)
	}
	a.mu.Lock()
	answering := a.answering(found)
	same := slices.EqualFunc(answering, a.links, sameLink)
	a.links = answering
	for index, d := range a.devices {
		i := slices.IndexFunc(found, func(l link.Interface) bool { return l.Index == index })
		if i < 0 || found[i].MAC != d.link.MAC || d.dead() {
			d.close()
			delete(a.devices, index)
		} else {
			d.link = found[i]
		}
	}
	now := time.Now()
	for _, e := range a.entries {
		if e.state == fresh {
			continue
		}
		before := e.devices
		a.place(e)
		if e.state != active || slices.Equal(before, e.devices) {
			continue
		}
		a.moved[e.addr] = struct{}{}
		if len(e.devices) > 0 {
			e.announce(now) // at the new ones
		}
	}
	changed := !same || len(a.moved) > 0
	a.mu.Unlock()
	a.wake.Set()
	if changed {
		a.changed()
	}
}

func (a *Announcer) changed() {
	if a.opts.Changed != nil {
		a.opts.Changed()
	}
}

func sameLink(a, b link.Interface) bool {
	return a.Index == b.Index && a.Name == b.Name && a.MAC == b.MAC &&
		slices.Equal(a.Networks, b.Networks) && slices.Equal(a.Gateways, b.Gateways)
}

func (a *Announcer) usable(l link.Interface) bool {
	if len(a.opts.Interfaces) > 0 {
		return slices.Contains(a.opts.Interfaces, l.Name)
	}
	return true
}

// place opens the devices for an address.
func (a *Announcer) place(e *entry) {
	var on []*device
	for _, l := range a.at(e) {
		if d := a.device(l); d != nil {
			on = append(on, d)
		}
	}
	e.move(on)
}

// device returns the device of an interface, nil if it cannot be opened.
func (a *Announcer) device(l link.Interface) *device {
	if d := a.devices[l.Index]; d != nil {
		return d
	}
	d, err := a.open(l)
	if err != nil {
		if !a.failed[l.Name] {
			a.log.Error("cannot answer at an interface; retrying every 30 s", "interface", l.Name, "err", err)
		}
		a.failed[l.Name] = true
		return nil
	}
	delete(a.failed, l.Name)
	a.devices[l.Index] = d
	return d
}

// at returns the interfaces for an address: the named ones or, without any, the one by which the
// kernel reaches its network. With two on one network, neighbours would hear of two hardware addresses.
func (a *Announcer) at(e *entry) (on []link.Interface) {
	if len(e.names) == 0 && len(a.opts.Interfaces) > 0 {
		return a.links
	}
	longest := -1
	for _, l := range a.links {
		switch {
		case !Reaches(l, e.addr, e.names):
		case len(e.names) > 0:
			on = append(on, l)
		default:
			for _, p := range l.Networks {
				if p.Contains(e.addr) && p.Bits() > longest { // of equal ones the first, as with routes
					longest, on = p.Bits(), []link.Interface{l}
				}
			}
		}
	}
	return on
}

// Reaches reports whether an interface answers for an address: it has one of these names
// or, without any, its network has the address.
func Reaches(l link.Interface, addr netip.Addr, names []string) bool {
	if len(names) > 0 {
		return slices.Contains(names, l.Name)
	}
	return slices.ContainsFunc(l.Networks, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// advance does what is due, and returns when something is again.
func (a *Announcer) advance(now time.Time) time.Duration {
	a.mu.Lock()
	began := false
	next := a.ask(now)
	for _, e := range a.entries {
		for !e.due.IsZero() && !e.due.After(now) {
			began = a.step(e, now) || began
		}
		if !e.due.IsZero() && e.due.Before(next) {
			next = e.due
		}
	}
	a.mu.Unlock()
	if began {
		a.changed()
	}
	return time.Until(next)
}

// step does what is due for an address, and reports whether that begins to be answered for.
func (a *Announcer) step(e *entry, now time.Time) (began bool) {
	switch e.state {
	case fresh:
		a.place(e)
		e.left = e.probes
		a.probe(e, now)
	case conflicting:
		e.left = e.probes
		a.probe(e, now)
	case probing:
		if e.left > 0 {
			a.probe(e, now)
			break
		}
		e.state, e.began = active, now
		delete(a.conflicts, e.addr)
		e.announce(now)
		a.moved[e.addr] = struct{}{}
		began = true
	case active:
		a.opts.May(e.addr, func() {
			for _, d := range e.devices {
				for _, f := range announcement(e.addr, d.link.MAC, d.link.Gateways) {
					d.send(f)
				}
			}
		})
		if e.step++; e.step < len(repeats) {
			e.due = e.since.Add(repeats[e.step])
		} else {
			e.due = time.Time{}
		}
	}
	return began
}

func (a *Announcer) probe(e *entry, now time.Time) {
	wait := a.probeWait
	if e.probes > 1 {
		wait = a.newWait
	}
	e.state, e.due = probing, now.Add(wait)
	e.left--
	for _, d := range e.devices {
		d.send(probe(e.addr, d.link.MAC))
	}
}

func (e *entry) announce(now time.Time) { e.since, e.step, e.due = now, 0, now.Add(repeats[0]) }

// move puts an address to other devices.
func (e *entry) move(to []*device) {
	for _, d := range e.devices {
		if !slices.Contains(to, d) {
			d.leave(e.addr)
		}
	}
	for _, d := range to {
		if !slices.Contains(e.devices, d) {
			d.join(e.addr)
		}
	}
	e.devices = to
}

func (a *Announcer) close() {
	a.mu.Lock()
	a.closed = true
	devices := a.devices
	a.devices = map[int]*device{}
	clear(a.entries)
	a.mu.Unlock()
	for _, d := range devices {
		d.close()
	}
	for _, d := range devices {
		d.readers.Wait()
	}
}

// gone reports whether an error means that the interface is not there, which the
// next refresh handles.
func gone(err error) bool {
	return errors.Is(err, syscall.ENETDOWN) || errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.ENODEV)
}
