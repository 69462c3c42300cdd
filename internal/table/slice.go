package table

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// endpointSlice is what is kept of an EndpointSlice. At 500,000 endpoints the
// API's objects would be most of a node's memory.
type endpointSlice struct {
	name      string
	family    svc.Family
	weight    uint16 // as Endpoint.Weight has it
	ports     []slicePort
	endpoints []sliceEndpoint
	// hints are the topology hints, by the index of the endpoint; nil if none has any.
	hints []*discoveryv1.EndpointHints
	// bad are the endpoints left out, with what is wrong with each.
	bad []string
	// own are the endpoints that stand for Pods of this node, by their index.
	own []ownEndpoint
}

type slicePort struct {
	name   string
	proto  svc.Protocol
	number uint16
}

type sliceEndpoint struct {
	addr netip.Addr
	State
	node nodeName
}

// keep takes over what counts of an object on the node of that name. It is nil
// for an object that is not for this proxy.
func keep(obj *discoveryv1.EndpointSlice, self string) *endpointSlice {
	s := &endpointSlice{name: obj.Name, family: svc.IPv4}
	switch {
	case skipLabels(obj.Labels):
		return nil
	case obj.AddressType == discoveryv1.AddressTypeIPv6:
		s.family = svc.IPv6
	case obj.AddressType != discoveryv1.AddressTypeIPv4:
		return nil
	}
	weight, _ := svc.ParseWeight(obj.Annotations[svc.WeightAnnotation])
	if weight > 1 {
		s.weight = uint16(weight)
	}
	s.ports = readPorts(obj)
	s.endpoints = make([]sliceEndpoint, 0, len(obj.Endpoints))
	for i := range obj.Endpoints {
		ep := &obj.Endpoints[i]
		a, bad := EndpointAddr(ep, s.family)
		if bad != "" {
			s.bad = append(s.bad, bad)
			continue
		}
		if ep.Hints != nil && s.hints == nil {
			s.hints = make([]*discoveryv1.EndpointHints, len(s.endpoints), len(obj.Endpoints))
		}
		if s.hints != nil {
			s.hints = append(s.hints, ep.Hints)
		}
		state := StateOf(ep, self)
		if weight == 0 {
			state = state.Idle()
		}
		if own, ok := ownOf(obj, ep, state); ok {
			own.at, own.mayBeReady = len(s.endpoints), own.mayBeReady && weight > 0
			s.own = append(s.own, own)
		}
		s.endpoints = append(s.endpoints, sliceEndpoint{a, state, nodeOf(ep, self)})
	}
	s.endpoints = slices.Clip(s.endpoints)
	return s
}

// readPorts returns the ports of a slice. An invalid one has protocol 0.
func readPorts(obj *discoveryv1.EndpointSlice) []slicePort {
	out := make([]slicePort, 0, len(obj.Ports))
	for i := range obj.Ports {
		p := &obj.Ports[i]
		proto, err := svc.ParseProtocol(string(deref(p.Protocol, corev1.ProtocolTCP)))
		if err != nil || p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
			proto = 0 // counts as a port, but leads nowhere
		}
		out = append(out, slicePort{deref(p.Name, ""), proto, uint16(deref(p.Port, 0))})
	}
	return out
}

// hint returns the hints of an endpoint, nil if it has none.
func (s *endpointSlice) hint(i int) *discoveryv1.EndpointHints {
	if s.hints == nil {
		return nil
	}
	return s.hints[i]
}

// portNumber returns the number behind the port of that name and protocol, 0 if
// there is none.
func (s *endpointSlice) portNumber(name string, proto svc.Protocol) uint16 {
	for _, p := range s.ports {
		if p.name == name && p.proto == proto {
			return p.number
		}
	}
	return 0
}
