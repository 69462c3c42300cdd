package capture

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/kernel/nflog"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// frontendOf returns the frontend of a port that packets to an address meet, nil if it has none.
func frontendOf(t *table.Table, id svc.PortName, to netip.AddrPort) *table.Frontend {
	p := t.Get(table.Key{ID: id, Family: svc.FamilyOf(to.Addr())})
	if p == nil {
		return nil
	}
	for i := range p.Frontends {
		f := &p.Frontends[i]
		if f.Addr == to || f.Addr.Addr().IsUnspecified() && f.Addr.Port() == to.Port() {
			return f
		}
	}
	return nil
}

// reasonOf returns why a packet has reached no endpoint: by what is programmed, and the port of a Service that it was sent to, which
// is empty if no Service has the address, and has no name if the Service has no such port.
func reasonOf(t *table.Table, id svc.PortName, p *nflog.Packet) (flow.DropReason, string) {
	if id == (svc.PortName{}) || t == nil {
		return flow.DropReason_STALE_OR_UNROUTABLE_IP, "no Service has the address"
	}
	f := frontendOf(t, id, p.Destination)
	switch {
	case f == nil:
		return flow.DropReason_SERVICE_BACKEND_NOT_FOUND, fmt.Sprintf("Service %s has no port %d/%s", id.Name, p.Destination.Port(), p.Protocol)
	case f.SourceRanges != nil && !slices.ContainsFunc(f.SourceRanges, func(r netip.Prefix) bool { return r.Contains(p.Source.Addr()) }):
		return flow.DropReason_DENIED_BY_LB_SRC_RANGE_CHECK, fmt.Sprintf("Service %s: no source range has the client", id.Name)
	case f.Drop:
		return flow.DropReason_SERVICE_BACKEND_NOT_FOUND, fmt.Sprintf("Service %s has no endpoint on this node, and its policy is Local", id.Name)
	case len(f.Endpoints) == 0:
		return flow.DropReason_SERVICE_BACKEND_NOT_FOUND, fmt.Sprintf("Service %s has no endpoint", id.Name)
	}
	return flow.DropReason_SERVICE_BACKEND_NOT_FOUND, fmt.Sprintf("Service %s: its endpoints changed in this moment", id.Name)
}
