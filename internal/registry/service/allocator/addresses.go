package allocator

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/alloc"
	"github.com/fairlead/fairlead/internal/svc"
)

// errNotReady is the text of Kubernetes for a server that does not know its
// ranges or claims yet (behaviour 161).
var errNotReady = errors.New("allocator not ready")

// addresses is the known state of the cluster IPs of both families.
type addresses struct {
	ledger *ledger[netip.Addr]

	// mu guards ranges. It is taken inside the ledger's lock, never around it.
	mu     sync.Mutex
	ranges []*addrRange
}

// addrRange is one range of a ServiceCIDR.
type addrRange struct {
	*alloc.Addrs
	// ready reports whether new addresses may be taken from it.
	ready bool
}

func newAddresses() *addresses {
	a := &addresses{}
	a.ledger = newLedger(a.mark, a.unmark)
	return a
}

// mark and unmark keep every range that contains ip up to date: ranges may
// overlap.
func (a *addresses) mark(ip netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range a.ranges {
		// Out of range or marked already are both fine.
		_ = r.Allocate(ip)
	}
}

func (a *addresses) unmark(ip netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range a.ranges {
		r.Release(ip)
	}
}

// setRanges sets the ranges to prefixes, with their readiness. Ranges
// that stay keep what they know, new ones learn it from the ledger. It reports
// whether any range is ready.
func (a *addresses) setRanges(prefixes map[netip.Prefix]bool) bool {
	a.ledger.mu.Lock()
	defer a.ledger.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	var next []*addrRange
	for _, r := range a.ranges {
		if ready, ok := prefixes[r.Prefix()]; ok {
			next = append(next, &addrRange{r.Addrs, ready})
			delete(prefixes, r.Prefix())
		}
	}
	for p, ready := range prefixes {
		r, err := alloc.NewAddrs(p)
		if err != nil {
			continue // too large: nothing can be allocated from it
		}
		for ip := range a.ledger.known {
			_ = r.Allocate(ip) // out of range is fine
		}
		next = append(next, &addrRange{r, ready})
	}
	slices.SortFunc(next, func(x, y *addrRange) int {
		return cmp.Or(x.Prefix().Addr().Compare(y.Prefix().Addr()), cmp.Compare(x.Prefix().Bits(), y.Prefix().Bits()))
	})
	a.ranges = next
	return slices.ContainsFunc(next, func(r *addrRange) bool { return r.ready })
}

// choose calls pick on each ready range of the family until one is not full.
func (a *addresses) choose(f svc.Family, pick func(*alloc.Addrs) (netip.Addr, error)) (netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var full []string
	for _, r := range a.ready(f) {
		ip, err := pick(r.Addrs)
		if err == nil {
			return ip, nil
		}
		full = append(full, r.Prefix().String())
	}
	if len(full) == 0 {
		return netip.Addr{}, errNotReady
	}
	return netip.Addr{}, &alloc.FullError{Range: strings.Join(full, ", ")}
}

// ready returns the ranges of the family that addresses may be taken from. It
// is called with mu held.
func (a *addresses) ready(f svc.Family) (out []*addrRange) {
	for _, r := range a.ranges {
		if r.ready && svc.FamilyOf(r.Prefix().Addr()) == f {
			out = append(out, r)
		}
	}
	return out
}

// next marks a random free address of the family in every range that contains
// it.
func (a *addresses) next(f svc.Family) (netip.Addr, error) {
	ip, err := a.choose(f, (*alloc.Addrs).AllocateNext)
	if err == nil {
		a.mark(ip)
	}
	return ip, err
}

// check returns the address that was requested, or why it cannot be a cluster
// IP, no matter who has it.
func (a *addresses) check(requested string) (netip.Addr, error) {
	ip, ok := parseClusterIP(requested)
	if !ok {
		return ip, fmt.Errorf("%q is not an IP address", requested)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var valid []string
	for _, r := range a.ready(svc.FamilyOf(ip)) {
		if r.Contains(ip) {
			return ip, nil
		}
		valid = append(valid, r.Prefix().String())
	}
	if len(valid) == 0 {
		return ip, errNotReady
	}
	return ip, &alloc.NotInRangeError{IP: ip.String(), Range: strings.Join(valid, ", ")}
}

// contains reports whether any range, ready or not, contains ip.
func (a *addresses) contains(ip netip.Addr) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.ranges, func(r *addrRange) bool { return r.Contains(ip) })
}
