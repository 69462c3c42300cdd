package service

import (
	"context"
	"errors"
	"strconv"

	"github.com/fairlead/fairlead/internal/alloc"
	"github.com/fairlead/fairlead/internal/svc"
)

// ports allocates node ports.
type ports struct {
	claims *claims
	ledger *ledger[uint16]
	pool   *alloc.Ports
}

func newPorts(c *claims, r svc.PortRange) *ports {
	p := &ports{claims: c, pool: alloc.NewPorts(r)}
	p.ledger = newLedger(func(n uint16) { _ = p.pool.Allocate(n) }, p.pool.Release)
	return p
}

func portText(n uint16) string { return strconv.Itoa(int(n)) }

// parsePort reads the name of a claim.
func parsePort(name string) (uint16, bool) {
	n, err := strconv.ParseUint(name, 10, 16)
	return uint16(n), err == nil
}

// check says why the port named asked may not be a node port, without regard to
// who has it.
func (p *ports) check(asked string) error {
	if n, ok := parsePort(asked); !ok || !p.pool.Range().Contains(n) {
		return &alloc.NotInRangeError{Range: p.pool.Range().String()}
	}
	return nil
}

func (p *ports) claim(ctx context.Context, owner svc.Name, asked string) (string, error) {
	if asked == "" {
		return claimAny(ctx, p.claims, p.ledger, owner, p.pool.AllocateNext, portText)
	}
	if err := p.check(asked); err != nil {
		return "", err
	}
	err := p.claims.create(ctx, asked, owner)
	if errors.Is(err, errClaimed) {
		err = alloc.ErrPortAllocated
	}
	return asked, err
}

func (p *ports) peek(ctx context.Context, asked string, not map[string]bool) (string, error) {
	if asked == "" {
		return peekAny(not, func() (string, error) {
			n, err := p.pool.DryRun().AllocateNext()
			return portText(n), err
		})
	}
	if err := p.check(asked); err != nil {
		return "", err
	}
	taken, err := p.claims.exists(ctx, asked)
	if taken || not[asked] {
		return "", alloc.ErrPortAllocated
	}
	return asked, err
}

func (p *ports) release(ctx context.Context, owner svc.Name, name string) error {
	err := p.claims.release(ctx, name, owner)
	if n, ok := parsePort(name); err == nil && ok {
		p.ledger.drop(n)
	}
	return err
}
