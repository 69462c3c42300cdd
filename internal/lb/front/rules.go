package front

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/svc"
)

// rules are the packet filter of Network Load Balancers, in either way.
type rules struct {
	log     *slog.Logger
	network *Network
	wake    func()
	// dirty is set when the installed rules may differ from the desired ones.
	dirty atomic.Bool
	err   string // the last logged reason why they could not be written; only apply uses it

	services map[svc.Name]*ruledService // the Front's mu guards it
}

// ruledService is a Service of a Network Load Balancer.
type ruledService struct {
	object  *corev1.Service
	clients []netip.Prefix // of its last valid configuration
}

func newRules(log *slog.Logger, wake func()) *rules {
	r := &rules{log: log, wake: wake, services: map[svc.Name]*ruledService{}}
	r.dirty.Store(true) // an earlier process may have left some
	return r
}

// setLocked takes over whether a Service has the rules of a Network Load Balancer.
func (r *rules) setLocked(o *corev1.Service, reading *dialect.Reading) {
	n := svc.NameOf(o)
	switch s := r.services[n]; {
	case reading.Invalid() && s != nil:
		s.object = o
	case reading.Spec.NLB && !reading.Invalid():
		r.services[n] = &ruledService{o, reading.Spec.SourceRanges}
	case s != nil:
		delete(r.services, n)
	default:
		return
	}
	r.changed()
}

func (r *rules) dropLocked(n svc.Name) {
	if r.services[n] != nil {
		delete(r.services, n)
		r.changed()
	}
}

// changed has the rules written again.
func (r *rules) changed() {
	r.dirty.Store(true)
	r.wake()
}

// applyRules writes the rules if they have changed. The rules of an earlier process stay until everything that they depend
// on has been listed.
func (f *Front) applyRules() {
	if !f.rules.dirty.Load() || !f.listed() {
		return
	}
	f.mu.Lock()
	if len(f.rules.services) > 0 && !f.nodes.listed {
		f.mu.Unlock()
		return
	}
	f.rules.dirty.Store(false)
	groups := f.rules.groupsLocked(f.claims)
	var networks []netip.Prefix
	if len(groups) > 0 {
		networks = f.nodes.networks()
	}
	f.mu.Unlock()
	f.rules.write(networks, groups)
}

// write writes rules. Without them, as on a kernel without nf_tables, the load balancers still work.
func (r *rules) write(networks []netip.Prefix, groups []filter.Group) {
	failure := ""
	if err := r.network.Rules.Set(networks, groups); err != nil {
		failure = err.Error()
		r.dirty.Store(true)
	}
	if failure != r.err && failure != "" {
		r.log.Warn("cannot write the rules of Network Load Balancers; retrying", "err", failure)
	}
	r.err = failure
}

// release removes the rules, unless the next process needs them.
func (r *rules) release(keep bool) {
	var err error
	if !keep {
		err = r.network.Rules.Set(nil, nil)
	}
	if err = errors.Join(err, r.network.Rules.Close()); err != nil {
		r.log.Error("cannot remove the rules of Network Load Balancers", "err", err)
	}
}

// networks returns the addresses of Nodes and their Pods. The caller holds the Front's mu.
func (c *nodes) networks() (networks []netip.Prefix) {
	for _, name := range slices.Sorted(maps.Keys(c.known)) {
		n := c.known[name]
		for _, a := range n.addrs {
			networks = append(networks, netip.PrefixFrom(a, a.BitLen()))
		}
		networks = append(networks, n.pods...)
	}
	return networks
}

// groupsLocked returns the rules of the Services that have an address.
func (r *rules) groupsLocked(claims map[netip.Addr][]svc.Name) (out []filter.Group) {
	unruled := func(n svc.Name) bool { return r.services[n] == nil }
	for _, n := range slices.SortedFunc(maps.Keys(r.services), func(a, b svc.Name) int { return strings.Compare(a.String(), b.String()) }) {
		s := r.services[n]
		g := filter.Group{Name: n.String(), Clients: s.clients}
		for _, in := range s.object.Status.LoadBalancer.Ingress {
			if a, err := netip.ParseAddr(in.IP); err == nil && slices.Contains(claims[a], n) {
				g.Listeners = append(g.Listeners, listenersAt(s.object, a)...)
				if a.Is4() && !slices.ContainsFunc(claims[a], unruled) {
					g.PathMTU = append(g.PathMTU, a)
				}
			}
		}
		if len(g.Listeners) == 0 {
			continue
		}
		for _, port := range s.object.Spec.Ports {
			if protocol, err := svc.ParseProtocol(string(port.Protocol)); err == nil && port.NodePort != 0 {
				g.NodePorts = append(g.NodePorts, filter.NodePort{Protocol: protocol, Port: uint16(port.NodePort)})
			}
		}
		if port := s.object.Spec.HealthCheckNodePort; port != 0 && claim.IsLocal(s.object) {
			g.HealthPorts = []uint16{uint16(port)}
		}
		out = append(out, g)
	}
	return out
}

func listenersAt(o *corev1.Service, a netip.Addr) (out []filter.Listener) {
	for _, port := range o.Spec.Ports {
		if protocol, err := svc.ParseProtocol(string(port.Protocol)); err == nil {
			out = append(out, filter.Listener{Protocol: protocol, At: netip.AddrPortFrom(a, uint16(port.Port))})
		}
	}
	return out
}
