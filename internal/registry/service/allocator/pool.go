package allocator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/alloc"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxTries bounds how many candidates in a row may prove to be claimed by other
// servers. Even one is rare, since candidates are random.
const maxTries = 256

// pool allocates the names of one resource.
type pool interface {
	// claim claims the requested name, or any if it is empty, for owner. What is
	// taken or out of range is reported by the errors of package alloc.
	claim(ctx context.Context, owner svc.Name, requested string) (string, error)
	// dryRun answers as claim would, and claims nothing. The names in exclude
	// count as taken.
	dryRun(ctx context.Context, requested string, exclude map[string]bool) (string, error)
	// release removes the claim of owner. Releasing an unclaimed value, or
	// claimed by another, does nothing.
	release(ctx context.Context, owner svc.Name, name string) error
}

// keyPool is the pool of a resource whose names are keys of type K.
type keyPool[K comparable] struct {
	claims *claims
	ledger *ledger[K]
	// format and parse convert between a key and the name of its claim.
	format func(K) string
	parse  func(name string) (K, bool)
	// check parses a requested name in any spelling that is accepted and
	// returns an error if it cannot be allocated at all.
	check func(requested string) (K, error)
	// next marks a random free key and returns it; peek only returns one.
	next, peek func() (K, error)
	// errTaken is what the API answers for a key that is claimed already.
	errTaken error
}

// addressPool is the pool of the cluster IPs of one family.
func addressPool(c *claims, a *addresses, f svc.Family) *keyPool[netip.Addr] {
	return &keyPool[netip.Addr]{
		claims: c, ledger: a.ledger, format: netip.Addr.String, parse: parseAddr, check: a.check,
		next: func() (netip.Addr, error) { return a.next(f) },
		peek: func() (netip.Addr, error) { return a.choose(f, (*alloc.Addrs).Peek) }, errTaken: alloc.ErrAllocated,
	}
}

// portPool is the pool of the node ports in r.
func portPool(c *claims, r svc.PortRange) *keyPool[uint16] {
	p := alloc.NewPorts(r)
	return &keyPool[uint16]{
		claims: c,
		ledger: newLedger(func(n uint16) { _ = p.Allocate(n) }, p.Release),
		format: formatPort, parse: parsePort,
		check: func(requested string) (uint16, error) {
			n, ok := parsePort(requested)
			if !ok || !r.Contains(n) {
				return 0, &alloc.NotInRangeError{Range: r.String()}
			}
			return n, nil
		},
		next: p.AllocateNext, peek: p.Peek, errTaken: alloc.ErrPortAllocated,
	}
}

func parseAddr(name string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(name)
	return a, err == nil
}

func formatPort(n uint16) string { return strconv.Itoa(int(n)) }

func parsePort(name string) (uint16, bool) {
	n, err := strconv.ParseUint(name, 10, 16)
	return uint16(n), err == nil
}

func (p *keyPool[K]) claim(ctx context.Context, owner svc.Name, requested string) (string, error) {
	if requested == "" {
		return p.claimAny(ctx, owner)
	}
	k, err := p.check(requested)
	if err != nil {
		return "", err
	}
	name := p.format(k)
	err = p.claims.create(ctx, name, owner)
	if errors.Is(err, errClaimed) {
		err = p.errTaken
	}
	return name, err
}

// claimAny claims candidates until one was free. Candidates that proved to be
// claimed stay held until the end, so that none is tried again.
func (p *keyPool[K]) claimAny(ctx context.Context, owner svc.Name) (string, error) {
	for range maxTries {
		k, err := p.ledger.hold(p.next)
		if err != nil {
			return "", err
		}
		name := p.format(k)
		err = p.claims.create(ctx, name, owner)
		if err == nil {
			return name, nil
		}
		defer p.ledger.drop(k)
		if !errors.Is(err, errClaimed) {
			return "", err
		}
	}
	return "", fmt.Errorf("%d candidates in a row are claimed already; try again", maxTries)
}

func (p *keyPool[K]) dryRun(ctx context.Context, requested string, exclude map[string]bool) (string, error) {
	if requested != "" {
		k, err := p.check(requested)
		if err != nil {
			return "", err
		}
		name := p.format(k)
		taken, err := p.claims.exists(ctx, name)
		if taken || exclude[name] {
			return "", p.errTaken
		}
		return name, err
	}
	for range maxTries {
		k, err := p.peek()
		if err != nil {
			return "", err
		}
		if name := p.format(k); !exclude[name] {
			return name, nil
		}
	}
	return "", fmt.Errorf("no free candidate in %d tries; try again", maxTries)
}

func (p *keyPool[K]) release(ctx context.Context, owner svc.Name, name string) error {
	err := p.claims.release(ctx, name, owner)
	if k, ok := p.parse(name); err == nil && ok {
		p.ledger.drop(k)
	}
	return err
}

// familyOf is the API's name of the family of a canonical address.
func familyOf(name string) corev1.IPFamily {
	a, _ := parseAddr(name)
	return corev1.IPFamily(svc.FamilyOf(a).String())
}
