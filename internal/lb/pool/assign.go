package pool

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// Request is what one Service wants.
type Request struct {
	Holder
	// Families are the families to get an address of, the preferred one first. With Both
	// it gets all of them or none.
	Families []svc.Family
	Both     bool
	// Asked are addresses that it asks for by name, at most one of a family.
	Asked []netip.Addr
	// Prefer are addresses that it gets if they are free, others if not.
	Prefer []netip.Addr
	// Pools are the names of the pools whose addresses it may get, in order. AskedOnly are
	// pools of which it only gets an address that it asks for.
	Pools, AskedOnly []string
	// Named means that the Service names its pool: it leaves others for it.
	Named bool
}

// Kind is what is wrong; its text is the reason of an Event.
type Kind string

// What may be wrong.
const (
	// Exhausted means that the Service waits until an address becomes free.
	Exhausted Kind = "AddressPoolExhausted"
	// Taken means that the address that it asks for is another one's.
	Taken Kind = "AddressTaken"
	// NotInPool means that the address that it asks for is in no pool, and NotAllowed
	// that it is in one that is not for this Service.
	NotInPool  Kind = "AddressNotInPool"
	NotAllowed Kind = "AddressPoolNotAllowed"
	// NoPool means that no pool is for the Service, or none has its family.
	NoPool Kind = "NoAddressPool"
	// Outside means that the Service keeps an address that no pool has any more, or
	// that belongs to another one.
	Outside Kind = "AddressOutsidePools"
	// Conflict means that Services that share an address cannot do so any more.
	Conflict Kind = "AddressSharingConflict"
)

// Problem is why a Service does not have what it wants.
type Problem struct {
	Kind    Kind
	Message string
	// Pools are those without a free address, if the Service waits for one.
	Pools []string
}

// Error returns the message.
func (p *Problem) Error() string { return p.Message }

// Result is what a Service gets.
type Result struct {
	// Addrs are the addresses that it is to publish, in the order of its families.
	// They are held for it from now on.
	Addrs []netip.Addr
	// Surplus are addresses that it still holds, to be released when they are no
	// longer published.
	Surplus []netip.Addr
	// Problems are why it has not got what it wants, or may not keep what it has.
	Problems []*Problem
}

// Assign decides which addresses a Service gets. It keeps an address that it holds,
// unless it asks for another one that is free, or can no longer share it.
func (a *Allocator) Assign(r *Request) Result {
	a.Update(r.Holder)
	had := a.Of(r.Service)
	var out Result
	missing := false
	var without []*Problem // of families that no pool has
	for _, f := range r.Families {
		addr, problem := a.assign(r, f, had)
		switch {
		case problem == nil:
		case problem.Kind == NoPool && !addr.IsValid():
			without = append(without, problem)
		default:
			out.Problems = append(out.Problems, problem)
		}
		if addr.IsValid() {
			a.Hold(addr, r.Holder)
			out.Addrs = append(out.Addrs, addr)
		}
		missing = missing || !addr.IsValid()
	}
	if r.Both || len(out.Addrs) == 0 {
		out.Problems = append(out.Problems, without...)
	} // else one family is enough where the pools have no other
	if missing && r.Both {
		for _, addr := range out.Addrs {
			if !slices.Contains(had, addr) {
				a.Release(addr, r.Service)
			}
		}
		out.Addrs = slices.DeleteFunc(out.Addrs, func(addr netip.Addr) bool { return !slices.Contains(had, addr) })
	}
	for _, addr := range had {
		if !slices.Contains(out.Addrs, addr) {
			out.Surplus = append(out.Surplus, addr)
		}
	}
	return out
}

// assign decides about one family.
func (a *Allocator) assign(r *Request, f svc.Family, had []netip.Addr) (netip.Addr, *Problem) {
	kept, problem := a.kept(r, f, had)
	if i := slices.IndexFunc(r.Asked, func(x netip.Addr) bool { return svc.FamilyOf(x) == f }); i >= 0 {
		asked := r.Asked[i]
		if asked == kept {
			return kept, problem
		}
		if wrong := a.obtainable(r, asked); wrong != nil {
			return kept, wrong
		}
		return asked, nil
	}
	if kept.IsValid() {
		if s := a.poolOf(kept); !r.Named || s != nil && slices.Contains(r.Pools, s.Name) {
			return kept, problem
		}
		if addr, ok := a.fresh(r, f); ok {
			return addr, nil
		}
		return kept, a.exhausted(r, f)
	}
	for _, addr := range r.Prefer {
		if svc.FamilyOf(addr) == f && a.obtainable(r, addr) == nil {
			return addr, nil
		}
	}
	if addr, ok := a.fresh(r, f); ok {
		return addr, nil
	}
	if problem != nil {
		return netip.Addr{}, problem
	}
	return netip.Addr{}, a.exhausted(r, f)
}

// kept returns the address of f that the Service has and may keep, an asked or
// preferred one if there are several, and the problem with it, if any.
func (a *Allocator) kept(r *Request, f svc.Family, had []netip.Addr) (netip.Addr, *Problem) {
	var kept netip.Addr
	var problem *Problem
	rank := func(x netip.Addr) int {
		switch {
		case slices.Contains(r.Asked, x):
			return 3
		case r.Named && slices.Contains(r.Pools, a.PoolOf(x)): // on its way from another pool
			return 2
		case slices.Contains(r.Prefer, x):
			return 1
		}
		return 0
	}
	for _, addr := range had {
		if svc.FamilyOf(addr) != f {
			continue
		}
		if other := a.earlier(addr, &r.Holder); other != nil {
			problem = &Problem{Kind: Conflict, Message: fmt.Sprintf(
				"%s cannot be shared with Service %s any longer: %s", addr, other.Service, whyNot(&r.Holder, other))}
			continue
		}
		if !kept.IsValid() || rank(addr) > rank(kept) {
			kept = addr
		}
	}
	if !kept.IsValid() {
		return kept, problem
	}
	s := a.poolOf(kept)
	switch why, blocked := a.blocked[kept]; {
	case blocked:
		problem = &Problem{Kind: Outside, Message: fmt.Sprintf("%s is %s; the Service keeps it until it asks for another one", kept, why)}
	case s == nil:
		problem = &Problem{Kind: Outside, Message: fmt.Sprintf(
			"%s is in no pool any more; the Service keeps it until it asks for another one", kept)}
	case !slices.Contains(r.Pools, s.Name) && !slices.Contains(r.AskedOnly, s.Name):
		problem = &Problem{Kind: Outside, Message: fmt.Sprintf(
			"%s is of pool %s, which is not for this Service; it keeps the address until it asks for another one", kept, s.Name)}
	default:
		problem = nil
	}
	return kept, problem
}

// earlier returns a holder of addr that came before h and that h does not fit.
func (a *Allocator) earlier(addr netip.Addr, h *Holder) *Holder {
	for _, o := range a.held[addr] {
		if o.Service == h.Service {
			return nil
		}
		if !h.fits(o) {
			return o
		}
	}
	return nil
}

// whyNot returns why h and o do not fit.
func whyNot(h, o *Holder) string {
	switch {
	case h.Key == "" || o.Key == "":
		return "both need the same sharing key"
	case h.Service.Namespace != o.Service.Namespace:
		return "both have to be of the same namespace"
	case h.Key != o.Key:
		return "their sharing keys differ"
	case h.Backend != o.Backend:
		return "with externalTrafficPolicy Local both need that policy and the same selector"
	}
	for _, p := range h.Ports {
		if slices.Contains(o.Ports, p) {
			return fmt.Sprintf("both have port %d/%s", p.Number, p.Protocol)
		}
	}
	return ""
}

// obtainable returns why the Service cannot have addr, nil if it can.
func (a *Allocator) obtainable(r *Request, addr netip.Addr) *Problem {
	s := a.poolOf(addr)
	if s == nil {
		return &Problem{Kind: NotInPool, Message: fmt.Sprintf("%s is in no pool; %s", addr, a.listing(svc.FamilyOf(addr)))}
	}
	if !slices.Contains(r.Pools, s.Name) && !slices.Contains(r.AskedOnly, s.Name) {
		return &Problem{Kind: NotAllowed, Message: fmt.Sprintf("%s is of pool %s, which is not for this Service", addr, s.Name)}
	}
	if why, is := a.blocked[addr]; is {
		return &Problem{Kind: Taken, Message: fmt.Sprintf("%s is %s", addr, why), Pools: []string{s.Name}}
	}
	if n := len(a.held[addr]); n >= maxSharing {
		return &Problem{Kind: Taken, Message: fmt.Sprintf("%s is shared by %d Services, which is the most", addr, n), Pools: []string{s.Name}}
	}
	for _, o := range a.held[addr] {
		if o.Service != r.Service && !r.fits(o) {
			return &Problem{Kind: Taken, Pools: []string{s.Name},
				Message: fmt.Sprintf("%s is used by Service %s (to share it: %s)", addr, o.Service, whyNot(&r.Holder, o))}
		}
	}
	return nil
}

// listing names the pools of a family, for a message.
func (a *Allocator) listing(f svc.Family) string {
	var names []string
	for name, s := range a.pools {
		if len(s.of(f).ranges) > 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return fmt.Sprintf("there is no pool of %s addresses", f)
	}
	slices.Sort(names)
	return fmt.Sprintf("the pools of %s addresses are %s", f, abbreviate(names))
}

// abbreviate joins names, and counts the names that are too many to show.
func abbreviate(names []string) string {
	const most = 5
	if len(names) > most {
		return fmt.Sprintf("%s and %d others", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

// What bounds the cost of sharing: the Services of one address, and the addresses of one
// key that are looked at.
const (
	maxSharing = 100
	maxShared  = 100
)

// fresh returns an address that the Service may share, or one that is free.
func (a *Allocator) fresh(r *Request, f svc.Family) (netip.Addr, bool) {
	shared := a.byKey[r.sharing()]
	for _, addr := range shared[:min(len(shared), maxShared)] {
		if s := a.poolOf(addr); svc.FamilyOf(addr) == f && s != nil && slices.Contains(r.Pools, s.Name) && a.obtainable(r, addr) == nil {
			return addr, true
		}
	}
	for _, name := range r.Pools {
		if s := a.pools[name]; s != nil {
			if addr, ok := a.take(s, f); ok {
				return addr, true
			}
		}
	}
	return netip.Addr{}, false
}

// exhausted returns the problem of a Service that got no address of f.
func (a *Allocator) exhausted(r *Request, f svc.Family) *Problem {
	var names, text []string
	for _, name := range r.Pools {
		if s := a.pools[name]; s != nil && len(s.of(f).ranges) > 0 {
			u := a.Usage(name, f)
			names = append(names, name)
			text = append(text, fmt.Sprintf("%s (%d free of %d)", name, u.Free, u.Total))
		}
	}
	if len(names) == 0 {
		return &Problem{Kind: NoPool, Message: fmt.Sprintf("no pool gives %s addresses to this Service; %s", f, a.listing(f))}
	}
	return &Problem{Kind: Exhausted, Pools: names,
		Message: fmt.Sprintf("no %s address is free in pool %s; the Service gets one when one becomes free", f, abbreviate(text))}
}
