package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// Look is dataplane.Looker's. It reads single elements by their keys, so that its cost does
// not depend on the number of Services; only source ranges need the rules of the table.
func (m *Mode) Look(ctx context.Context, fronts []dataplane.Asked, client netip.Addr) ([]dataplane.Installed, error) {
	m.looks.mu.Lock()
	defer m.looks.mu.Unlock()
	if m.looks.conn == nil {
		return nil, errors.New("nft: the mode has ended")
	}
	out := make([]dataplane.Installed, len(fronts))
	for i, a := range fronts {
		out[i].Front = a.String()
		for _, t := range m.targets {
			if t.layout.family != a.Family {
				continue
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if err := t.look(m.looks.conn, a.FrontKey, client, &out[i]); err != nil {
				return nil, fmt.Errorf("nft %s: read %s: %w", t.layout.table, a, err)
			}
		}
	}
	return out, nil
}

// looked is what one frontend leads to, on the way of a packet.
type looked struct {
	*target
	dataplane.FrontKey
	kernel   kernel
	in       sets
	base     []byte
	size, id uint32
	chain    string
}

func (t *target) look(from kernel, k dataplane.FrontKey, client netip.Addr, to *dataplane.Installed) error {
	l := &looked{target: t, FrontKey: k, kernel: from, in: setsOf(k.Node), base: tables.AppendKey(nil, k)}
	if err := l.entry(to); err != nil || !to.Present {
		return err
	}
	for list := range 2 {
		endpoints, err := l.slots(list, to)
		if err != nil {
			return err
		}
		fate := dataplane.NewFate(endpoints, list == 0 && strings.HasSuffix(l.chain, chainDrop))
		switch {
		case list == 0:
			to.Outside = fate
		case strings.Contains(l.chain, "inside-"):
			to.Inside = &fate
		}
	}
	if strings.Contains(l.chain, "allow-") {
		if err := l.allowed(to); err != nil {
			return err
		}
	}
	return l.kept(client, to)
}

// entry reads the frontend's own element, and the chain that it leads to.
func (l *looked) entry(to *dataplane.Installed) error {
	table := l.layout.table
	err := l.kernel.Get(table, l.in.vips, [][]byte{l.base}, func(e nftables.Elem) {
		if len(e.Data) != 8 {
			return
		}
		to.Present = true
		l.size, l.id = binary.NativeEndian.Uint32(e.Data), binary.NativeEndian.Uint32(e.Data[4:])
		text := fmt.Sprintf("%s, %d endpoints, target %d", e.Comment, l.size&0xffff, l.id)
		if n := l.size >> 16; n > 0 {
			text += fmt.Sprintf(", %d for clients inside", n)
		}
		to.Says(l.element(l.in.vips, l.String()), text)
	})
	if err != nil {
		return err
	}
	if !to.Present {
		to.Says(l.element(l.in.vips, l.String()), "no such element")
		return nil
	}
	err = l.kernel.Get(table, setTargets, [][]byte{appendMark(nil, l.id)}, func(e nftables.Elem) { l.chain = e.Goto })
	if err != nil {
		return err
	}
	if l.chain == "" {
		to.Present = false
		to.Says(l.element(setTargets, fmt.Sprint(l.id)), "no such element: the frontend leads nowhere")
		return nil
	}
	to.Says(l.element(setTargets, fmt.Sprint(l.id)), "goto chain "+l.chain)
	return nil
}

func (l *looked) element(set, key string) string {
	return fmt.Sprintf("%s map %s { %s }", l.layout.table, set, key)
}

// slots reads the endpoints of a list. One that is missing is a line of the proof, and
// takes its share of the connections: they are dropped.
func (l *looked) slots(list int, to *dataplane.Installed) ([]netip.AddrPort, error) {
	n := l.size & 0xffff
	if list == 1 {
		n = l.size >> 16
	}
	sticky := strings.Contains(l.chain, "sticky-")
	set := l.in.slots(sticky)
	keys := make([][]byte, 0, n)
	for slot := range n {
		keys = append(keys, appendMark(append([]byte(nil), l.base...), uint32(list*localList)+slot))
	}
	found := map[uint32]netip.AddrPort{}
	err := l.kernel.Get(l.layout.table, set, keys, func(e nftables.Elem) {
		data := e.Data
		if sticky && len(data) > 4 {
			data = data[4:]
		}
		if a, ok := l.layout.parseEndpoint(data); ok && len(e.Key) >= 4 {
			found[binary.NativeEndian.Uint32(e.Key[len(e.Key)-4:])-uint32(list*localList)] = a
		}
	})
	if err != nil {
		return nil, err
	}
	var out []netip.AddrPort
	for slot := range n {
		name := l.element(set, fmt.Sprintf("%s, slot %d", l, uint32(list*localList)+slot))
		a, there := found[slot]
		if !there {
			to.Holes++
			to.Says(name, "no such element: its share of connections is dropped")
			continue
		}
		to.Says(name, a.String())
		out = append(out, a)
	}
	return out, nil
}

// allowed reads the clients that the frontend's own chain lets in.
func (l *looked) allowed(to *dataplane.Installed) error {
	rules, err := l.kernel.Rules(l.layout.table)
	if err != nil {
		return err
	}
	to.Limited = true
	for _, r := range rules[l.chain] {
		to.Says(fmt.Sprintf("%s chain %s", l.layout.table, l.chain), r.Text)
		at := strings.LastIndex(r.Text, " saddr ") // "fib saddr type local" may stand before it
		if at < 0 {
			continue
		}
		text, _, _ := strings.Cut(r.Text[at+len(" saddr "):], " ")
		if p, err := netip.ParsePrefix(text); err == nil {
			to.Allow = append(to.Allow, p)
		} else if a, err := netip.ParseAddr(text); err == nil {
			to.Allow = append(to.Allow, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return nil
}

// kept reads which endpoint a client is kept at.
func (l *looked) kept(client netip.Addr, to *dataplane.Installed) error {
	if !client.IsValid() || svc.FamilyOf(client) != l.layout.family || !strings.Contains(l.chain, "sticky-") {
		return nil
	}
	set := setSticky
	if l.Node {
		set = setNodeSticky
	}
	key := append(append([]byte(nil), l.base...), client.AsSlice()...)
	return l.kernel.Get(l.layout.table, set, [][]byte{key}, func(e nftables.Elem) {
		if len(e.Data) < 4 {
			return
		}
		if a, ok := l.layout.parseEndpoint(e.Data[4:]); ok {
			to.Kept = a
			to.Says(l.element(set, fmt.Sprintf("%s, client %s", l, client)), a.String())
		}
	})
}

var _ dataplane.Looker = (*Mode)(nil)
