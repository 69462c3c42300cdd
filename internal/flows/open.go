package flows

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
)

// MaxClients bounds the clients that are named for a port, and maxKnown the clients that one read keeps apart.
const (
	MaxClients = 10
	maxKnown   = 20_000
)

// Open are the connections to a Service that connection tracking has now and that are not closed, in every mode: also of IPVS if
// net.ipv4.vs.conntrack is on, and flows of UDP until they are forgotten.
type Open struct {
	Connections uint64 `json:"connections"`
	// Sent is from clients, Received what they got; 0 unless the node counts it. What a connection carried is gone with it.
	Sent     conntrack.Traffic `json:"sent"`
	Received conntrack.Traffic `json:"received"`
}

// Add adds up what nodes have; o may be nil.
func (o *Open) Add(more *Open) *Open {
	switch {
	case more == nil:
		return o
	case o == nil:
		o = &Open{}
	}
	return &Open{
		Connections: o.Connections + more.Connections,
		Sent:        sum(o.Sent, more.Sent), Received: sum(o.Received, more.Received),
	}
}

// Bytes adds up both directions.
func (o *Open) Bytes() uint64 {
	if o == nil {
		return 0
	}
	return o.Sent.Bytes + o.Received.Bytes
}

func sum(a, b conntrack.Traffic) conntrack.Traffic {
	return conntrack.Traffic{Packets: a.Packets + b.Packets, Bytes: a.Bytes + b.Bytes}
}

// Client is a client of a port, with its connections.
type Client struct {
	Address string `json:"address"`
	Open
}

// openKey is a port with an endpoint, a client, or neither.
type openKey struct {
	port     portKey
	endpoint netip.AddrPort
	client   netip.Addr
}

// open adds the connections that are tracked now to a report, also for ports that have no other counts.
func (r *Reader) open(ctx context.Context, to *Report, clients bool) error {
	owners := r.owners.Owners()
	if owners == nil {
		return nil
	}
	found, err := r.found(ctx, owners, clients)
	if err != nil {
		return err
	}
	all := map[portKey]*Port{}
	for i := range to.Ports {
		p := &to.Ports[i]
		p.Open = &Open{}
		all[keyOf(p)] = p
	}
	for k, o := range found {
		p := all[k.port]
		if p == nil {
			p = newPort(k.port)
			p.Open = &Open{}
			all[k.port] = p
		}
		switch {
		case k.endpoint.IsValid():
			// In mode userspace the kernel's endpoint is the proxy's own port.
			if e := p.endpoint(k.endpoint.String()); e != nil {
				e.Open = o
			} else if owners.HasEndpoint(k.port.id, k.endpoint) {
				p.Endpoints = append(p.Endpoints, Endpoint{Address: k.endpoint.String(), Open: o})
			}
		case k.client.IsValid():
			p.Clients = append(p.Clients, Client{k.client.String(), *o})
		default:
			p.Open = o
		}
	}
	out := make([]Port, 0, len(all))
	for _, p := range all {
		slices.SortFunc(p.Endpoints, func(a, b Endpoint) int { return strings.Compare(a.Address, b.Address) })
		p.Clients = TopClients(p.Clients)
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b Port) int { return a.Compare(&b) })
	to.Ports, to.CountsBytes = out, r.counts()
	return nil
}

// TopClients sorts clients, and returns the first MaxClients.
func TopClients(list []Client) []Client {
	slices.SortFunc(list, func(a, b Client) int {
		return cmp.Or(cmp.Compare(b.Connections, a.Connections), cmp.Compare(b.Bytes(), a.Bytes()), strings.Compare(a.Address, b.Address))
	})
	return list[:min(len(list), MaxClients)]
}

// found adds up the connections by port, endpoint and client.
func (r *Reader) found(ctx context.Context, owners *dataplane.Owners, clients bool) (map[openKey]*Open, error) {
	found, known := map[openKey]*Open{}, 0
	add := func(k openKey, u *conntrack.Usage) {
		o := found[k]
		if o == nil {
			if k.client.IsValid() {
				if known++; known > maxKnown {
					return
				}
			}
			o = &Open{}
			found[k] = o
		}
		o.Connections++
		o.Sent, o.Received = sum(o.Sent, u.Sent), sum(o.Received, u.Received)
	}
	err := r.usage(ctx, func(u *conntrack.Usage) {
		id, ok := owners.Of(u.Protocol, u.OrigDst)
		if !ok || u.Closed {
			return
		}
		k := portKey{id, u.Protocol}
		add(openKey{port: k}, u)
		if u.ReplySrc != u.OrigDst {
			add(openKey{port: k, endpoint: u.ReplySrc}, u)
		}
		if clients {
			add(openKey{port: k, client: u.Client}, u)
		}
	})
	return found, err
}

func keyOf(p *Port) portKey {
	protocol, err := svc.ParseProtocol(p.Protocol)
	if err != nil {
		return portKey{}
	}
	return portKey{svc.PortName{Name: svc.Name{Namespace: p.Namespace, Name: p.Service}, Port: p.Port}, protocol}
}

// endpoint finds an endpoint by its address, nil if there is none.
func (p *Port) endpoint(address string) *Endpoint {
	for i := range p.Endpoints {
		if p.Endpoints[i].Address == address {
			return &p.Endpoints[i]
		}
	}
	return nil
}
