package values

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// The values are those of kubelet (ExtractContainerResourceValue of k8s.io/kubectl), whose test has these cases too.
func TestResource(t *testing.T) {
	list := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	main := corev1.Container{Name: "main", Resources: corev1.ResourceRequirements{Limits: list("1100m", "64Mi"), Requests: list("9m", "1000")}}
	open := corev1.Container{Name: "open"}
	f := Facts{Pod: &corev1.Pod{Spec: corev1.PodSpec{
		Containers: []corev1.Container{main, open}, InitContainers: []corev1.Container{{Name: "init"}},
	}}, Allocatable: list("4", "8Gi")}
	for _, c := range []struct {
		of, resource, divisor, want string
	}{
		{"", "limits.cpu", "", "2"}, {"", "limits.cpu", "1m", "1100"}, {"", "limits.cpu", "100m", "11"}, {"", "requests.cpu", "", "1"},
		{"", "limits.memory", "", "67108864"}, {"", "limits.memory", "1Mi", "64"}, {"", "requests.memory", "1Ki", "1"},
		{"open", "limits.cpu", "", "4"}, {"open", "limits.memory", "1Gi", "8"}, {"open", "requests.cpu", "1m", "0"},
		{"init", "limits.ephemeral-storage", "", "0"}, {"main", "limits.hugepages-2Mi", "1Mi", "0"},
		{"gone", "limits.cpu", "", "no such container"}, {"main", "limits.gpu", "", "want limits or requests of cpu"},
		{"main", "cpu", "", "want limits or requests"}, {"main", "limits.cpu", "-1", "want more than 0"},
	} {
		ref := &corev1.ResourceFieldSelector{ContainerName: c.of, Resource: c.resource}
		if c.divisor != "" {
			ref.Divisor = resource.MustParse(c.divisor)
		}
		got, err := Resource(f, &main, ref)
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || !strings.Contains(got, c.want)) {
			t.Errorf("%s of %q by %q: %q, want %q", c.resource, c.of, c.divisor, got, c.want)
		}
	}
	if _, err := Resource(f, nil, &corev1.ResourceFieldSelector{Resource: "limits.cpu"}); err == nil {
		t.Error("a volume's reference without a container was accepted")
	}
}
