package nft

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// The sets that count connections by endpoint and frontend.
const (
	setServed     = "served"
	setNodeServed = "node-served"
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
	const proto, port = nftables.TypeProto, nftables.TypePort
	a := l.Addr
	return []nftables.Set{
		{Name: setServed, Key: []nftables.Type{a, port, a, proto, port}, Dynamic: true, Size: servedSize,
			Comment: "endpoint . frontend : connections"},
		{Name: setNodeServed, Key: []nftables.Type{a, port, proto, port}, Dynamic: true, Size: servedSize,
			Comment: "endpoint . node port : connections"},
	}
}

// counting counts the connections that were sent to an endpoint, where they leave for it: a chain of NAT meets only the first
// packet of a connection. Nothing is chosen any more there. A rule that counts ends if its set has no room for another pair,
// and so must not be one that chooses: a second choice would prefer the endpoints that are counted.
//
// What others have translated is not of a frontend, and not counted.
func (l *layout) counting() []nftables.Rule {
	a := l.Regs()
	other := new(nftables.Program).Conntrack(0, nftables.CtStatus).
		Mask(0, nftables.Uint32(nftables.CtStatusDNAT), nftables.Uint32(0)).Equal(0, nftables.Uint32(0)).Return()
	const lifetime = uint64(servedLifetime / time.Millisecond)
	endpoint := func(p *nftables.Program) *nftables.Program {
		return p.Network(0, l.Destination, l.Len).Port(a, nftables.Destination)
	}
	address := func(p *nftables.Program, to nftables.Reg) *nftables.Program {
		return nftables.OriginalAddress(p, l.table.Family, to)
	}
	port := func(p *nftables.Program, to nftables.Reg) *nftables.Program {
		return nftables.OriginalPort(p.Meta(to, nftables.MetaL4Proto), to+1)
	}
	vip := address(endpoint(new(nftables.Program)), a+1)
	port(vip, 2*a+1).Map(setVIPs, a+1, 2*a+3).Count(setServed, 0, lifetime).Return()
	node := endpoint(address(new(nftables.Program), 0).InSet(setNodeAddresses, 0))
	port(node, a+1).Map(setNodePorts, a+1, a+3).Count(setNodeServed, 0, lifetime).Return()
	return []nftables.Rule{
		nftables.NewRule(other, "ct status & dnat == 0 return"),
		commented(vip, "a frontend in @vips: count the connection in @%s, return", setServed),
		commented(node, "a node port in @node-ports: count the connection in @%s, return", setNodeServed),
	}
}

// served reads the counts, by a connection of its own: others than the user of the Mode ask for them.
type served struct {
	mu   sync.Mutex
	conn elems // nil after close
}

// elems is what served needs of nftables.Conn.
type elems interface {
	Elems(t nftables.Table, set string, begin func(), f func(nftables.Elem)) error
	Close() error
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

// Served is dataplane.ServedCounter's. It reads two sets for each family, whatever the number of Services.
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
			// The kernel may list an element twice while the set grows: the last one counts.
			found := map[string]dataplane.ServedCount{}
			err := s.conn.Elems(t.layout.table, set.Name, func() { clear(found) }, func(e nftables.Elem) {
				if c, ok := servedCount(t.layout, &e, set.Name); ok {
					found[string(e.Key)] = c
				}
			})
			if err != nil {
				return nil, fmt.Errorf("nft %s: read the counts of connections: %w", t.layout.table, err)
			}
			out = slices.AppendSeq(out, maps.Values(found))
		}
	}
	return out, nil
}

// servedCount reads an element of a set of counts.
func servedCount(l *layout, e *nftables.Elem, set string) (c dataplane.ServedCount, ok bool) {
	n, node := int(l.Len), set == setNodeServed
	want := 2*n + 12
	if node {
		want = n + 12
	}
	if len(e.Key) != want {
		return c, false
	}
	ep, front := e.Key[:n+4], e.Key[n+4:]
	at, ok := l.parseEndpoint(ep)
	k, _, ok2 := tables.ParseKey(front, l.family, node)
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
