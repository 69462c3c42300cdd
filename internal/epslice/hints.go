package epslice

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// hintMode is the rule by which endpoints are hinted to zones or nodes.
type hintMode uint8

const (
	hintNone hintMode = iota
	// hintZone: to clients of the endpoint's zone (trafficDistribution
	// PreferSameZone, or PreferClose by its old name).
	hintZone
	// hintNode: to clients of its zone, best of its node (PreferSameNode).
	hintNode
	// hintTopology: in proportion to the CPU of each zone (annotation
	// service.kubernetes.io/topology-mode: Auto).
	hintTopology
)

// hintModeOf reads what the Service asks for. The annotation goes before the
// field, and its older spelling before the newer.
func hintModeOf(in *Input) hintMode {
	value, ok := in.Service.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	if !ok {
		value = in.Service.Annotations[corev1.AnnotationTopologyMode]
	}
	if value == "Auto" || value == "auto" {
		if in.Topology == nil {
			return hintNone
		}
		return hintTopology
	}
	if in.Service.Spec.TrafficDistribution == nil {
		return hintNone
	}
	switch *in.Service.Spec.TrafficDistribution {
	case corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone:
		return hintZone
	case corev1.ServiceTrafficDistributionPreferSameNode:
		return hintNode
	}
	return hintNone
}

// of returns the hints of a ready endpoint where they follow from it alone.
func (m hintMode) of(e *discoveryv1.Endpoint) *discoveryv1.EndpointHints {
	if m != hintZone && m != hintNode {
		return nil
	}
	h := &discoveryv1.EndpointHints{}
	if e.Zone != nil {
		h.ForZones = []discoveryv1.ForZone{{Name: *e.Zone}}
	}
	if e.NodeName != nil && m == hintNode {
		h.ForNodes = []discoveryv1.ForNode{{Name: *e.NodeName}}
	}
	if h.ForZones == nil && h.ForNodes == nil {
		return nil
	}
	return h
}

func sameHints(a, b *discoveryv1.EndpointHints) bool {
	if a == b || a == nil || b == nil {
		return a == b
	}
	return slices.Equal(a.ForZones, b.ForZones) && slices.Equal(a.ForNodes, b.ForNodes)
}
