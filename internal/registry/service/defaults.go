package service

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// AddToScheme adds the defaults and the selectable fields of Service to a scheme
// that knows its type.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&corev1.Service{}, func(obj any) { SetDefaults(obj.(*corev1.Service)) })
	s.AddTypeDefaultingFunc(&corev1.ServiceList{}, func(obj any) {
		list := obj.(*corev1.ServiceList)
		for i := range list.Items {
			SetDefaults(&list.Items[i])
		}
	})
	return s.AddFieldLabelConversionFunc(corev1.SchemeGroupVersion.WithKind("Service"), func(label, value string) (string, string, error) {
		switch label {
		case "metadata.name", "metadata.namespace", "spec.clusterIP", "spec.type":
			return label, value, nil
		}
		return "", "", fmt.Errorf("field label not supported: %s", label)
	})
}

// SetDefaults fills in what does not depend on the configuration of the
// cluster. It is idempotent. IP families and cluster IPs follow later, when the
// configured ranges are known.
func SetDefaults(svc *corev1.Service) {
	spec := &svc.Spec
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeClusterIP // behaviour 84
	}
	defaultAffinity(spec)
	for i := range spec.Ports {
		p := &spec.Ports[i]
		if p.Protocol == "" {
			p.Protocol = corev1.ProtocolTCP // behaviour 11
		}
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port) // behaviour 10
		}
	}
	if spec.ExternalTrafficPolicy == "" && externallyAccessible(svc) {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	switch spec.Type {
	case corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer:
		if spec.InternalTrafficPolicy == nil {
			spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
		}
	}
	if spec.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	if spec.AllocateLoadBalancerNodePorts == nil {
		spec.AllocateLoadBalancerNodePorts = new(true)
	}
	for i := range svc.Status.LoadBalancer.Ingress {
		if ing := &svc.Status.LoadBalancer.Ingress[i]; ing.IP != "" && ing.IPMode == nil {
			ing.IPMode = new(corev1.LoadBalancerIPModeVIP)
		}
	}
}

// defaultAffinity makes the affinity and its configuration agree (behaviour 61,
// 62).
func defaultAffinity(spec *corev1.ServiceSpec) {
	switch spec.SessionAffinity {
	case "", corev1.ServiceAffinityNone:
		spec.SessionAffinity = corev1.ServiceAffinityNone
		spec.SessionAffinityConfig = nil
	case corev1.ServiceAffinityClientIP:
		c := spec.SessionAffinityConfig
		if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
			spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
				ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(corev1.DefaultClientIPServiceAffinitySeconds)},
			}
		}
	}
}
