package table

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// podPrefix begins the name that a Pod with host ports has in a Table. No Service's name
// has a dot.
const podPrefix = "pod."

// PodName returns the Pod whose host ports are in a Table under the name n; ok is false
// for the name of a Service.
func PodName(n svc.Name) (pod svc.Name, ok bool) {
	name, ok := strings.CutPrefix(n.Name, podPrefix)
	return svc.Name{Namespace: n.Namespace, Name: name}, ok
}

// Describe returns "Service namespace/name", or "Pod namespace/name" for the name that a
// Pod has in a Table.
func Describe(n svc.Name) string {
	if pod, ok := PodName(n); ok {
		return "Pod " + pod.String()
	}
	return "Service " + n.String()
}

// SetHostPorts sets all host ports of this node's Pods. Like the host ports of the CNI's plug-in
// portmap they lead to the Pod whether it is ready or not. The caller does not change the
// lists any more.
func (b *Builder) SetHostPorts(pods []svc.HostPorts) {
	there := make(map[svc.Name]bool, len(pods))
	for i := range pods {
		n := svc.Name{Namespace: pods[i].Pod.Namespace, Name: podPrefix + pods[i].Pod.Name}
		there[n] = true
		if s := b.hosts[n]; s != nil && reflect.DeepEqual(*s.host, pods[i]) {
			continue
		}
		s := b.service(n)
		b.hosts[n], s.host, s.reclaim = s, &pods[i], true
		b.touch(s)
	}
	for n, s := range b.hosts {
		if !there[n] {
			delete(b.hosts, n)
			s.host, s.reclaim = nil, true
			b.touch(s)
		}
	}
}

// touchHosts has the host ports decided again, which depend on the node's addresses and
// on what is reserved.
func (b *Builder) touchHosts() {
	for _, s := range b.hosts {
		s.reclaim = true
		b.touch(s)
	}
}

// hostPort is one host port in one family: the frontends it asks for, and where they lead.
type hostPort struct {
	key   Key
	wants []want
	to    []Endpoint
	// everywhere reports whether it is at every address of the node of its family.
	everywhere bool
}

// onEveryAddress returns the node port that a host port is a part of, whatever its address:
// whose that is, his is every address.
func onEveryAddress(at svc.Frontend) svc.Frontend {
	a := at.Addr
	return svc.Frontend{Protocol: at.Protocol, Addr: netip.AddrPortFrom(anyAddr(svc.FamilyOf(a.Addr())), a.Port())}
}

// decideHost decides the frontends of a Pod's host ports: each has the Pod as its only
// endpoint, and keeps the client's address but for 127.0.0.1, which no Pod can answer.
func (b *Builder) decideHost(s *service) ([]*ServicePort, []Problem) {
	c := &complaints{service: s.name}
	var ports []*ServicePort
	for _, h := range b.node.hostPorts(s, c) {
		p := &ServicePort{ID: h.key.ID, Family: h.key.Family, Protocol: h.wants[0].at.Protocol}
		if p.Protocol != svc.TCP {
			p.Serving = h.to
		}
		for _, w := range b.granted(s, h.wants, c) {
			p.Frontends = append(p.Frontends, Frontend{Kind: w.kind, Addr: w.at.Addr, Endpoints: h.to, Masquerade: w.at.Addr.Addr().IsLoopback()})
		}
		ports = append(ports, p)
	}
	return ports, c.done()
}

// onLoopback reports whether a host port is on 127.0.0.0/8.
func (b *Builder) onLoopback() bool {
	for _, s := range b.hosts {
		for _, p := range s.ports {
			if slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return f.Addr.Addr().IsLoopback() }) {
				return true
			}
		}
	}
	return false
}
