package v1

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
)

// DeepCopyObject returns a copy of p.
func (p *IPAddressPool) DeepCopyObject() runtime.Object { return p.DeepCopy() }

// DeepCopyObject returns a copy of p.
func (p *BGPPeer) DeepCopyObject() runtime.Object { return p.DeepCopy() }

// DeepCopyObject returns a copy of s.
func (s *Speaker) DeepCopyObject() runtime.Object { return s.DeepCopy() }

// DeepCopyObject returns a copy of l.
func (l *IPAddressPoolList) DeepCopyObject() runtime.Object {
	out := &IPAddressPoolList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy()}
	out.Items = copyItems(l.Items, (*IPAddressPool).DeepCopy)
	return out
}

// DeepCopyObject returns a copy of l.
func (l *BGPPeerList) DeepCopyObject() runtime.Object {
	out := &BGPPeerList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy()}
	out.Items = copyItems(l.Items, (*BGPPeer).DeepCopy)
	return out
}

// DeepCopyObject returns a copy of l.
func (l *SpeakerList) DeepCopyObject() runtime.Object {
	out := &SpeakerList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy()}
	out.Items = copyItems(l.Items, (*Speaker).DeepCopy)
	return out
}

// DeepCopy returns a copy of p.
func (p *IPAddressPool) DeepCopy() *IPAddressPool {
	out := *p
	p.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	s := &out.Spec
	s.Addresses, s.Namespaces, s.Interfaces = slices.Clone(s.Addresses), slices.Clone(s.Namespaces), slices.Clone(s.Interfaces)
	s.AutoAssign = copyOf(s.AutoAssign)
	s.NamespaceSelector, s.ServiceSelector = s.NamespaceSelector.DeepCopy(), s.ServiceSelector.DeepCopy()
	s.Announce, s.NodeSelector = slices.Clone(s.Announce), s.NodeSelector.DeepCopy()
	if s.BGP = copyOf(s.BGP); s.BGP != nil {
		s.BGP.copyShared()
		s.BGP.Advertisements = slices.Clone(s.BGP.Advertisements)
		for i := range s.BGP.Advertisements {
			s.BGP.Advertisements[i].copyShared()
		}
	}
	out.Status.IPv4, out.Status.IPv6 = copyOf(out.Status.IPv4), copyOf(out.Status.IPv6)
	out.Status.Conditions = slices.Clone(out.Status.Conditions)
	return &out
}

// copyShared replaces what r shares with the route that it is a copy of.
func (r *PoolRoute) copyShared() {
	r.Peers, r.Communities, r.LocalPreference = slices.Clone(r.Peers), slices.Clone(r.Communities), copyOf(r.LocalPreference)
	r.AggregationLengthV4, r.AggregationLengthV6 = copyOf(r.AggregationLengthV4), copyOf(r.AggregationLengthV6)
}

// DeepCopy returns a copy of p.
func (p *BGPPeer) DeepCopy() *BGPPeer {
	out := *p
	p.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	s := &out.Spec
	s.PasswordSecretRef = copyOf(s.PasswordSecretRef)
	s.HoldTime, s.KeepaliveTime, s.RestartTime = copyOf(s.HoldTime), copyOf(s.KeepaliveTime), copyOf(s.RestartTime)
	s.NodeSelector = s.NodeSelector.DeepCopy()
	if s.BFD = copyOf(s.BFD); s.BFD != nil {
		s.BFD.TransmitInterval, s.BFD.ReceiveInterval = copyOf(s.BFD.TransmitInterval), copyOf(s.BFD.ReceiveInterval)
	}
	return &out
}

// DeepCopy returns a copy of s.
func (s *Speaker) DeepCopy() *Speaker {
	out := *s
	s.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	t := &out.Status
	t.Endpoints, t.Networks = slices.Clone(t.Endpoints), slices.Clone(t.Networks)
	t.Interfaces, t.ReturnBy = slices.Clone(t.Interfaces), copyOf(t.ReturnBy)
	t.Addresses, t.Peers = slices.Clone(t.Addresses), slices.Clone(t.Peers)
	t.Conditions, t.Absent = slices.Clone(t.Conditions), slices.Clone(t.Absent)
	if t.Gateways = copyOf(t.Gateways); t.Gateways != nil {
		t.Gateways.Served = slices.Clone(t.Gateways.Served)
		for i := range t.Gateways.Served {
			g := &t.Gateways.Served[i]
			g.Addresses, g.Announced = slices.Clone(g.Addresses), slices.Clone(g.Announced)
		}
	}
	return &out
}

func copyOf[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

func copyItems[T any](items []T, copyItem func(*T) *T) []T {
	if items == nil {
		return nil
	}
	out := make([]T, len(items))
	for i := range items {
		out[i] = *copyItem(&items[i])
	}
	return out
}
