package node

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The lean forms keep what the table, events and metrics need. At 500,000
// endpoints the rest is most of the agent's memory. They are copies: what a
// watch delivered is not changed.

func leanMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp,
		Labels: m.Labels, Annotations: m.Annotations,
	}
}

func leanService(s *corev1.Service) *corev1.Service {
	out := &corev1.Service{ObjectMeta: leanMeta(&s.ObjectMeta), Spec: s.Spec}
	out.Annotations = only(s.Annotations, corev1.AnnotationLoadBalancerSourceRangesKey)
	out.Spec.Selector = nil
	out.Status.LoadBalancer = s.Status.LoadBalancer
	return out
}

func leanNode(n *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: leanMeta(&n.ObjectMeta), Spec: n.Spec, Status: n.Status}
	out.Status.Images = nil
	return out
}

// only returns the entry key of m alone, nil if it has none.
func only(m map[string]string, key string) map[string]string {
	if v, ok := m[key]; ok {
		return map[string]string{key: v}
	}
	return nil
}

// interner keeps one copy of what many endpoints have in common. It is guarded
// by the feed's lock.
type interner struct {
	yes, no bool // addressed only
	names   map[string]*string
}

// maxNames bounds the node names remembered; further ones are kept as they
// come.
const maxNames = 20_000

func (in *interner) bool(b *bool) *bool {
	if b == nil {
		return nil
	}
	if *b {
		in.yes = true
		return &in.yes
	}
	return &in.no
}

func (in *interner) string(s *string) *string {
	if s == nil {
		return nil
	}
	if one := in.names[*s]; one != nil {
		return one
	}
	if len(in.names) < maxNames {
		in.names[*s] = s
	}
	return s
}

func (in *interner) leanSlice(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{ObjectMeta: leanMeta(&s.ObjectMeta), AddressType: s.AddressType, Ports: s.Ports}
	out.Labels = only(s.Labels, discoveryv1.LabelServiceName)
	out.Annotations = only(s.Annotations, corev1.EndpointsLastChangeTriggerTime)
	out.Endpoints = make([]discoveryv1.Endpoint, len(s.Endpoints))
	for i := range s.Endpoints {
		ep := &s.Endpoints[i]
		out.Endpoints[i] = discoveryv1.Endpoint{
			Addresses: ep.Addresses,
			Conditions: discoveryv1.EndpointConditions{
				Ready: in.bool(ep.Conditions.Ready), Serving: in.bool(ep.Conditions.Serving), Terminating: in.bool(ep.Conditions.Terminating),
			},
			NodeName: in.string(ep.NodeName),
			Hints:    ep.Hints,
		}
	}
	return out
}
