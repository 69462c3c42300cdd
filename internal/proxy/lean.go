package proxy

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// The lean forms keep what the table, events and metrics need. They are copies:
// what a watch delivered is not changed. The table copies what it
// needs of EndpointSlices, so they have no lean form.

func leanMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp,
		Labels: m.Labels, Annotations: m.Annotations,
	}
}

func leanService(s *corev1.Service) *corev1.Service {
	out := &corev1.Service{ObjectMeta: leanMeta(&s.ObjectMeta), Spec: s.Spec}
	out.Annotations = only(s.Annotations, corev1.AnnotationLoadBalancerSourceRangesKey, svc.SchedulerAnnotation,
		svc.ForwardingAnnotation)
	out.Spec.Selector = nil
	out.Status.LoadBalancer = s.Status.LoadBalancer
	return out
}

func leanNode(n *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: leanMeta(&n.ObjectMeta), Spec: n.Spec, Status: n.Status}
	out.Status.Images = nil
	return out
}

// only returns the entries of m with these keys, nil if it has none.
func only(m map[string]string, keys ...string) map[string]string {
	var out map[string]string
	for _, k := range keys {
		if v, ok := m[k]; ok {
			if out == nil {
				out = map[string]string{}
			}
			out[k] = v
		}
	}
	return out
}
