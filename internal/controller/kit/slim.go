package kit

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/placement"
	"github.com/fairlead/fairlead/internal/svc"
)

// SlimPod keeps of a Pod what the controllers decide by. They write Pods only by
// patches and subresources, which leave the rest as it is.
func SlimPod(p *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: p.Name, Namespace: p.Namespace, UID: p.UID, ResourceVersion: p.ResourceVersion,
			CreationTimestamp: p.CreationTimestamp, DeletionTimestamp: p.DeletionTimestamp,
			DeletionGracePeriodSeconds: p.DeletionGracePeriodSeconds,
			Labels:                     p.Labels, OwnerReferences: p.OwnerReferences,
		},
		Spec: corev1.PodSpec{
			NodeName: p.Spec.NodeName, NodeSelector: p.Spec.NodeSelector, SchedulerName: p.Spec.SchedulerName,
			SchedulingGates: p.Spec.SchedulingGates, Affinity: p.Spec.Affinity,
			TopologySpreadConstraints: p.Spec.TopologySpreadConstraints,
			Hostname:                  p.Spec.Hostname, Subdomain: p.Spec.Subdomain, Tolerations: p.Spec.Tolerations,
			Containers: slimContainers(p.Spec.Containers), InitContainers: slimContainers(p.Spec.InitContainers),
		},
		Status: corev1.PodStatus{Phase: p.Status.Phase, PodIP: p.Status.PodIP, PodIPs: p.Status.PodIPs},
	}
	if r := placement.Requests(p); len(r) > 0 {
		out.Spec.Resources = &corev1.ResourceRequirements{Requests: r} // of all containers together
	}
	for _, key := range []string{corev1.PodDeletionCost, svc.WeightAnnotation} {
		if v, ok := p.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&out.ObjectMeta, key, v)
		}
	}
	for i := range p.Status.ContainerStatuses {
		if n := p.Status.ContainerStatuses[i].RestartCount; n > 0 {
			out.Status.ContainerStatuses = append(out.Status.ContainerStatuses, corev1.ContainerStatus{RestartCount: n})
		}
	}
	for i := range p.Status.Conditions {
		if c := p.Status.Conditions[i]; c.Type == corev1.PodReady || c.Type == corev1.PodScheduled || c.Type == barrier.Drained {
			out.Status.Conditions = append(out.Status.Conditions, c)
		}
	}
	return out
}

// slimContainers keeps containers with named ports, which targetPort may mean, and with
// ports of the node.
func slimContainers(in []corev1.Container) []corev1.Container {
	var out []corev1.Container
	for i := range in {
		c := corev1.Container{Name: in[i].Name, RestartPolicy: in[i].RestartPolicy}
		for _, p := range in[i].Ports {
			if p.Name != "" || p.HostPort != 0 {
				c.Ports = append(c.Ports, corev1.ContainerPort{
					Name: p.Name, ContainerPort: p.ContainerPort, Protocol: p.Protocol, HostPort: p.HostPort, HostIP: p.HostIP,
				})
			}
		}
		if len(c.Ports) > 0 {
			out = append(out, c)
		}
	}
	return out
}
