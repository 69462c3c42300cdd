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
	// hints are those of the endpoints, by their index; nil if none has any.
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
	endpointState
}

// endpointState is the condition of an endpoint, the better one the greater.
type endpointState uint8

// An endpoint that is ready takes new connections. One that is draining is not
// ready, but still serves while it terminates: the second choice. One that is
// serving, as these all are, may keep the flows it has. Local ones are on this
// node.
const (
	serving endpointState = 1 << iota
	draining
	ready
	local
)

func (s endpointState) is(what endpointState) bool { return s&what != 0 }

// keep takes over what counts of an object on the node of that name. It is nil
// for an object that is not for this proxy.
func keep(obj *discoveryv1.EndpointSlice, nodeName string) *endpointSlice {
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
	for i := range obj.Ports {
		p := &obj.Ports[i]
		proto, err := svc.ParseProtocol(string(deref(p.Protocol, corev1.ProtocolTCP)))
		if err != nil || p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
			proto = 0 // counts as a port, but leads nowhere
		}
		s.ports = append(s.ports, slicePort{deref(p.Name, ""), proto, uint16(deref(p.Port, 0))})
	}
	s.endpoints = make([]sliceEndpoint, 0, len(obj.Endpoints))
	for i := range obj.Endpoints {
		ep := &obj.Endpoints[i]
		a, bad := endpointAddr(ep)
		if bad == "" && svc.FamilyOf(a) != s.family {
			bad = ep.Addresses[0] + " (not " + s.family.String() + ")"
		}
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
		state := stateOf(ep, nodeName)
		if weight == 0 { // keeps what it has
			state &^= ready | draining
		}
		if own, ok := ownOf(obj, ep, state); ok {
			own.at, own.mayBeReady = len(s.endpoints), own.mayBeReady && weight > 0
			s.own = append(s.own, own)
		}
		s.endpoints = append(s.endpoints, sliceEndpoint{a, state})
	}
	s.endpoints = slices.Clip(s.endpoints)
	return s
}

func stateOf(ep *discoveryv1.Endpoint, nodeName string) endpointState {
	var s endpointState
	switch c := &ep.Conditions; {
	case deref(c.Ready, true):
		s = ready | serving
	case deref(c.Serving, true) && deref(c.Terminating, false):
		s = draining | serving
	case deref(c.Serving, false):
		s = serving
	}
	if ep.NodeName != nil && *ep.NodeName == nodeName {
		s |= local
	}
	return s
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
