// Package flows counts connections to each Service port and endpoint.
package flows

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
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
	// Endpoints have had connections within a day, and are sorted by address. Connections also counts the ones of other endpoints.
	Endpoints []Endpoint `json:"endpoints"`
	// Open are the connections that are tracked now, nil if the node does not tell.
	Open *Open `json:"open,omitempty"`
	// Clients have the most of Open, at most MaxClients, the first with the most connections; nil if they were not asked for.
	Clients []Client `json:"clients,omitempty"`
}

// Endpoint is an endpoint of a Port.
type Endpoint struct {
	Address     string `json:"address"`
	Connections uint64 `json:"connections"`
	Open        *Open  `json:"open,omitempty"`
}

// Report is what a node answers when it is asked for its counts.
type Report struct {
	// CountsConnections is false in modes that count only what they refuse and drop.
	CountsConnections bool `json:"countsConnections"`
	// CountsBytes reports that the traffic of Open is counted.
	CountsBytes bool `json:"countsBytes,omitempty"`
	// Problem is why Open is not known.
	Problem string `json:"problem,omitempty"`
	Ports   []Port `json:"ports"`
}

// Compare orders Ports by namespace, Service, port and protocol.
func (p *Port) Compare(o *Port) int {
	return slices.Compare([]string{p.Namespace, p.Service, p.Port, p.Protocol}, []string{o.Namespace, o.Service, o.Port, o.Protocol})
}

// Reader reads the counts of a data plane. It is safe for concurrent use.
type Reader struct {
	served dataplane.ServedCounter // nil: the mode does not count connections
	lost   dataplane.Counter       // nil: nor what it drops
	owners *dataplane.OwnerIndex
	usage  func(context.Context, func(*conntrack.Usage)) error // conntrack.EachUsage, unless a test wants another
	counts func() bool                                         // conntrack.Accounting, likewise

	mu     sync.Mutex // held while connections are read, so that reads are added in order
	totals totals
}

// NewReader returns a Reader of what a has, for the Service ports that owners has.
func NewReader(a dataplane.Applier, owners *dataplane.OwnerIndex) *Reader {
	r := &Reader{owners: owners, usage: conntrack.EachUsage, counts: conntrack.Accounting}
	r.served, _ = a.(dataplane.ServedCounter)
	r.lost, _ = a.(dataplane.Counter)
	return r
}

// CountsConnections reports whether the mode counts connections, not only what it refuses and drops.
func (r *Reader) CountsConnections() bool { return r.served != nil }

// Connections returns the connections of every port with some, sorted. They only grow as long as the port exists.
func (r *Reader) Connections(ctx context.Context) ([]Port, error) { return r.read(ctx, nil) }

// Ports returns the counts of every port with one, sorted. Destinations that no Service has any more are left out.
func (r *Reader) Ports(ctx context.Context) ([]Port, error) {
	if r.lost == nil {
		return r.read(ctx, nil)
	}
	lost, err := r.lost.Drops(ctx)
	if err != nil {
		return nil, err
	}
	return r.read(ctx, lost)
}

func (r *Reader) read(ctx context.Context, lost []dataplane.DropCount) ([]Port, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var served []dataplane.ServedCount
	if r.served != nil {
		var err error
		if served, err = r.served.Served(ctx); err != nil {
			return nil, err
		}
	}
	owners := r.owners.Owners()
	if owners == nil {
		return []Port{}, nil
	}
	r.totals.add(owners, served)
	return ports(&r.totals, owners, lost), nil
}

// Report returns the counts as an answer, with the connections that are open. With clients set it also names the clients.
func (r *Reader) Report(ctx context.Context, clients bool) (*Report, error) {
	ports, err := r.Ports(ctx)
	if err != nil {
		return nil, err
	}
	out := &Report{CountsConnections: r.CountsConnections(), Ports: ports}
	if err := r.open(ctx, out, clients); err != nil {
		out.Problem = err.Error()
	}
	return out, nil
}

func newPort(k portKey) *Port {
	return &Port{Namespace: k.id.Namespace, Service: k.id.Name.Name, Port: k.id.Port, Protocol: k.protocol.String(),
		Endpoints: []Endpoint{}}
}

// ports joins the connections with what was lost by destination.
func ports(t *totals, owners *dataplane.Owners, lost []dataplane.DropCount) []Port {
	all := map[portKey]*Port{}
	at := func(k portKey) *Port {
		if all[k] == nil {
			all[k] = newPort(k)
		}
		return all[k]
	}
	for k, n := range t.ports {
		p := at(k)
		p.Connections = n
		for a, n := range t.endpoints[k] {
			p.Endpoints = append(p.Endpoints, Endpoint{Address: a.String(), Connections: n})
		}
		slices.SortFunc(p.Endpoints, func(a, b Endpoint) int { return strings.Compare(a.Address, b.Address) })
	}
	for _, c := range lost {
		if id, ok := owners.Of(c.Protocol, c.To); ok {
			p := at(portKey{id, c.Protocol})
			p.Refused += c.Rejected
			p.Dropped += c.Dropped
		}
	}
	out := make([]Port, 0, len(all))
	for _, p := range all {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b Port) int { return a.Compare(&b) })
	return out
}
