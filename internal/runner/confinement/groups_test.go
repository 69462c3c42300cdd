package confinement

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
)

func resources(kv ...string) corev1.ResourceRequirements {
	r := corev1.ResourceRequirements{Limits: corev1.ResourceList{}, Requests: corev1.ResourceList{}}
	for i := 0; i < len(kv); i += 3 {
		list := r.Limits
		if kv[i] == "request" {
			list = r.Requests
		}
		list[corev1.ResourceName(kv[i+1])] = resource.MustParse(kv[i+2])
	}
	return r
}

func TestPodLimits(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	one := resources("limit", "memory", "64Mi", "limit", "cpu", "500m")
	for _, c := range []struct {
		name string
		spec corev1.PodSpec
		want cgroup.Limits
	}{
		{"none", corev1.PodSpec{Containers: []corev1.Container{{}}}, cgroup.Limits{Weight: 1}},
		{"sum", corev1.PodSpec{Containers: []corev1.Container{{Resources: one}, {Resources: one}}},
			cgroup.Limits{Memory: 128 << 20, CPU: 1000, Weight: 100}},
		{"one without", corev1.PodSpec{Containers: []corev1.Container{{Resources: one}, {}}}, cgroup.Limits{Weight: 59}},
		{"sidecar", corev1.PodSpec{
			InitContainers: []corev1.Container{{Resources: one, RestartPolicy: &always}}, Containers: []corev1.Container{{Resources: one}},
		}, cgroup.Limits{Memory: 128 << 20, CPU: 1000, Weight: 100}},
		{"large init", corev1.PodSpec{
			InitContainers: []corev1.Container{{Resources: resources("limit", "memory", "1Gi", "limit", "cpu", "2")}},
			Containers:     []corev1.Container{{Resources: one}},
		}, cgroup.Limits{Memory: 1 << 30, CPU: 2000, Weight: 59}},
		{"of the pod", corev1.PodSpec{
			Resources:  &corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}},
			Containers: []corev1.Container{{}},
		}, cgroup.Limits{Memory: 1 << 30, Weight: 1}},
	} {
		if got := PodLimits(&corev1.Pod{Spec: c.spec}); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestOOMScoreAdj(t *testing.T) {
	const capacity = 10 << 30
	for _, c := range []struct {
		r    corev1.ResourceRequirements
		want int
	}{
		{resources(), 1000},
		{resources("limit", "memory", "1Gi", "limit", "cpu", "1"), -997},
		{resources("request", "memory", "1Gi"), 900},
		{resources("request", "memory", "10Gi"), 3},
		{resources("request", "cpu", "1"), 999},
	} {
		k := corev1.Container{Resources: c.r}
		if got := OOMScoreAdj(&corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{k}}}, &k, capacity); got != c.want {
			t.Errorf("%v: %d, want %d", c.r, got, c.want)
		}
	}
}

func TestWeight(t *testing.T) {
	for milli, want := range map[int64]int64{0: 1, 2: 1, 100: 17, 1000: 100, 100_000: 4429, 1_000_000: 10_000} {
		if got := weight(milli); got != want {
			t.Errorf("weight(%d) = %d, want %d", milli, got, want)
		}
	}
}
