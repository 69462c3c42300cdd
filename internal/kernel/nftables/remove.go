package nftables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Find returns the tables of a name, of both families.
func Find(name string) ([]Table, error) {
	var out []Table
	err := each(name, func(_ *Conn, t Table) error {
		out = append(out, t)
		return nil
	})
	return out, err
}

// Remove removes the tables of a name, of both families, and all in them. Where
// there are none it does nothing.
func Remove(ctx context.Context, name string) error {
	return each(name, func(c *Conn, t Table) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := NewBatch()
		b.DelTable(t)
		if err := c.Commit(b); !errors.Is(err, unix.ENOENT) {
			return err
		}
		return nil // somebody was faster
	})
}

func each(name string, do func(*Conn, Table) error) error {
	c, err := Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	var errs []error
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		t := Table{Family: FamilyOf(f), Name: name}
		_, there, err := c.Table(t)
		if err == nil && there {
			err = do(c, t)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("table %s: %w", t, err))
		}
	}
	return errors.Join(errs...)
}
