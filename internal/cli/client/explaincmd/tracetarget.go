package explaincmd

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
)

// parseTarget reads TO: what parseQuestion reads, and of Services and names also with :PORT, a number or a name.
func parseTarget(to, namespace string) (q *explain.Question, port string, err error) {
	name := to
	if _, err := netip.ParseAddrPort(to); err != nil {
		if before, after, ok := strings.Cut(to, ":"); ok && !strings.Contains(after, ":") {
			if name, port = before, after; port == "" {
				return nil, "", base.Usagef("TO is %q, which has no port after the colon", to)
			}
		}
	}
	q, err = parseQuestion(name, "", namespace)
	return q, port, err
}

// where finds the address and port of TO.
func (t *tracing) where(q *explain.Question, port string) error {
	if q.Address.IsValid() {
		t.destination = q.Address
		return nil
	}
	name := explain.Resolve(q, &t.cluster.objects)
	if name == (svc.Name{}) {
		return fmt.Errorf("%s leads to no Service; 'fairlead explain %s' says why", q.Name, q.Name)
	}
	i := slices.IndexFunc(t.cluster.objects.Services, func(s *corev1.Service) bool { return svc.NameOf(s) == name })
	if i < 0 {
		return fmt.Errorf("there is no Service %s, or you may not read it", name)
	}
	s := t.cluster.objects.Services[i]
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return fmt.Errorf("the Service %s is an alias of %s: trace an address of that name", name, s.Spec.ExternalName)
	}
	p, err := t.port(s, port)
	if err != nil {
		return err
	}
	if s.Spec.ClusterIP == corev1.ClusterIPNone {
		return t.headless(name, p)
	}
	var list []netip.AddrPort
	for _, ip := range append(slices.Clone(s.Spec.ClusterIPs), s.Spec.ClusterIP) {
		if a, err := netip.ParseAddr(ip); err == nil {
			list = append(list, netip.AddrPortFrom(a, uint16(p.Port)))
		}
	}
	return t.choose(list, "Service "+name.String()+" has no address yet")
}

// choose takes the first address of a family that the sender has.
func (t *tracing) choose(list []netip.AddrPort, none string) error {
	if len(list) == 0 {
		return fmt.Errorf("%s", none)
	}
	t.destination = list[0]
	for _, a := range list {
		if t.sender.Addr(a.Addr()).IsValid() {
			t.destination = a
			break
		}
	}
	return nil
}

// port finds the port of a Service that is meant: by its number or name, by the protocol, or the only one.
func (t *tracing) port(s *corev1.Service, port string) (*corev1.ServicePort, error) {
	var found, all []string
	var out *corev1.ServicePort
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		text := fmt.Sprintf("%d/%s", p.Port, p.Protocol)
		all = append(all, text)
		if port != "" && port != p.Name && port != strconv.Itoa(int(p.Port)) {
			continue
		}
		if string(p.Protocol) == t.protocol.String() {
			found, out = append(found, text), p
		}
	}
	name := svc.NameOf(s)
	switch {
	case len(found) == 1:
		return out, nil
	case len(found) > 1:
		return nil, base.Usagef("Service %s has the ports %s: name one, as in %s:%d", name, strings.Join(found, ", "), s.Name,
			s.Spec.Ports[0].Port)
	case !t.explicit:
		return nil, base.Usagef("Service %s has no such port of TCP (it has %s); --protocol UDP sends an empty datagram to the program",
			name, strings.Join(all, ", "))
	}
	return nil, base.Usagef("Service %s has no such port of %s (it has %s)", name, t.protocol, strings.Join(all, ", "))
}

// headless takes a ready endpoint of a Service without an address, as DNS gives them.
func (t *tracing) headless(name svc.Name, p *corev1.ServicePort) error {
	var list []netip.AddrPort
	for _, s := range t.cluster.objects.Slices {
		if sliceOwner(s) != name {
			continue
		}
		for _, port := range s.Ports {
			if port.Port == nil || port.Name != nil && *port.Name != p.Name || port.Protocol != nil && *port.Protocol != p.Protocol {
				continue
			}
			for i := range s.Endpoints {
				e := &s.Endpoints[i]
				if len(e.Addresses) == 0 || e.Conditions.Ready != nil && !*e.Conditions.Ready {
					continue
				}
				if a, err := netip.ParseAddr(e.Addresses[0]); err == nil {
					list = append(list, netip.AddrPortFrom(a, uint16(*port.Port)))
				}
			}
		}
	}
	return t.choose(list, "headless Service "+name.String()+" has no ready endpoint: 'fairlead explain' says why")
}
