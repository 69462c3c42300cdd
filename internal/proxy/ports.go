package proxy

import (
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// takenPorts finds node ports that some other process of this machine has bound. Connections from elsewhere reach the Service, which goes before all
// processes; the process does not know why nobody comes any more.
type takenPorts struct {
	// taken says whether a socket of this machine has the address; nil turns
	// it all off.
	taken func(svc.Protocol, netip.AddrPort) bool
}

// look returns a problem for each node port that is new in now and taken.
func (p *takenPorts) look(before, now *table.Table, changed []table.Key) []serviceProblem {
	if p.taken == nil {
		return nil
	}
	var out []serviceProblem
	for _, k := range changed {
		next := now.Get(k)
		if next == nil || next.Protocol == svc.SCTP {
			continue
		}
		var old *table.ServicePort
		if before != nil {
			old = before.Get(k)
		}
		for i := range next.Frontends {
			f := &next.Frontends[i]
			if f.Kind != table.NodePort || frontendOf(old, next.Protocol, f) != nil {
				continue
			}
			for _, at := range addresses(now, f) {
				if p.taken(next.Protocol, at) {
					out = append(out, serviceProblem{k.ID.Name, "NodePortInUse", fmt.Errorf(
						"another process of this node has bound %s/%s; what is sent to this node port reaches the Service, not that process: stop it or let it use another port", at, next.Protocol)})
					break
				}
			}
		}
	}
	return out
}
