package usage

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"

	"github.com/fairlead/fairlead/internal/registry/resourcequota"
)

// services measures Services, their node ports and load balancers.
type services struct{ quota.Evaluator }

// Handles reports whether a writes a Service: an update may change its type.
func (services) Handles(a admission.Attributes) bool {
	op := a.GetOperation()
	return a.GetSubresource() == "" && (op == admission.Create || op == admission.Update)
}

// MatchingResources returns the resources of input that Services use.
func (s services) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	matching := s.Evaluator.MatchingResources(input)
	for _, name := range input {
		if resourcequota.OfServices(name) {
			matching = append(matching, name)
		}
	}
	return matching
}

// Matches reports whether r limits Services.
func (s services) Matches(r *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(r, item, s.MatchingResources, generic.MatchesNoScopeFunc)
}

// Usage returns what a Service uses.
func (s services) Usage(item runtime.Object) (corev1.ResourceList, error) {
	service, ok := item.(*corev1.Service)
	if !ok {
		return nil, fmt.Errorf("want a Service, have %T", item)
	}
	used, err := s.Evaluator.Usage(item)
	if err != nil {
		return nil, err
	}
	return quota.Add(used, serviceUsage(service)), nil
}

// serviceUsage returns the node ports and load balancers of a Service. Node ports count before they are allocated.
func serviceUsage(s *corev1.Service) corev1.ResourceList {
	ports, balancers := 0, 0
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		ports = len(s.Spec.Ports)
	case corev1.ServiceTypeLoadBalancer:
		ports, balancers = len(s.Spec.Ports), 1
		if allocate := s.Spec.AllocateLoadBalancerNodePorts; allocate != nil && !*allocate {
			ports = 0
			for _, p := range s.Spec.Ports {
				if p.NodePort != 0 {
					ports++
				}
			}
		}
	}
	return corev1.ResourceList{
		corev1.ResourceServicesNodePorts:     *resource.NewQuantity(int64(ports), resource.DecimalSI),
		corev1.ResourceServicesLoadBalancers: *resource.NewQuantity(int64(balancers), resource.DecimalSI),
	}
}
