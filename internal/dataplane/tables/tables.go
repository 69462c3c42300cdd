// Package tables has what the modes share that write tables of nf_tables: how a
// frontend is written in the keys of their elements, and how they are removed.
package tables

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// AppendKey appends a frontend as nf_tables compares it: every part fills whole
// 32-bit registers, addresses and ports are in network order. A node port has no
// address.
func AppendKey(b []byte, k dataplane.FrontKey) []byte {
	if !k.Node {
		b = append(b, k.Addr.AsSlice()...)
	}
	b = append(b, byte(k.Proto), 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(b, k.Port), 0, 0)
}

// ParseKey reads what AppendKey wrote for a frontend of family f that is a node
// port or not; rest is what follows.
func ParseKey(b []byte, f svc.Family, node bool) (k dataplane.FrontKey, rest []byte, ok bool) {
	k.Node = node
	if !node {
		n := 4
		if f == svc.IPv6 {
			n = 16
		}
		if len(b) < n {
			return k, nil, false
		}
		k.Addr, _ = netip.AddrFromSlice(b[:n])
		b = b[n:]
	}
	if len(b) < 8 {
		return k, nil, false
	}
	k.Proto, k.Port = svc.Protocol(b[0]), binary.BigEndian.Uint16(b[4:])
	return k, b[8:], true
}

// OwnName names the chains of one frontend. Chain names have no colons.
func OwnName(k dataplane.FrontKey) string {
	name := fmt.Sprintf("%s-%d", strings.ToLower(k.Proto.String()), k.Port)
	if !k.Node {
		name += "-" + strings.ReplaceAll(k.Addr.String(), ":", ".")
	}
	return name
}

// Stale makes err an ErrStale if the kernel rejected a transaction because a table
// is not as it was read.
func Stale(err error) error {
	if nftables.IsConflict(err) {
		return fmt.Errorf("%w: %w", dataplane.ErrStale, err)
	}
	return err
}

// Cleanup removes the tables of a mode, all that it ever wrote. Where there are
// none it does nothing.
func Cleanup(ctx context.Context, mode, name string) error {
	if err := nftables.Remove(ctx, name); err != nil {
		return fmt.Errorf("%s cleanup: %w", mode, err)
	}
	return nil
}
