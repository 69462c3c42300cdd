package proxy

import (
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// takenPorts finds node ports and host ports that another process of this machine has bound.
// Connections from elsewhere reach the Service or Pod, whose rules come before all
// processes, and that process gets no new ones.
type takenPorts struct {
	// taken reports whether a socket of this machine has the address; nil turns
	// the check off.
	taken func(svc.Protocol, netip.AddrPort) bool
}

// find returns a problem for each of them that is new in now and taken.
func (p *takenPorts) find(before, now *table.Table, changed []table.Key) []serviceProblem {
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
			pod, host := table.PodName(k.ID.Name)
			if f.Kind != table.NodePort && !host || frontendOf(old, next.Protocol, f) != nil {
				continue
			}
			for _, at := range now.Destinations(f) {
				if !p.taken(next.Protocol, at) {
					continue
				}
				reason, what := "NodePortInUse", "a node port of this Service"
				if host {
					reason, what = "HostPortInUse", "a host port of Pod "+pod.String()
				}
				out = append(out, serviceProblem{k.ID.Name, reason, fmt.Errorf(
					"another process of this node has bound %s/%s, which is %s and gets its packets: "+
						"stop that process or let it use another port", at, next.Protocol, what)})
				break
			}
		}
	}
	return out
}

func frontendOf(p *table.ServicePort, proto svc.Protocol, like *table.Frontend) *table.Frontend {
	if p == nil || p.Protocol != proto {
		return nil
	}
	for i := range p.Frontends {
		if f := &p.Frontends[i]; f.Addr == like.Addr {
			return f
		}
	}
	return nil
}
