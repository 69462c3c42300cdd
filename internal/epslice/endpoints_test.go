package epslice

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"
)

// subsetText is the subsets as one line each: "ports: ready | not ready".
func subsetText(subsets []corev1.EndpointSubset) string {
	var b strings.Builder
	for _, s := range subsets {
		var ports, ready, not []string
		for _, p := range s.Ports {
			ports = append(ports, fmt.Sprintf("%s/%d/%s", p.Name, p.Port, p.Protocol))
		}
		for _, a := range s.Addresses {
			ready = append(ready, a.IP)
		}
		for _, a := range s.NotReadyAddresses {
			not = append(not, a.IP)
		}
		fmt.Fprintf(&b, "%s: %s | %s\n", strings.Join(ports, ","), strings.Join(ready, " "), strings.Join(not, " "))
	}
	return b.String()
}

func testPod(name, ip string, ready bool, named int32) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)}}
	p.Spec.NodeName = "n0"
	p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: named}}}}
	p.Status.PodIP = ip
	setReady(p, ready)
	return p
}

// behaviours 12, 17 to 19: one subset for each set of resolved ports, addresses in
// order, the not ready ones apart.
func TestEndpointsOf(t *testing.T) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", Labels: map[string]string{"a": "1"}}}
	service.Spec.ClusterIP = "10.96.0.5"
	service.Spec.Ports = []corev1.ServicePort{
		{Name: "http", Port: 80, TargetPort: intstr.FromString("http")},
		{Name: "admin", Port: 81, TargetPort: intstr.FromInt32(9000)},
	}
	terminating := testPod("e", "10.0.0.5", true, 8080)
	terminating.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	failed := testPod("f", "10.0.0.6", false, 8080)
	failed.Status.Phase = corev1.PodFailed
	pods := []*corev1.Pod{
		testPod("a", "10.0.0.10", true, 8080), testPod("b", "10.0.0.9", true, 8080), testPod("c", "10.0.0.3", false, 8080),
		testPod("d", "10.0.0.4", true, 9090), terminating, failed, testPod("g", "", true, 8080), testPod("h", "fd00::1", true, 8080),
	}
	got := Endpoints(service, pods, nil, time.Unix(1700000000, 5))
	want := "admin/9000/TCP,http/8080/TCP: 10.0.0.9 10.0.0.10 | 10.0.0.3\nadmin/9000/TCP,http/9090/TCP: 10.0.0.4 | \n"
	if text := subsetText(got.Subsets); text != want {
		t.Errorf("got\n%swant\n%s", text, want)
	}
	if !maps.Equal(got.Labels, map[string]string{"a": "1", LabelEndpointsManagedBy: EndpointsManagedBy}) {
		t.Errorf("labels %v", got.Labels)
	}
	if at := got.Annotations[corev1.EndpointsLastChangeTriggerTime]; at != "2023-11-14T22:13:20.000000005Z" {
		t.Errorf("trigger time %q", at)
	}
	service.Spec.PublishNotReadyAddresses = true
	service.Spec.ClusterIP = corev1.ClusterIPNone
	service.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
	got = Endpoints(service, append(pods, testPod("i", "fd00::2", false, 8080)), got, time.Time{})
	if text := subsetText(got.Subsets); text != "admin/9000/TCP,http/8080/TCP: fd00::1 fd00::2 | \n" {
		t.Errorf("got\n%s", text)
	}
	if _, ok := got.Labels[corev1.IsHeadlessService]; !ok || len(got.Annotations) != 0 {
		t.Errorf("labels %v, annotations %v", got.Labels, got.Annotations)
	}
}

// A headless Service needs no ports; any other without ports has no endpoints.
func TestEndpointsWithoutPorts(t *testing.T) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"}}
	pods := []*corev1.Pod{testPod("a", "10.0.0.1", true, 1)}
	service.Spec.ClusterIP = corev1.ClusterIPNone
	if text := subsetText(Endpoints(service, pods, nil, time.Time{}).Subsets); text != ": 10.0.0.1 | \n" {
		t.Errorf("headless: %q", text)
	}
	service.Spec.Ports = []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromString("none")}}
	if text := subsetText(Endpoints(service, pods, nil, time.Time{}).Subsets); text != "" {
		t.Errorf("no such port: %q", text)
	}
}

// behaviour 28: at most 1000 addresses, ready ones first, with the annotation.
func TestEndpointsTruncated(t *testing.T) {
	w := manyPods(1100)
	pods := slices.Collect(maps.Values(w.pods))
	count := func(e *corev1.Endpoints) (ready, not int) {
		for _, s := range e.Subsets {
			ready += len(s.Addresses)
			not += len(s.NotReadyAddresses)
		}
		return
	}
	e := Endpoints(w.service, pods, nil, time.Time{})
	if ready, not := count(e); ready != 1000 || not != 0 || e.Annotations[corev1.EndpointsOverCapacity] != "truncated" {
		t.Errorf("%d ready, %d not, annotations %v", ready, not, e.Annotations)
	}
	if again := Endpoints(w.service, pods, e, time.Time{}); again != nil {
		t.Error("a truncated object is written again and again")
	}
	for i := range 300 {
		setReady(w.pods[fmt.Sprintf("p%d", i)], false)
	}
	e = Endpoints(w.service, pods, e, time.Time{})
	if ready, not := count(e); ready != 800 || not != 200 {
		t.Errorf("%d ready, %d not; want 800 and 200", ready, not)
	}
	for i := 900; i < 1100; i++ {
		delete(w.pods, fmt.Sprintf("p%d", i))
	}
	e = Endpoints(w.service, slices.Collect(maps.Values(w.pods)), e, time.Time{})
	if _, marked := e.Annotations[corev1.EndpointsOverCapacity]; marked {
		t.Error("the annotation stays without need")
	}
}

// Whatever order the API server keeps subsets, addresses and ports in, the
// object is not written again; and every address that counts is there once.
func TestEndpointsExactAndIdempotent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		var current *corev1.Endpoints
		for range 8 {
			w.step(t)
			pods := w.input(0).Pods
			if next := Endpoints(w.service, pods, current, w.clock); next != nil {
				current = next.DeepCopy()
			}
			shuffle(current, rand.New(rand.NewPCG(uint64(rapid.IntRange(0, 1000).Draw(t, "shuffle")), 0)))
			if Endpoints(w.service, pods, current, w.clock) != nil {
				t.Fatalf("written again:\n%s", subsetText(current.Subsets))
			}
			seen := map[string]int{}
			for _, s := range current.Subsets {
				for _, a := range append(slices.Clone(s.Addresses), s.NotReadyAddresses...) {
					seen[a.TargetRef.Name]++
				}
				for _, a := range s.Addresses {
					if p := w.pods[a.TargetRef.Name]; !Ready(p) && !w.service.Spec.PublishNotReadyAddresses {
						t.Fatalf("%s is not ready", p.Name)
					}
				}
			}
			for name, n := range seen {
				p := w.pods[name]
				if n != 1 || !Counts(p) || p.DeletionTimestamp != nil && !w.service.Spec.PublishNotReadyAddresses {
					t.Fatalf("%s is there %d times", name, n)
				}
			}
		}
	})
}

func shuffle(e *corev1.Endpoints, r *rand.Rand) {
	r.Shuffle(len(e.Subsets), func(i, j int) { e.Subsets[i], e.Subsets[j] = e.Subsets[j], e.Subsets[i] })
	for _, s := range e.Subsets {
		r.Shuffle(len(s.Ports), func(i, j int) { s.Ports[i], s.Ports[j] = s.Ports[j], s.Ports[i] })
		r.Shuffle(len(s.Addresses), func(i, j int) { s.Addresses[i], s.Addresses[j] = s.Addresses[j], s.Addresses[i] })
	}
}
