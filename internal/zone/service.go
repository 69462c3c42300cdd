package zone

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// service is what the zone knows of one Service and the records it has made for
// it.
type service struct {
	spec   *serviceSpec      // nil while there are only slices
	slices map[string]*slice // by name
	names  []string          // keys in the index, sorted
	ptrs   []ptr             // sorted
	stale  bool              // changed while the zone was held
}

// serviceSpec is the part of a Service that names depend on.
type serviceSpec struct {
	headless bool
	external string // ExternalName, without a closing dot
	addrs    []netip.Addr
	ports    []port
}

// slice is the part of an EndpointSlice that names depend on: its ready
// endpoints.
type slice struct {
	ports     []port
	endpoints []endpoint
}

// endpoint is an address and its name below its Service; the key is empty if the
// name would be too long in a cluster domain.
type endpoint struct {
	addr netip.Addr
	key  string
}

// port is a port with its name and protocol as the labels of an SRV name.
type port struct {
	name, protocol string
	number         uint16
}

// ptr is a PTR record: an address and the name it leads to.
type ptr struct {
	addr netip.Addr
	name string
	vip  bool // the name is that of the Service, not of an endpoint
}

func comparePtr(a, b ptr) int {
	return cmp.Or(a.addr.Compare(b.addr), strings.Compare(a.name, b.name))
}

// ServiceNameLabel ties an EndpointSlice to its Service.
const ServiceNameLabel = discoveryv1.LabelServiceName

// SetService adds or changes a Service.
func (z *Zone) SetService(s *corev1.Service) {
	name := svc.Name{Namespace: s.Namespace, Name: s.Name}
	spec := specOf(s)
	z.mu.Lock()
	defer z.mu.Unlock()
	rec := z.service(name)
	if rec.spec == nil {
		z.addToNamespace(name.Namespace, 1)
	}
	rec.spec = spec
	z.publish(name, rec)
}

// DeleteService removes a Service, if it is in the zone.
func (z *Zone) DeleteService(name svc.Name) {
	z.mu.Lock()
	defer z.mu.Unlock()
	rec := z.services[name]
	if rec == nil || rec.spec == nil {
		return
	}
	rec.spec = nil
	z.publish(name, rec)
	z.addToNamespace(name.Namespace, -1)
}

// SetSlice adds or changes an EndpointSlice. One without the label
// kubernetes.io/service-name belongs to no Service and has no effect.
func (z *Zone) SetSlice(s *discoveryv1.EndpointSlice) {
	id := svc.Name{Namespace: s.Namespace, Name: s.Name}
	owner := svc.Name{Namespace: s.Namespace, Name: s.Labels[ServiceNameLabel]}
	base, _ := serviceKey(owner)
	parsed := z.sliceOf(s, base)
	z.mu.Lock()
	defer z.mu.Unlock()
	if old, ok := z.slices[id]; ok && old != owner {
		z.dropSlice(id)
	}
	if owner.Name == "" {
		return
	}
	z.slices[id] = owner
	rec := z.service(owner)
	if rec.slices == nil {
		rec.slices = make(map[string]*slice, 1)
	}
	rec.slices[id.Name] = parsed
	z.publish(owner, rec)
}

// DeleteSlice removes an EndpointSlice, if it is in the zone.
func (z *Zone) DeleteSlice(name svc.Name) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.dropSlice(name)
}

// Services returns the names of all Services in the zone, in no order.
func (z *Zone) Services() []svc.Name {
	z.mu.Lock()
	defer z.mu.Unlock()
	out := make([]svc.Name, 0, len(z.services))
	for n, s := range z.services {
		if s.spec != nil {
			out = append(out, n)
		}
	}
	return out
}

// Slices returns the names of all EndpointSlices in the zone, in no order.
func (z *Zone) Slices() []svc.Name {
	z.mu.Lock()
	defer z.mu.Unlock()
	out := make([]svc.Name, 0, len(z.slices))
	for n := range z.slices {
		out = append(out, n)
	}
	return out
}

func (z *Zone) service(name svc.Name) *service {
	rec := z.services[name]
	if rec == nil {
		rec = &service{}
		z.services[name] = rec
	}
	return rec
}

func (z *Zone) dropSlice(id svc.Name) {
	owner, ok := z.slices[id]
	if !ok {
		return
	}
	delete(z.slices, id)
	rec := z.services[owner]
	delete(rec.slices, id.Name)
	z.publish(owner, rec)
}

func specOf(s *corev1.Service) *serviceSpec {
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return &serviceSpec{external: strings.TrimSuffix(s.Spec.ExternalName, ".")}
	}
	spec := &serviceSpec{}
	ips := s.Spec.ClusterIPs
	if len(ips) == 0 {
		ips = []string{s.Spec.ClusterIP}
	}
	for _, ip := range ips {
		if ip == corev1.ClusterIPNone {
			return &serviceSpec{headless: true}
		}
		if a, err := netip.ParseAddr(ip); err == nil {
			spec.addrs = append(spec.addrs, a.Unmap())
		}
	}
	for _, p := range s.Spec.Ports {
		spec.ports = append(spec.ports, newPort(p.Name, p.Protocol, p.Port))
	}
	return spec
}

// sliceOf reads a slice of the Service whose key is base.
func (z *Zone) sliceOf(s *discoveryv1.EndpointSlice, base string) *slice {
	out := &slice{}
	if s.AddressType == discoveryv1.AddressTypeFQDN {
		return out
	}
	for _, p := range s.Ports {
		if p.Port == nil {
			continue // all ports: nothing an SRV record could say
		}
		var name string
		if p.Name != nil {
			name = *p.Name
		}
		protocol := corev1.ProtocolTCP
		if p.Protocol != nil {
			protocol = *p.Protocol
		}
		out.ports = append(out.ports, newPort(name, protocol, *p.Port))
	}
	out.endpoints = make([]endpoint, 0, len(s.Endpoints))
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		// Unknown counts as ready. A Service with publishNotReadyAddresses has
		// all its endpoints marked ready by the endpoints' controller.
		if r := e.Conditions.Ready; r != nil && !*r {
			continue
		}
		var hostname string
		if e.Hostname != nil {
			hostname = *e.Hostname
		}
		for _, ip := range e.Addresses {
			if a, err := netip.ParseAddr(ip); err == nil {
				a = a.Unmap().WithZone("")
				out.endpoints = append(out.endpoints, endpoint{a, hostKey(a, hostname, base, z.longestDomain)})
			}
		}
	}
	return out
}

func newPort(name string, protocol corev1.Protocol, number int32) port {
	if protocol == "" {
		protocol = corev1.ProtocolTCP
	}
	return port{name: name, protocol: strings.ToLower(string(protocol)), number: uint16(number)}
}

// hostKey is the key of an endpoint below its Service's, base: its label is its
// hostname, else its address with dashes (10-244-1-7 or fd00-10-244--7).
func hostKey(a netip.Addr, hostname, base string, longestDomain int) string {
	var buf [2 * maxName]byte
	b := buf[:1]
	if hostname != "" && len(hostname) <= maxLabel && !strings.Contains(hostname, ".") {
		b, _ = appendLabel(b[:0], hostname)
	} else {
		b = a.AppendTo(b)
		b[0] = byte(len(b) - 1)
		for i, c := range b[1:] {
			if c == '.' || c == ':' {
				b[1+i] = '-'
			}
		}
	}
	if len(b)+len(base)+longestDomain > maxName {
		return ""
	}
	return string(append(b, base...))
}

func sortedAddrs(addrs []netip.Addr) []netip.Addr {
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}
