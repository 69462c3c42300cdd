package service

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// validateStrict is the rule of Kubernetes before 1.26, for load balancers that
// know no better: the ports of a load balancer have one protocol (behaviour 96),
// and it is not SCTP (behaviour 105) unless a class says that the load balancer is
// somebody else's. A Service that breaks the rule already may go on as it is.
func validateStrict(svc, old *corev1.Service) (errs field.ErrorList) {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	protocols := protocolsOf(svc)
	if old != nil && old.Spec.Type == corev1.ServiceTypeLoadBalancer && slices.Equal(protocols, protocolsOf(old)) {
		return nil
	}
	path := field.NewPath("spec", "ports")
	if len(protocols) > 1 {
		errs = append(errs, field.Invalid(path, fmt.Sprint(protocols),
			"must all have one protocol: load balancers of several protocols are switched off by --strict-load-balancers"))
	}
	for i, p := range svc.Spec.Ports {
		if p.Protocol == corev1.ProtocolSCTP && svc.Spec.LoadBalancerClass == nil {
			errs = append(errs, field.NotSupported(path.Index(i).Child("protocol"), p.Protocol, []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP}))
		}
	}
	return errs
}

// protocolsOf returns the protocols of the ports, each once, in order.
func protocolsOf(svc *corev1.Service) (out []corev1.Protocol) {
	for _, p := range svc.Spec.Ports {
		out = append(out, p.Protocol)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
