package nftables

import (
	"context"
	"errors"
	"fmt"
	"time"

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
//
// A packet that is under way while a table goes still passes all rules of the old
// chains, but finds no element of the maps any more: it would meet what those
// rules have for addresses without endpoints. So chains that translate
// destinations are emptied first, and the rest goes when every packet that has met
// their rules is through.
func Remove(ctx context.Context, name string) error {
	emptied := false
	err := each(name, func(c *Conn, t Table) error {
		some, err := emptyDNAT(c, t)
		emptied = emptied || some
		return err
	})
	if emptied {
		err = errors.Join(err, AwaitPackets(ctx))
	}
	return errors.Join(err, each(name, func(c *Conn, t Table) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := NewBatch()
		b.DelTable(t)
		if err := c.Commit(b); !errors.Is(err, unix.ENOENT) {
			return err
		}
		return nil // removed in the meantime
	}))
}

// emptyDNAT removes the rules of the base chains that translate the destinations
// of new connections, and reports whether there are such chains.
func emptyDNAT(c *Conn, t Table) (some bool, err error) {
	chains, err := c.Chains(t)
	if err != nil {
		return false, err
	}
	b := NewBatch()
	for _, ch := range chains {
		if h := ch.Hook; h != nil && h.Type == "nat" && (h.Number == Prerouting || h.Number == Output) {
			b.FlushChain(t, ch.Name)
		}
	}
	if b.Empty() {
		return false, nil
	}
	if err := c.Commit(b); err != nil && !errors.Is(err, unix.ENOENT) {
		return false, err
	}
	return true, nil
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h (Linux 4.3).
const membarrierGlobal = 1

// packetTime is more than a packet takes through the hooks, where the kernel
// cannot be asked.
const packetTime = 100 * time.Millisecond

// AwaitPackets returns when all packets are through that were on their way through
// netfilter's hooks, and to their sockets. They are so under rcu_read_lock, from prerouting or output to
// postrouting or the socket, and membarrier(2) waits for what holds that: it is
// synchronize_rcu. A kernel with nohz_full refuses it. The error is that of ctx.
func AwaitPackets(ctx context.Context) error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(packetTime):
		return nil
	}
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

// RemoveEmpty removes the tables of a name, of both families, that have nothing but base
// chains without rules that accept everything. The kernel rejects it (NLM_F_NONREC) if
// another program adds anything at the same time.
func RemoveEmpty(name string) error {
	return each(name, func(c *Conn, t Table) error {
		chains, err := c.Chains(t)
		if err != nil {
			return err
		}
		b := NewBatch()
		for _, ch := range chains {
			if ch.Hook == nil || ch.Drops {
				return nil
			}
			b.begin(unix.NFT_MSG_DELCHAIN, unix.NLM_F_NONREC, t.Family)
			b.enc.String(unix.NFTA_CHAIN_TABLE, t.Name)
			b.enc.String(unix.NFTA_CHAIN_NAME, ch.Name)
			b.enc.End()
		}
		b.begin(unix.NFT_MSG_DELTABLE, unix.NLM_F_NONREC, t.Family)
		b.enc.String(unix.NFTA_TABLE_NAME, t.Name)
		b.enc.End()
		if err := c.Commit(b); !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOENT) {
			return err
		}
		return nil
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
