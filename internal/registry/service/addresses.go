package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/alloc"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxTries bounds how many candidates in a row may prove to be claimed by other
// servers. Even one is rare, since candidates are random.
const maxTries = 256

// errNotReady is the text of Kubernetes for a server that does not know its
// ranges or claims yet (behaviour 161).
var errNotReady = errors.New("allocator not ready")

// addresses allocates cluster IPs of both families.
type addresses struct {
	claims *claims
	ledger *ledger[netip.Addr]

	// mu guards ranges. It is taken inside the ledger's lock, never around it.
	mu     sync.Mutex
	ranges []*addrRange
}

// addrRange is one range of a ServiceCIDR.
type addrRange struct {
	*alloc.Addrs
	// ready says whether new addresses may be taken from it.
	ready bool
}

func newAddresses(c *claims) *addresses {
	a := &addresses{claims: c}
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

// setRanges makes the ranges those of prefixes, with their readiness. Ranges
// that stay keep what they know, new ones learn it from the ledger. It says
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
func (a *addresses) choose(fam corev1.IPFamily, pick func(*alloc.Addrs) (netip.Addr, error)) (netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var full []string
	for _, r := range a.ranges {
		if !r.ready || svc.FamilyOf(r.Prefix().Addr()).String() != string(fam) {
			continue
		}
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

// take marks ip, which pick found, in the other ranges that contain it.
func (a *addresses) take(fam corev1.IPFamily) (netip.Addr, error) {
	ip, err := a.choose(fam, (*alloc.Addrs).AllocateNext)
	if err == nil {
		a.mark(ip)
	}
	return ip, err
}

// check says why ip may not be a cluster IP, without regard to who has it.
func (a *addresses) check(ip netip.Addr) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var valid []string
	for _, r := range a.ranges {
		if !r.ready || r.Prefix().Addr().Is4() != ip.Is4() {
			continue
		}
		if r.Contains(ip) {
			return nil
		}
		valid = append(valid, r.Prefix().String())
	}
	if len(valid) == 0 {
		return errNotReady
	}
	return &alloc.NotInRangeError{IP: ip.String(), Range: strings.Join(valid, ", ")}
}

// contains says whether any range, ready or not, contains ip.
func (a *addresses) contains(ip netip.Addr) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.ranges, func(r *addrRange) bool { return r.Contains(ip) })
}

// familyAllocator is the allocator of the addresses of one family.
type familyAllocator struct {
	*addresses
	family corev1.IPFamily
}

func (f familyAllocator) claim(ctx context.Context, owner svc.Name, asked string) (string, error) {
	if asked != "" {
		ip, ok := parseClusterIP(asked)
		if !ok {
			return "", fmt.Errorf("%q is not an IP address", asked)
		}
		if err := f.check(ip); err != nil {
			return "", err
		}
		err := f.claims.create(ctx, ip.String(), owner)
		if errors.Is(err, errClaimed) {
			err = alloc.ErrAllocated
		}
		return ip.String(), err
	}
	return claimAny(ctx, f.claims, f.ledger, owner,
		func() (netip.Addr, error) { return f.take(f.family) }, netip.Addr.String)
}

func (f familyAllocator) peek(ctx context.Context, asked string, not map[string]bool) (string, error) {
	if asked == "" {
		return peekAny(not, func() (string, error) {
			ip, err := f.choose(f.family, func(r *alloc.Addrs) (netip.Addr, error) { return r.DryRun().AllocateNext() })
			return ip.String(), err
		})
	}
	ip, ok := parseClusterIP(asked)
	if !ok {
		return "", fmt.Errorf("%q is not an IP address", asked)
	}
	if err := f.check(ip); err != nil {
		return "", err
	}
	taken, err := f.claims.exists(ctx, ip.String())
	if taken || not[ip.String()] {
		return "", alloc.ErrAllocated
	}
	return ip.String(), err
}

func (f familyAllocator) release(ctx context.Context, owner svc.Name, name string) error {
	err := f.claims.release(ctx, name, owner)
	if ip, perr := netip.ParseAddr(name); err == nil && perr == nil {
		f.ledger.drop(ip)
	}
	return err
}

// claimAny claims candidates of take until one was free. Candidates that proved
// to be claimed stay held until the end, so that none is tried twice.
func claimAny[K comparable](ctx context.Context, c *claims, l *ledger[K], owner svc.Name,
	take func() (K, error), text func(K) string) (string, error) {
	for range maxTries {
		k, err := l.hold(take)
		if err != nil {
			return "", err
		}
		err = c.create(ctx, text(k), owner)
		if err == nil {
			return text(k), nil
		}
		defer l.drop(k)
		if !errors.Is(err, errClaimed) {
			return "", err
		}
	}
	return "", fmt.Errorf("%d candidates in a row are claimed already; try again", maxTries)
}

// peekAny calls pick until it returns something that is not in not.
func peekAny(not map[string]bool, pick func() (string, error)) (string, error) {
	for range maxTries {
		s, err := pick()
		if err != nil || !not[s] {
			return s, err
		}
	}
	return "", fmt.Errorf("no free candidate in %d tries; try again", maxTries)
}
