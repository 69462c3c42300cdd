package dataplane

import (
	"context"
	"errors"
	"iter"
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
)

// Kept is a client with session affinity that rules keep at an endpoint of a port.
type Kept struct {
	Port     svc.PortName
	Protocol svc.Protocol
	Client   netip.Addr
	Endpoint netip.AddrPort
}

// ClientsOf returns the clients that a program keeps at an endpoint of a port, each with a number that is higher for one that came later.
type ClientsOf func(id svc.PortName, p svc.Protocol, at netip.AddrPort) (map[netip.Addr]uint64, error)

// Visit is where a client came last, and the number of that time.
type Visit struct {
	At   netip.AddrPort
	Seen uint64
}

// Latest returns where each client of some endpoints of a port came last.
func (of ClientsOf) Latest(
	ctx context.Context, id svc.PortName, p svc.Protocol, endpoints iter.Seq[netip.AddrPort],
) (map[netip.Addr]Visit, error) {
	out := map[netip.Addr]Visit{}
	for at := range endpoints {
		all, err := of(id, p, at)
		if err = errors.Join(ctx.Err(), err); err != nil {
			return nil, err
		}
		for client, seen := range all {
			if v, have := out[client]; !have || seen > v.Seen {
				out[client] = Visit{at, seen}
			}
		}
	}
	return out, nil
}
