package kit

import (
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Finished reports whether all containers of a Pod have ended for good.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Renewal returns the time of a Lease's last renewal as a text to compare, "" if it has none.
func Renewal(l *coordinationv1.Lease) string {
	if l.Spec.RenewTime == nil {
		return ""
	}
	return l.Spec.RenewTime.UTC().String()
}

// ServiceOf returns the name of the Service that an EndpointSlice belongs to, and reports whether it belongs to one.
func ServiceOf(s *discoveryv1.EndpointSlice) (svc.Name, bool) {
	name := s.Labels[discoveryv1.LabelServiceName]
	return svc.Name{Namespace: s.Namespace, Name: name}, name != ""
}
