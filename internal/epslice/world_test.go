package epslice

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

// world is a Service with its Pods and Nodes that changes at random, and the
// slices that plans have made so far.
type world struct {
	service *corev1.Service
	pods    map[string]*corev1.Pod
	nodes   map[string]*corev1.Node
	slices  map[string]*discoveryv1.EndpointSlice
	hinted  bool
	weigh   bool // Pods have weights, which Kubernetes does not know
	version int
	clock   time.Time
}

func ptr[T any](v T) *T { return &v }

var protocols = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}

func newWorld(t *rapid.T) *world {
	w := &world{
		pods: map[string]*corev1.Pod{}, nodes: map[string]*corev1.Node{}, slices: map[string]*discoveryv1.EndpointSlice{},
		clock: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	w.service = &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "svc-1", Labels: map[string]string{"a": "1"},
			CreationTimestamp: metav1.Time{Time: w.clock}},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "web"}, ClusterIP: "10.96.0.5",
			IPFamilies: rapid.SampledFrom([][]corev1.IPFamily{
				{corev1.IPv4Protocol}, {corev1.IPv6Protocol}, {corev1.IPv4Protocol, corev1.IPv6Protocol},
			}).Draw(t, "families"),
		},
	}
	w.drawPorts(t)
	for i := range 4 {
		w.nodes[fmt.Sprintf("n%d", i)] = testNode(fmt.Sprintf("n%d", i), fmt.Sprintf("z%d", i%3))
	}
	return w
}

func testNode(name, zone string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4")}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if zone != "" {
		n.Labels = map[string]string{corev1.LabelTopologyZone: zone}
	}
	return n
}

func (w *world) drawPorts(t *rapid.T) {
	w.service.Spec.Ports = nil
	targets := []intstr.IntOrString{intstr.FromInt32(80), intstr.FromInt32(9376), intstr.FromString("http"), intstr.FromString("side"),
		intstr.FromString("none")}
	for i := range rapid.IntRange(0, 3).Draw(t, "ports") {
		p := corev1.ServicePort{
			Name: fmt.Sprintf("p%d", i), Port: int32(80 + i), Protocol: rapid.SampledFrom(protocols).Draw(t, "protocol"),
			TargetPort: rapid.SampledFrom(targets).Draw(t, "target"),
		}
		if rapid.Bool().Draw(t, "app") {
			p.AppProtocol = ptr("kubernetes.io/h2c")
		}
		w.service.Spec.Ports = append(w.service.Spec.Ports, p)
	}
}

func (w *world) drawPod(t *rapid.T, name string) {
	n, _ := strconv.Atoi(name[1:])
	w.version++
	node := rapid.SampledFrom([]string{"n0", "n1", "n2", "n3"}).Draw(t, "node")
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name,
			UID: types.UID(fmt.Sprintf("%s-%d", name, rapid.IntRange(1, 2).Draw(t, "uid"))), ResourceVersion: strconv.Itoa(w.version),
			Labels: map[string]string{"app": "web"}},
		Spec: corev1.PodSpec{NodeName: node},
	}
	http := int32(rapid.SampledFrom([]int{8080, 8081}).Draw(t, "http"))
	p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{
		{Name: "http", ContainerPort: http, Protocol: corev1.ProtocolTCP}, {Name: "http", ContainerPort: http + 1, Protocol: corev1.ProtocolSCTP},
	}}}
	p.Spec.InitContainers = []corev1.Container{{
		RestartPolicy: rapid.SampledFrom([]*corev1.ContainerRestartPolicy{nil, ptr(corev1.ContainerRestartPolicyAlways)}).Draw(t, "restart"),
		Ports:         []corev1.ContainerPort{{Name: "side", ContainerPort: 7000, Protocol: corev1.ProtocolTCP}},
	}}
	v4, v6 := fmt.Sprintf("10.244.0.%d", n+1), fmt.Sprintf("fd00:10:244::%x", n+1)
	switch rapid.IntRange(0, 7).Draw(t, "ips") {
	case 0:
	case 1:
		p.Status.PodIPs = []corev1.PodIP{{IP: v4}}
	case 2:
		p.Status.PodIPs = []corev1.PodIP{{IP: v6}, {IP: v4}}
	case 3: // a Pod on the host's network shares the Node's address
		p.Spec.HostNetwork = true
		p.Status.PodIPs = []corev1.PodIP{{IP: "192.168.0." + node[1:]}}
	default:
		p.Status.PodIPs = []corev1.PodIP{{IP: v4}, {IP: v6}}
	}
	if len(p.Status.PodIPs) > 0 {
		p.Status.PodIP = p.Status.PodIPs[0].IP
	}
	p.Status.Phase = rapid.SampledFrom([]corev1.PodPhase{corev1.PodRunning, corev1.PodRunning, corev1.PodRunning, corev1.PodRunning,
		corev1.PodFailed, corev1.PodSucceeded}).Draw(t, "phase")
	if rapid.IntRange(0, 3).Draw(t, "hostname") == 0 {
		p.Spec.Hostname, p.Spec.Subdomain = name, rapid.SampledFrom([]string{"web", "other"}).Draw(t, "subdomain")
	}
	if w.weigh && rapid.IntRange(0, 3).Draw(t, "weighs") == 0 {
		weight := rapid.SampledFrom([]string{"0", "1", "3", "03", "many"}).Draw(t, "weight")
		p.Annotations = map[string]string{svc.WeightAnnotation: weight}
	}
	setReady(p, rapid.IntRange(0, 3).Draw(t, "ready") > 0)
	if rapid.IntRange(0, 5).Draw(t, "terminating") == 0 {
		p.DeletionTimestamp = &metav1.Time{Time: w.clock}
	}
	w.pods[name] = p
}

func setReady(p *corev1.Pod, ready bool) {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
}

// step changes something.
func (w *world) step(t *rapid.T) {
	w.clock = w.clock.Add(time.Second)
	w.service = w.service.DeepCopy()
	pod := fmt.Sprintf("p%d", rapid.IntRange(0, 11).Draw(t, "pod"))
	switch rapid.SampledFrom([]string{"pod", "pod", "pod", "pods", "gone", "flip", "flip", "node", "service", "ports", "hints",
		"rollout"}).Draw(t, "step") {
	case "pod":
		w.drawPod(t, pod)
	case "pods":
		for range rapid.IntRange(2, 6).Draw(t, "many") {
			w.drawPod(t, fmt.Sprintf("p%d", rapid.IntRange(0, 11).Draw(t, "pod")))
		}
	case "gone":
		delete(w.pods, pod)
	case "flip":
		if p := w.pods[pod]; p != nil {
			p = p.DeepCopy()
			setReady(p, !Ready(p))
			w.pods[pod] = p
		}
	case "node":
		name := rapid.SampledFrom([]string{"n0", "n1", "n2", "n3"}).Draw(t, "node")
		if rapid.IntRange(0, 4).Draw(t, "gone") == 0 {
			delete(w.nodes, name)
		} else {
			w.nodes[name] = testNode(name, rapid.SampledFrom([]string{"", "z0", "z1", "z2"}).Draw(t, "zone"))
		}
	case "service":
		w.service.Spec.PublishNotReadyAddresses = rapid.Bool().Draw(t, "publish")
		w.service.Labels = map[string]string{"a": rapid.SampledFrom([]string{"1", "2"}).Draw(t, "label"), discoveryv1.LabelManagedBy: "me"}
	case "ports":
		w.drawPorts(t)
	case "hints":
		w.service.Spec.TrafficDistribution = rapid.SampledFrom([]*string{nil, ptr("PreferClose"), ptr("PreferSameZone"),
			ptr("PreferSameNode")}).Draw(t, "distribution")
	case "rollout":
		for _, name := range slices.Sorted(maps.Keys(w.pods)) {
			delete(w.pods, name)
		}
		for range rapid.IntRange(0, 8).Draw(t, "many") {
			w.drawPod(t, fmt.Sprintf("p%d", rapid.IntRange(12, 23).Draw(t, "pod")))
		}
	}
}

func (w *world) input(limit int) Input {
	in := Input{
		Service: w.service, MaxEndpoints: limit, Trigger: w.clock, Hinted: w.hinted,
		Node: func(name string) *corev1.Node { return w.nodes[name] },
	}
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		in.Pods = append(in.Pods, w.pods[name])
	}
	for _, name := range slices.Sorted(maps.Keys(w.slices)) {
		in.Present = append(in.Present, w.slices[name])
	}
	return in
}

// apply writes the plan as an API server would.
func (w *world) apply(t interface{ Fatalf(string, ...any) }, plan *Plan) {
	for _, s := range plan.Create {
		if w.slices[s.Name] != nil {
			t.Fatalf("the name %s of a new slice is taken", s.Name)
		}
		w.put(s)
	}
	for _, s := range plan.Update {
		old := w.slices[s.Name]
		if old == nil || old.ResourceVersion != s.ResourceVersion || old.UID != s.UID || old.AddressType != s.AddressType {
			t.Fatalf("update of %s does not fit what is there", s.Name)
		}
		w.put(s)
	}
	for _, s := range plan.Delete {
		if w.slices[s.Name] == nil {
			t.Fatalf("delete of %s, which is not there", s.Name)
		}
		delete(w.slices, s.Name)
	}
	w.hinted = plan.Hints != nil
}

func (w *world) put(s *discoveryv1.EndpointSlice) {
	s = s.DeepCopy()
	w.version++
	s.ResourceVersion = strconv.Itoa(w.version)
	if s.UID == "" {
		s.UID = types.UID("slice-" + s.ResourceVersion)
	}
	w.slices[s.Name] = s
}
