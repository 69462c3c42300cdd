package values

import (
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Resource returns the value of a resourceFieldRef, rounded up to the divisor. container is the one to ask where the
// reference names none, nil where it must name one. As with a kubelet, a limit of CPU or memory that is not set is what
// the node has.
func Resource(f Facts, container *corev1.Container, ref *corev1.ResourceFieldSelector) (string, error) {
	if ref.ContainerName != "" {
		container = nil
		for _, list := range [][]corev1.Container{f.Pod.Spec.Containers, f.Pod.Spec.InitContainers} {
			for i := range list {
				if list[i].Name == ref.ContainerName {
					container = &list[i]
				}
			}
		}
		if container == nil {
			return "", fmt.Errorf("resourceFieldRef.containerName %q: the Pod has no such container", ref.ContainerName)
		}
	}
	if container == nil {
		return "", fmt.Errorf("resourceFieldRef.containerName is required in a volume, for %s", ref.Resource)
	}
	kind, name, _ := strings.Cut(ref.Resource, ".")
	var set corev1.ResourceList
	switch kind {
	case "limits":
		set = container.Resources.Limits
	case "requests":
		set = container.Resources.Requests
	}
	n := corev1.ResourceName(name)
	if set == nil && kind != "limits" && kind != "requests" || n != corev1.ResourceCPU && n != corev1.ResourceMemory &&
		n != corev1.ResourceEphemeralStorage && !strings.HasPrefix(name, corev1.ResourceHugePagesPrefix) {
		return "", fmt.Errorf("resourceFieldRef.resource %q is not supported: want limits or requests of cpu, memory, ephemeral-storage "+
			"or hugepages-SIZE, such as limits.cpu", ref.Resource)
	}
	q, ok := set[n]
	if !ok && kind == "limits" {
		q = f.Allocatable[n]
	}
	divisor := ref.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	if divisor.Sign() < 0 {
		return "", fmt.Errorf("resourceFieldRef.divisor %s is negative: want more than 0", divisor.String())
	}
	value, unit := q.Value(), divisor.Value()
	if n == corev1.ResourceCPU {
		value, unit = q.MilliValue(), divisor.MilliValue()
	}
	if value > 0 {
		value = (value-1)/unit + 1
	}
	return strconv.FormatInt(value, 10), nil
}
