package service

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/svc"
)

// deprecatedHints is the annotation before service.kubernetes.io/topology-mode.
const deprecatedHints = corev1.DeprecatedAnnotationTopologyAwareHints

// warnings returns what in a valid Service is ignored, deprecated or spelled in a way that other software may read differently.
func warnings(s *corev1.Service) []string {
	var out []string
	spec, path := &s.Spec, field.NewPath("spec")
	if _, ok := s.Annotations[deprecatedHints]; ok {
		out = append(out, fmt.Sprintf("annotation %s is deprecated, please use %s instead", deprecatedHints, corev1.AnnotationTopologyMode))
	}
	if spec.Type != corev1.ServiceTypeExternalName && spec.ClusterIP != "" && spec.ClusterIP != corev1.ClusterIPNone {
		for i, ip := range spec.ClusterIPs {
			out = append(out, validation.GetWarningsForIP(path.Child("clusterIPs").Index(i), ip)...)
		}
	}
	if spec.Type == corev1.ServiceTypeClusterIP && spec.ClusterIP == corev1.ClusterIPNone {
		if spec.LoadBalancerIP != "" {
			out = append(out, "spec.loadBalancerIP is ignored for headless services")
		}
		if len(spec.ExternalIPs) > 0 {
			out = append(out, "spec.externalIPs is ignored for headless services")
		}
		if spec.SessionAffinity != corev1.ServiceAffinityNone {
			out = append(out, "spec.SessionAffinity is ignored for headless services")
		}
	}
	for i, ip := range spec.ExternalIPs {
		out = append(out, validation.GetWarningsForIP(path.Child("externalIPs").Index(i), ip)...)
	}
	if len(spec.ExternalIPs) > 0 && spec.ClusterIP != corev1.ClusterIPNone && spec.Type != corev1.ServiceTypeExternalName {
		out = append(out, "spec.externalIPs is deprecated and may no longer be implemented in some clusters") // behaviour 158
	}
	// Nothing marks it as an address (behaviour 99).
	if netutils.ParseIPSloppy(spec.LoadBalancerIP) != nil {
		out = append(out, validation.GetWarningsForIP(path.Child("loadBalancerIP"), spec.LoadBalancerIP)...)
	}
	out = append(out, lbWarnings(s)...)
	for i, cidr := range spec.LoadBalancerSourceRanges {
		out = append(out, validation.GetWarningsForCIDR(path.Child("loadBalancerSourceRanges").Index(i), cidr)...)
	}
	if spec.Type == corev1.ServiceTypeExternalName && len(spec.ExternalIPs) > 0 {
		out = append(out, fmt.Sprintf("spec.externalIPs is ignored when spec.type is %q", corev1.ServiceTypeExternalName))
	}
	if spec.Type != corev1.ServiceTypeExternalName && spec.ExternalName != "" {
		out = append(out, fmt.Sprintf("spec.externalName is ignored when spec.type is not %q", corev1.ServiceTypeExternalName))
	}
	if td := spec.TrafficDistribution; td != nil && *td == corev1.ServiceTrafficDistributionPreferClose {
		out = append(out, fmt.Sprintf("spec.trafficDistribution: %q is deprecated; use %q",
			corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone))
	}
	return out
}

// Bounds of the warnings about annotations of one Service, in number and bytes: a client shows them, and kube-apiserver
// sends 4 KiB of them at most.
const (
	maxLBWarnings     = 5
	maxLBWarningBytes = 700
)

// lbWarnings returns which annotations of a load balancer are unknown or have a wrong value: what they ask for is not done.
func lbWarnings(s *corev1.Service) (out []string) {
	class := s.Spec.LoadBalancerClass
	ours := s.Spec.Type == corev1.ServiceTypeLoadBalancer && (class == nil || *class == svc.LoadBalancerClass)
	if !ours && !slices.ContainsFunc(slices.Collect(maps.Keys(s.Annotations)), dialect.IsOwn) {
		return nil
	}
	for _, f := range claim.Read(s).Findings {
		if f.Annotation == "" || f.State != dialect.Invalid && f.State != dialect.Unknown ||
			!ours && (f.State != dialect.Unknown || !dialect.IsOwn(f.Annotation)) {
			continue
		}
		if len(out) == maxLBWarnings {
			return append(out, "more annotations are unknown or wrong: see 'fairlead lb explain'")
		}
		text := f.Text
		if !strings.Contains(text, f.Annotation) {
			text = "annotation " + f.Annotation + ": " + text
		}
		out = append(out, strings.ToValidUTF8(text[:min(len(text), maxLBWarningBytes)], ""))
	}
	return out
}
