package usage

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/registry/resourcequota"
)

// quantities parses the amounts of a list.
func quantities(in map[corev1.ResourceName]string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, amount := range in {
		out[name] = resource.MustParse(amount)
	}
	return out
}

// podOf returns a Pod of one container with these requests and limits.
func podOf(requests, limits map[corev1.ResourceName]string) *corev1.Pod {
	return &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Name: "c", Resources: corev1.ResourceRequirements{Requests: quantities(requests), Limits: quantities(limits)}}}}}
}

// Pods use what upstream's podEvaluator says.
func TestPodUsage(t *testing.T) {
	t.Parallel()
	const gpu corev1.ResourceName = "example.com/gpu"
	full := podOf(map[corev1.ResourceName]string{"cpu": "1", "memory": "2Gi", gpu: "3", "hugepages-2Mi": "4Mi", "ephemeral-storage": "5Gi"},
		map[corev1.ResourceName]string{"cpu": "6", "memory": "7Gi", gpu: "3"})
	want := quantities(map[corev1.ResourceName]string{
		"count/pods": "1", "pods": "1", "cpu": "1", "requests.cpu": "1", "memory": "2Gi", "requests.memory": "2Gi", "limits.cpu": "6",
		"limits.memory": "7Gi", "requests.example.com/gpu": "3", "hugepages-2Mi": "4Mi", "requests.hugepages-2Mi": "4Mi",
		"ephemeral-storage": "5Gi", "requests.ephemeral-storage": "5Gi",
	})
	e := Evaluator(corev1.Resource("pods"))
	if got, err := e.Usage(full); err != nil || !quota.Equals(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if got := e.MatchingResources(quota.ResourceNames(want)); len(got) != len(want) {
		t.Errorf("%v match; want all of %v", got, want)
	}
	onlyCount := quantities(map[corev1.ResourceName]string{"count/pods": "1"})
	over, lost := full.DeepCopy(), full.DeepCopy()
	over.Status.Phase = corev1.PodSucceeded
	lost.DeletionTimestamp, lost.DeletionGracePeriodSeconds = ptr.To(metav1.NewTime(time.Now().Add(-time.Minute))), ptr.To[int64](30)
	for name, pod := range map[string]*corev1.Pod{"ended": over, "overdue": lost} {
		if got, err := e.Usage(pod); err != nil || !quota.Equals(got, onlyCount) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// Each container must ask for CPU and memory where these are limited, as in Kubernetes, but for nothing else.
func TestPodConstraints(t *testing.T) {
	t.Parallel()
	e := Evaluator(corev1.Resource("pods"))
	required := []corev1.ResourceName{"pods", "limits.memory", "cpu", "requests.example.com/gpu"}
	enough := podOf(map[corev1.ResourceName]string{"cpu": "1"}, map[corev1.ResourceName]string{"memory": "1"})
	if err := e.Constraints(required, enough); err != nil {
		t.Error(err)
	}
	pod := podOf(nil, nil)
	err := e.Constraints(required, pod)
	if err == nil || err.Error() != "must specify cpu for: c; limits.memory for: c" {
		t.Errorf("nothing asked for: %v", err)
	}
	pod.ResourceVersion = "1"
	if err := e.Constraints(required, pod); err != nil {
		t.Errorf("an update: %v", err)
	}
}

// A Pod is in one of each pair of scopes, and a quota counts the Pods that are in all of its scopes.
func TestScopes(t *testing.T) {
	t.Parallel()
	pod := podOf(nil, nil)
	pod.Spec.ActiveDeadlineSeconds, pod.Spec.PriorityClassName = ptr.To[int64](1), "high"
	pod.Status.QOSClass = corev1.PodQOSBestEffort
	exists := func(scope corev1.ResourceQuotaScope) corev1.ScopedResourceSelectorRequirement {
		return corev1.ScopedResourceSelectorRequirement{ScopeName: scope, Operator: corev1.ScopeSelectorOpExists}
	}
	class := func(op corev1.ScopeSelectorOperator, values ...string) corev1.ScopedResourceSelectorRequirement {
		return corev1.ScopedResourceSelectorRequirement{ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: op, Values: values}
	}
	other := podOf(map[corev1.ResourceName]string{"cpu": "1"}, nil)
	other.Status.QOSClass = corev1.PodQOSBurstable
	other.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
		PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{
			{PodAffinityTerm: corev1.PodAffinityTerm{NamespaceSelector: &metav1.LabelSelector{}}}}}}
	for _, c := range []struct {
		scope      corev1.ScopedResourceSelectorRequirement
		pod, other bool
	}{
		{exists(corev1.ResourceQuotaScopeTerminating), true, false}, {exists(corev1.ResourceQuotaScopeNotTerminating), false, true},
		{exists(corev1.ResourceQuotaScopeBestEffort), true, false}, {exists(corev1.ResourceQuotaScopeNotBestEffort), false, true},
		{exists(corev1.ResourceQuotaScopePriorityClass), true, false}, {class(corev1.ScopeSelectorOpDoesNotExist), false, true},
		{class(corev1.ScopeSelectorOpIn, "high"), true, false}, {class(corev1.ScopeSelectorOpIn, "low"), false, false},
		{class(corev1.ScopeSelectorOpNotIn, "high"), false, true}, {class(corev1.ScopeSelectorOpNotIn, "low"), true, true},
		{exists(corev1.ResourceQuotaScopeCrossNamespacePodAffinity), false, true},
	} {
		a, err := inScope(c.scope, pod)
		b, otherErr := inScope(c.scope, other)
		if err != nil || otherErr != nil || a != c.pod || b != c.other {
			t.Errorf("%+v: %t and %t, %v, %v; want %t and %t", c.scope, a, b, err, otherErr, c.pod, c.other)
		}
	}
	r := &corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{
		Hard:   quantities(map[corev1.ResourceName]string{"pods": "9", "requests.cpu": "9"}),
		Scopes: []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeNotBestEffort}}}
	got, err := Sum(r, corev1.Resource("pods"), []runtime.Object{pod, other, other})
	if want := quantities(map[corev1.ResourceName]string{"pods": "2", "requests.cpu": "2"}); err != nil ||
		!quota.Equals(quota.Mask(got, quota.ResourceNames(want)), want) {
		t.Errorf("the sum: %v, %v; want %v", got, err, want)
	}
}

// Services use node ports and load balancers by their type, before these are allocated.
func TestServiceUsage(t *testing.T) {
	t.Parallel()
	e := Evaluator(corev1.Resource("services"))
	for _, c := range []struct {
		spec             corev1.ServiceSpec
		ports, balancers string
	}{
		{corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP}, "0", "0"},
		{corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName}, "0", "0"},
		{corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort}, "2", "0"},
		{corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}, "2", "1"},
		{corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, AllocateLoadBalancerNodePorts: ptr.To(false)}, "1", "1"},
	} {
		c.spec.Ports = []corev1.ServicePort{{Port: 1}, {Port: 2, NodePort: 30000}}
		got, err := e.Usage(&corev1.Service{Spec: c.spec})
		want := quantities(map[corev1.ResourceName]string{"services": "1", "count/services": "1", "services.nodeports": c.ports,
			"services.loadbalancers": c.balancers})
		if err != nil || !quota.Equals(got, want) {
			t.Errorf("%+v: %v, %v; want %v", c.spec, got, err, want)
		}
	}
}

// An Event counts under the names of both groups and with its bytes, through whichever group it comes.
func TestEventUsage(t *testing.T) {
	t.Parallel()
	event := &corev1.Event{Message: strings.Repeat("x", 1000)}
	hard := quantities(map[corev1.ResourceName]string{"count/events": "1", "count/events.events.k8s.io": "1", resourcequota.Bytes: "1"})
	r := &corev1.ResourceQuota{Status: corev1.ResourceQuotaStatus{Hard: hard}}
	for _, group := range []string{"", eventsv1.GroupName} {
		resource := corev1.Resource("events")
		resource.Group = group
		e := WithBytes(Evaluator(resource), func(string) bool { return true })
		used, err := e.Usage(event)
		bytes := used[resourcequota.Bytes]
		if err != nil || len(used) != len(hard) || bytes.Value() < 1000 || len(e.MatchingResources(quota.ResourceNames(hard))) != len(hard) {
			t.Errorf("%v: %v, %v", resource, used, err)
		}
		if ok, err := e.Matches(r, event); !ok || err != nil || e.GroupResource() != resource {
			t.Errorf("%v: %t, %v", resource, ok, err)
		}
	}
}
