package front

import (
	"net/netip"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// gateways are the Gateways that the server has, as a controller asks for them before it calls one programmed.
type gateways struct {
	mu       *sync.Mutex // the Front's
	services map[svc.Name]*service
	known    bool // what exists has been read
}

// Gateways returns the Gateways that this node serves, nil before it knows which there are.
func (g *gateways) Gateways() *v1.ServedGateways {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.known {
		return nil
	}
	out := &v1.ServedGateways{}
	for _, s := range g.services {
		if s.served.version == "" {
			continue
		}
		one := v1.ServedGateway{Name: s.served.gateway, Version: s.served.version}
		for _, a := range s.served.addrs {
			one.Addresses = append(one.Addresses, a.String())
		}
		out.Served = append(out.Served, one)
	}
	slices.SortFunc(out.Served, func(a, b v1.ServedGateway) int { return strings.Compare(a.Name, b.Name) })
	out.More = len(out.Served) > v1.MaxGateways
	out.Served = out.Served[:min(len(out.Served), v1.MaxGateways)]
	return out
}

// listeners are the listeners of a Gateway that are served.
type listeners struct {
	gateway string // namespace/name
	version string // of watch.State.Versions, empty for none
	addrs   []netip.Addr
}

// noteLocked records what the server has of a Service of a Gateway, if that is all that it should have, and reports whether it differs.
func (g *gateways) noteLocked(r *routing, s *service, whole bool) (changed bool) {
	owner := metav1.GetControllerOf(s.object)
	if !isRouted(s.object) || owner == nil || s.built == nil || !whole {
		return false // the server still has the version before
	}
	name := svc.Name{Namespace: s.object.Namespace, Name: owner.Name}
	now := listeners{name.String(), r.state.Versions[name], s.built.Addrs}
	changed = now.version != s.served.version || !slices.Equal(now.addrs, s.served.addrs)
	s.served = now
	return changed
}
