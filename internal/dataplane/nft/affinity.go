package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// Clients calls f for each client that the tables of the calling thread's network namespace keep at an endpoint, first for
// addresses and then for node ports, until f returns an error.
func Clients(ctx context.Context, f func(dataplane.Kept) error) error {
	return eachMemory(func(m *memory) error {
		all, err := m.clients()
		for i := 0; i < len(all) && err == nil; i++ {
			err = errors.Join(ctx.Err(), f(all[i]))
		}
		return err
	})
}

// Keep has these tables keep clients at endpoints, for as long as if they had connected now. A client that is kept already stays where
// it is.
func Keep(ctx context.Context, clients dataplane.ClientsOf) error {
	return eachMemory(func(m *memory) error {
		fronts, err := m.fronts()
		if err != nil {
			return err
		}
		left := stickySize / 2 // others come
		for k, f := range fronts {
			of, err := clients.Latest(ctx, f.port, k.Proto, maps.Keys(f.endpoints))
			if err != nil {
				return err
			}
			if left -= len(of); left < 0 {
				return fmt.Errorf("there are more than %d clients", stickySize/2)
			}
			at := map[netip.AddrPort][]netip.Addr{}
			for client, visit := range of {
				at[visit.At] = append(at[visit.At], client)
			}
			for endpoint, all := range at {
				if err := m.keep(k, f, endpoint, all); err != nil {
					return fmt.Errorf("%s %s: %w", f.port, k, err)
				}
			}
		}
		return nil
	})
}

// memory is where a table keeps the endpoints of clients, of virtual IPs or of node ports.
type memory struct {
	*layout
	sets
	conn *nftables.Conn
	node bool
	name string
}

// eachMemory calls f with each memory. One that fails does not keep the others from it.
func eachMemory(f func(*memory) error) error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	var errs []error
	for _, family := range []svc.Family{svc.IPv4, svc.IPv6} {
		l := newLayout(family, &Config{})
		comment, there, err := c.Table(l.table) // not its rules, which can be many
		if err != nil {
			return err
		}
		if !there || comment != schema {
			continue
		}
		for _, m := range []memory{{name: setSticky}, {name: setNodeSticky, node: true}} {
			m.layout, m.sets, m.conn = l, setsOf(m.node), c
			if err := f(&m); err != nil {
				errs = append(errs, fmt.Errorf("map %s of table %s: %w", m.name, l.table, err))
			}
		}
	}
	return errors.Join(errs...)
}

// clients reads the clients, with the ports whose frontends are still there.
func (m *memory) clients() ([]dataplane.Kept, error) {
	byFront := map[dataplane.FrontKey][]dataplane.Kept{}
	err := m.conn.Elems(m.table, m.name, func() { clear(byFront) }, func(e nftables.Elem) {
		k, rest, ok1 := tables.ParseKey(e.Key, m.family, m.node)
		client, ok2 := netip.AddrFromSlice(rest)
		if at, ok := m.stickyEndpoint(e.Data); ok && ok1 && ok2 {
			byFront[k] = append(byFront[k], dataplane.Kept{Protocol: k.Proto, Client: client, Endpoint: at})
		}
	})
	if err != nil {
		return nil, err
	}
	var out []dataplane.Kept
	err = m.vip(byFrontKeys(byFront), func(k dataplane.FrontKey, port svc.PortName, _ uint32) {
		for _, kept := range byFront[k] {
			kept.Port = port
			out = append(out, kept)
		}
	})
	return out, err
}

// stickyFront is a frontend with affinity.
type stickyFront struct {
	port      svc.PortName
	target    uint32 // the key of the chain that it leads to
	seconds   uint64
	endpoints map[netip.AddrPort]bool
}

// fronts reads the frontends with affinity.
func (m *memory) fronts() (map[dataplane.FrontKey]*stickyFront, error) {
	out := map[dataplane.FrontKey]*stickyFront{}
	err := m.conn.Elems(m.table, m.slots(true), func() { clear(out) }, func(e nftables.Elem) {
		k, _, ok1 := tables.ParseKey(e.Key, m.family, m.node)
		if at, ok := m.stickyEndpoint(e.Data); ok && ok1 {
			if out[k] == nil {
				out[k] = &stickyFront{endpoints: map[netip.AddrPort]bool{}}
			}
			out[k].endpoints[at] = true
		}
	})
	if err != nil {
		return nil, err
	}
	byTarget := map[uint32][]*stickyFront{}
	err = m.vip(byFrontKeys(out), func(k dataplane.FrontKey, port svc.PortName, target uint32) {
		f := out[k]
		f.port, f.target = port, target
		byTarget[target] = append(byTarget[target], f)
	})
	if err != nil {
		return nil, err
	}
	var ids [][]byte
	for id := range byTarget {
		ids = append(ids, appendMark(nil, id))
	}
	err = m.conn.Get(m.table, setTargets, ids, func(e nftables.Elem) {
		_, rest, ok := strings.Cut(e.Goto, "sticky-") // sticky-SECONDS-N
		var seconds uint64
		if _, err := fmt.Sscanf(rest, "%d-", &seconds); !ok || err != nil || len(e.Key) < 4 {
			return
		}
		for _, f := range byTarget[binary.NativeEndian.Uint32(e.Key)] {
			f.seconds = seconds
		}
	})
	for k, f := range out { // it has just gone
		if f.seconds == 0 {
			delete(out, k)
		}
	}
	return out, err
}

// vip calls f for each frontend of some that is there.
func (m *memory) vip(keys [][]byte, f func(k dataplane.FrontKey, port svc.PortName, target uint32)) error {
	return m.conn.Get(m.table, m.vips, keys, func(e nftables.Elem) {
		port, err := svc.ParsePortName(e.Comment)
		if k, _, ok := tables.ParseKey(e.Key, m.family, m.node); ok && err == nil && len(e.Data) == 8 {
			f(k, port, binary.NativeEndian.Uint32(e.Data[4:]))
		}
	})
}

func byFrontKeys[V any](of map[dataplane.FrontKey]V) [][]byte {
	var keys [][]byte
	for k := range of {
		keys = append(keys, tables.AppendKey(nil, k))
	}
	return keys
}

// stickyEndpoint reads the data of elements with an endpoint of affinity.
func (l *layout) stickyEndpoint(data []byte) (netip.AddrPort, bool) {
	if len(data) < 4 {
		return netip.AddrPort{}, false
	}
	return l.parseEndpoint(data[4:])
}

// keep adds clients of an endpoint of a frontend: all at once, and one by one if some are there.
func (m *memory) keep(k dataplane.FrontKey, f *stickyFront, at netip.AddrPort, clients []netip.Addr) error {
	const atOnce = 1000
	for len(clients) > 0 {
		part := clients[:min(atOnce, len(clients))]
		clients = clients[len(part):]
		err := m.add(k, f, at, part...)
		if !nftables.IsConflict(err) {
			if err != nil {
				return err
			}
			continue
		}
		for _, client := range part {
			if err := m.add(k, f, at, client); err != nil && !nftables.IsConflict(err) {
				return err
			}
		}
	}
	return nil
}

func (m *memory) add(k dataplane.FrontKey, f *stickyFront, at netip.AddrPort, clients ...netip.Addr) error {
	b := nftables.NewBatch()
	for _, client := range clients {
		b.AddElem(m.table, m.name, &nftables.Elem{
			Key: append(tables.AppendKey(nil, k), client.AsSlice()...), Data: slotData(at, true), Timeout: f.seconds * 1000,
		})
	}
	return m.conn.Commit(b)
}
