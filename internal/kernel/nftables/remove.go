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
		return nil // removed in the meantime
	})
}

// RemoveTable removes table t and all in it. It is no error if there is no such
// table, or no nf_tables in the kernel.
func RemoveTable(t Table) error {
	c, err := Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	b := NewBatch()
	b.DelTable(t)
	if err := c.Commit(b); err != nil && !IsUnsupported(err) {
		return fmt.Errorf("remove table %s: %w", t, err)
	}
	return nil
}

// IsUnsupported reports whether the kernel rejected something because it has no
// such thing: no table, no expression, no module, no nf_tables.
func IsUnsupported(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EPROTONOSUPPORT)
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
