package nft

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// The sets that count connections by endpoint and frontend, in the order in which rules have both in their registers.
const (
	setServed       = "served"
	setStickyServed = "sticky-served"
	setNodeServed   = "node-served"
)

const (
	// servedSize bounds the counted pairs of endpoint and frontend in each set: connections of further pairs are not
	// counted. The kernel lets a set be read in time that grows with its square: 50 ms of it for this many.
	servedSize = 1 << 14
	// servedLifetime is how long a pair without connections is remembered.
	servedLifetime = 24 * time.Hour
)

// servedSets are filled by the first packets of connections, so that their size follows what is in use, and no change of
// a Service touches a counter.
func servedSets(l *layout) []nftables.Set {
	const proto, port, mark = nftables.TypeProto, nftables.TypePort, nftables.TypeMark
	a := l.Addr
	return []nftables.Set{
		{Name: setServed, Key: []nftables.Type{a, a, port, proto, port}, Dynamic: true, Size: servedSize,
			Comment: "address of the frontend . endpoint . protocol . port : connections"},
		{Name: setStickyServed, Key: []nftables.Type{a, port, a, proto, port}, Dynamic: true, Size: servedSize,
			Comment: "endpoint . frontend with affinity : connections"},
		{Name: setNodeServed, Key: []nftables.Type{mark, a, port, proto, port}, Dynamic: true, Size: servedSize,
			Comment: "0 . endpoint . node port : connections"},
	}
}

// count counts a connection by the registers from key on. A rule ends there if there is no room for another pair: the next one
// must serve the connection without it.
func count(p *nftables.Program, set string, key nftables.Reg) *nftables.Program {
	return p.Count(set, key, uint64(servedLifetime.Milliseconds()))
}

func servedSet(node, sticky bool) string {
	switch {
	case node:
		return setNodeServed
	case sticky:
		return setStickyServed
	}
	return setServed
}

// served reads the counts, by a connection of its own: others than the user of the Mode ask for them.
type served struct {
	mu   sync.Mutex
	conn *nftables.Conn // nil after close
}

func openServed() (*served, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	return &served{conn: c}, nil
}

func (s *served) close() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return nil
	}
	err := s.conn.Close()
	s.conn = nil
	return err
}

var _ dataplane.ServedCounter = (*Mode)(nil)

// Served is dataplane.ServedCounter's. It reads three sets for each family, whatever the number of Services.
func (m *Mode) Served(ctx context.Context) ([]dataplane.ServedCount, error) {
	s := m.served
	if s == nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return nil, nil
	}
	var out []dataplane.ServedCount
	for _, t := range m.targets {
		for _, set := range servedSets(t.layout) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			from := len(out)
			begin := func() { out = out[:from] }
			err := s.conn.Elems(t.layout.table, set.Name, begin, func(e nftables.Elem) {
				if c, ok := servedCount(t.layout, &e, set.Name); ok {
					out = append(out, c)
				}
			})
			if err != nil {
				return nil, fmt.Errorf("nft %s: read the counts of connections: %w", t.layout.table, err)
			}
		}
	}
	return out, nil
}

// servedCount reads an element of a set of counts.
func servedCount(l *layout, e *nftables.Elem, set string) (c dataplane.ServedCount, ok bool) {
	n := int(l.Len)
	var ep, front []byte
	switch want := 2*n + 12; {
	case set == setNodeServed && len(e.Key) == n+16:
		ep, front = e.Key[4:n+8], e.Key[n+8:]
	case set == setStickyServed && len(e.Key) == want:
		ep, front = e.Key[:n+4], e.Key[n+4:]
	case set == setServed && len(e.Key) == want:
		ep, front = e.Key[n:2*n+4], slices.Concat(e.Key[:n], e.Key[2*n+4:])
	default:
		return c, false
	}
	at, ok := l.parseEndpoint(ep)
	k, _, ok2 := tables.ParseKey(front, l.family, set == setNodeServed)
	if !ok || !ok2 {
		return c, false
	}
	to := netip.AddrPortFrom(k.Addr, k.Port)
	if k.Node {
		to = netip.AddrPortFrom(unspecified(l.Len), k.Port)
	}
	return dataplane.ServedCount{Protocol: k.Proto, NodePort: k.Node, To: to, Endpoint: at, Connections: e.Packets}, true
}

func unspecified(n uint32) netip.Addr {
	if n == 4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
