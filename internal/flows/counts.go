// Package flows counts connections to each Service port and endpoint.
package flows

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Port is what a node has counted for one port of a Service, since it began to count. Its JSON form is meant for programs:
// fields are only ever added.
type Port struct {
	Namespace string `json:"namespace"`
	Service   string `json:"service"`
	// Port is the name of the port. Packets to ports that the Service does not have are counted without one.
	Port     string `json:"port"`
	Protocol string `json:"protocol"`
	// Connections counts the connections sent to an endpoint.
	Connections uint64 `json:"connections"`
	// Refused and Dropped are packets that reached no endpoint.
	Refused uint64 `json:"refusedPackets"`
	Dropped uint64 `json:"droppedPackets"`
	// Endpoints have had connections, and are sorted by address.
	Endpoints []Endpoint `json:"endpoints"`
}

// Endpoint is an endpoint of a Port.
type Endpoint struct {
	Address     string `json:"address"`
	Connections uint64 `json:"connections"`
}

// Report is what a node answers when it is asked for its counts.
type Report struct {
	// CountsConnections is false in modes that count only what they refuse and drop.
	CountsConnections bool   `json:"countsConnections"`
	Ports             []Port `json:"ports"`
}

// Compare orders Ports by namespace, Service, port and protocol.
func (p *Port) Compare(o *Port) int {
	return slices.Compare([]string{p.Namespace, p.Service, p.Port, p.Protocol}, []string{o.Namespace, o.Service, o.Port, o.Protocol})
}

// Reader reads the counts of a data plane. It is safe for concurrent use.
type Reader struct {
	served dataplane.ServedCounter // nil: the mode does not count connections
	lost   dataplane.Counter       // nil: nor what it drops
	table  func() *table.Table     // the one programmed, nil before there is one

	mu     sync.Mutex
	of     *table.Table // the one that owners indexes
	owners *dataplane.Owners
}

// NewReader returns a Reader of what a has, whose Table is that of programmed.
func NewReader(a dataplane.Applier, programmed func() *table.Table) *Reader {
	r := &Reader{table: programmed}
	r.served, _ = a.(dataplane.ServedCounter)
	r.lost, _ = a.(dataplane.Counter)
	return r
}

// CountsConnections reports whether the mode counts connections, not only what it refuses and drops.
func (r *Reader) CountsConnections() bool { return r.served != nil }

// Owners returns the Service ports by where clients send to; nil before the first Table is programmed.
func (r *Reader) Owners() *dataplane.Owners {
	t := r.table()
	if t == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of != t {
		r.of, r.owners = t, dataplane.OwnersOf(t)
	}
	return r.owners
}

// Ports returns the counts of every port with one, sorted. Destinations that no Service has any more are left out.
func (r *Reader) Ports(ctx context.Context) ([]Port, error) {
	var served []dataplane.ServedCount
	var lost []dataplane.DropCount
	var err error
	if r.served != nil {
		if served, err = r.served.Served(ctx); err != nil {
			return nil, err
		}
	}
	if r.lost != nil {
		if lost, err = r.lost.Drops(ctx); err != nil {
			return nil, err
		}
	}
	if len(served)+len(lost) == 0 {
		return []Port{}, nil
	}
	owners := r.Owners()
	if owners == nil {
		return []Port{}, nil
	}
	return count(owners, served, lost), nil
}

// Report returns the counts as an answer.
func (r *Reader) Report(ctx context.Context) (*Report, error) {
	ports, err := r.Ports(ctx)
	if err != nil {
		return nil, err
	}
	return &Report{CountsConnections: r.CountsConnections(), Ports: ports}, nil
}

type portKey struct {
	id       svc.PortName
	protocol svc.Protocol
}

// count adds up what was counted by destination.
func count(owners *dataplane.Owners, served []dataplane.ServedCount, lost []dataplane.DropCount) []Port {
	ports := map[portKey]*Port{}
	endpoints := map[portKey]map[string]uint64{}
	at := func(id svc.PortName, p svc.Protocol) (*Port, map[string]uint64) {
		k := portKey{id, p}
		if ports[k] == nil {
			ports[k] = &Port{Namespace: id.Namespace, Service: id.Name.Name, Port: id.Port, Protocol: p.String(), Endpoints: []Endpoint{}}
			endpoints[k] = map[string]uint64{}
		}
		return ports[k], endpoints[k]
	}
	for _, c := range served {
		if id, ok := owners.Of(c.Protocol, c.To); ok {
			p, list := at(id, c.Protocol)
			p.Connections += c.Connections
			list[c.Endpoint.String()] += c.Connections
		}
	}
	for _, c := range lost {
		if id, ok := owners.Of(c.Protocol, c.To); ok {
			p, _ := at(id, c.Protocol)
			p.Refused += c.Rejected
			p.Dropped += c.Dropped
		}
	}
	out := make([]Port, 0, len(ports))
	for k, p := range ports {
		for a, n := range endpoints[k] {
			p.Endpoints = append(p.Endpoints, Endpoint{a, n})
		}
		slices.SortFunc(p.Endpoints, func(a, b Endpoint) int { return strings.Compare(a.Address, b.Address) })
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b Port) int { return a.Compare(&b) })
	return out
}
