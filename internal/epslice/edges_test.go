package epslice

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

func TestEmptyPlan(t *testing.T) {
	one := []*discoveryv1.EndpointSlice{{}}
	for _, p := range []Plan{
		{Create: one}, {Update: one}, {Delete: one}, {Create: one, Update: one}, {Create: one, Delete: one}, {Update: one, Delete: one},
	} {
		if p.Empty() {
			t.Errorf("%+v is taken for empty", p)
		}
	}
	if p := (&Plan{Events: []Event{{}}}); !p.Empty() {
		t.Error("a plan of Events alone is not empty")
	}
}

func TestCounts(t *testing.T) {
	for _, c := range []struct {
		status corev1.PodStatus
		want   bool
	}{
		{corev1.PodStatus{}, false},
		{corev1.PodStatus{PodIP: "10.0.0.1"}, true},
		{corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}}, true},
		{corev1.PodStatus{PodIP: "10.0.0.1", Phase: corev1.PodFailed}, false},
		{corev1.PodStatus{PodIP: "10.0.0.1", Phase: corev1.PodSucceeded}, false},
	} {
		if got := Counts(&corev1.Pod{Status: c.status}); got != c.want {
			t.Errorf("%+v: %v", c.status, got)
		}
	}
}

// What an API server leaves out of a port is the same as its default.
func TestPortsKey(t *testing.T) {
	bare := discoveryv1.EndpointPort{Port: ptr[int32](80)}
	full := discoveryv1.EndpointPort{Name: ptr(""), Protocol: ptr(corev1.ProtocolTCP), Port: ptr[int32](80)}
	key := func(p discoveryv1.EndpointPort) portKey { return portsKey([]discoveryv1.EndpointPort{p}) }
	if key(bare) != key(full) {
		t.Errorf("%q and %q", key(bare), key(full))
	}
	for _, other := range []discoveryv1.EndpointPort{
		{Name: ptr("x"), Port: ptr[int32](80)}, {Protocol: ptr(corev1.ProtocolUDP), Port: ptr[int32](80)}, {Port: ptr[int32](81)}, {},
		{Port: ptr[int32](80), AppProtocol: ptr("")},
	} {
		if key(other) == key(bare) {
			t.Errorf("%v is taken for %v", other, bare)
		}
	}
}

// The names are those that every version has given: a create that is repeated by
// another one must not succeed a second time.
func TestNamesAreFixed(t *testing.T) {
	n := namer{owner: owner{name: "web", uid: "svc-1", kind: "Service"}, taken: map[string]bool{}}
	for _, want := range []string{"web-5ln5c", "web-kc2cl", "web-g8w58"} {
		if _, got := n.next(discoveryv1.AddressTypeIPv4); got != want {
			t.Errorf("name %s, want %s", got, want)
		}
	}
}

func TestNoEventsWithoutFaults(t *testing.T) {
	if plan := Slices(manyPods(2).input(0)); len(plan.Events) != 0 {
		t.Errorf("events %v", plan.Events)
	}
}

// Endpoints without the label of v1.33 are right, unless another label differs.
func TestEndpointsWithoutManagedBy(t *testing.T) {
	w := manyPods(2)
	w.service.Labels = map[string]string{"a": "1"}
	pods := w.input(0).Pods
	current := Endpoints(w.service, pods, nil, time.Time{})
	for _, c := range []struct {
		labels map[string]string
		right  bool
	}{
		{map[string]string{"a": "1", LabelEndpointsManagedBy: EndpointsManagedBy}, true},
		{map[string]string{"a": "1"}, true},
		{map[string]string{"a": "2"}, false},
		{map[string]string{"a": "1", "b": "2"}, false},
		{nil, false},
	} {
		current.Labels = c.labels
		if got := Endpoints(w.service, pods, current, time.Time{}); (got == nil) != c.right {
			t.Errorf("labels %v: right %v, want %v", c.labels, got == nil, c.right)
		}
	}
}

func addressList(n int) []corev1.EndpointAddress { return make([]corev1.EndpointAddress, n) }

// Subsets are cut in proportion, and not at all up to the limit.
func TestTruncate(t *testing.T) {
	type subset struct{ ready, not int }
	for _, c := range []struct {
		in, want []subset
		cut      bool
	}{
		{[]subset{{MaxEndpointsAddresses, 0}}, []subset{{MaxEndpointsAddresses, 0}}, false},
		{[]subset{{500, 500}}, []subset{{500, 500}}, false},
		{[]subset{{MaxEndpointsAddresses, 1}}, []subset{{MaxEndpointsAddresses, 0}}, true},
		{[]subset{{MaxEndpointsAddresses + 1, 0}}, []subset{{MaxEndpointsAddresses, 0}}, true},
		{[]subset{{1500, 7}, {500, 0}}, []subset{{750, 0}, {250, 0}}, true},
		{[]subset{{300, 600}, {500, 200}}, []subset{{300, 150}, {500, 50}}, true},
	} {
		var list []corev1.EndpointSubset
		for _, s := range c.in {
			list = append(list, corev1.EndpointSubset{Addresses: addressList(s.ready), NotReadyAddresses: addressList(s.not)})
		}
		cut := truncate(list)
		var got []subset
		for _, s := range list {
			got = append(got, subset{len(s.Addresses), len(s.NotReadyAddresses)})
		}
		if cut != c.cut || !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, cut %v; want %v, %v", c.in, got, cut, c.want, c.cut)
		}
	}
}

func endpointsIn(n int) []discoveryv1.Endpoint { return make([]discoveryv1.Endpoint, n) }

// A slice that is written anyway and is the fullest takes a new endpoint.
func TestFillDirty(t *testing.T) {
	works := []*work{
		{endpoints: endpointsIn(1), dirty: true}, {endpoints: endpointsIn(3), dirty: true},
		{endpoints: endpointsIn(2), dirty: true}, {endpoints: endpointsIn(3)},
	}
	g := &group{works: works, left: []*discoveryv1.Endpoint{{}, {}}}
	g.fillDirty(4)
	var got []int
	for _, w := range works {
		got = append(got, len(w.endpoints))
	}
	if want := []int{1, 4, 3, 3}; !slices.Equal(got, want) || len(g.left) != 0 {
		t.Errorf("slices of %v endpoints, %d left; want %v", got, len(g.left), want)
	}
}

func TestClosestToFull(t *testing.T) {
	works := []*work{{endpoints: endpointsIn(2)}, {endpoints: endpointsIn(3)}, {endpoints: endpointsIn(3)},
		{endpoints: endpointsIn(1)}, {endpoints: endpointsIn(4)}, {endpoints: endpointsIn(3), dirty: true}}
	for left, want := range map[int]*work{1: works[1], 2: works[0], 3: works[3], 4: nil} {
		g := &group{works: works, left: make([]*discoveryv1.Endpoint, left)}
		if got := g.closestToFull(4); got != want {
			t.Errorf("%d left: slice %d", left, slices.Index(works, got))
		}
	}
}

// What is skipped is counted, over all subsets; a slice that is full stays so.
func TestMirrorCountsWhatIsSkipped(t *testing.T) {
	many := func(from, n int) (ips []string) {
		for i := range n {
			ips = append(ips, fmt.Sprintf("192.0.2.%d", from+i))
		}
		return ips
	}
	subset := corev1.EndpointSubset{Addresses: addresses(many(1, 7)...), NotReadyAddresses: addresses(many(8, 3)...)}
	plan := Mirror(userEndpoints(subset), nil, nil, 5)
	want := "A max of 5 addresses can be mirrored to EndpointSlices per Endpoints subset. 5 addresses were skipped"
	if len(plan.Events) != 1 || plan.Events[0].Message != want {
		t.Errorf("events %v, want %q", plan.Events, want)
	}
	same := func(from int) corev1.EndpointSubset {
		return corev1.EndpointSubset{Addresses: addresses(many(from, 4)...)}
	}
	plan = Mirror(userEndpoints(same(1), same(11)), nil, nil, 5)
	if len(plan.Create) != 1 || len(plan.Create[0].Endpoints) != 5 || len(plan.Events) != 0 {
		t.Errorf("%d slices, events %v", len(plan.Create), plan.Events)
	}
}

func TestMirrorHostname(t *testing.T) {
	list := []corev1.EndpointAddress{{IP: "192.0.2.1", Hostname: "db-0"}, {IP: "192.0.2.2"}}
	eps := Mirror(userEndpoints(corev1.EndpointSubset{Addresses: list}), nil, nil, 0).Create[0].Endpoints
	if eps[0].Hostname == nil || *eps[0].Hostname != "db-0" || eps[1].Hostname != nil {
		t.Errorf("hostnames %v, %v", eps[0].Hostname, eps[1].Hostname)
	}
}

// New slices come in the order of family and ports, so that their names are the
// same each time.
func TestMirrorOrder(t *testing.T) {
	var subsets []corev1.EndpointSubset
	for _, port := range []int32{4, 2, 3, 1} {
		subsets = append(subsets, corev1.EndpointSubset{
			Addresses: addresses("2001:db8::1", "192.0.2.1"), Ports: []corev1.EndpointPort{{Port: port}}})
	}
	var got []string
	for _, s := range Mirror(userEndpoints(subsets...), nil, nil, 0).Create {
		got = append(got, fmt.Sprint(s.AddressType, *s.Ports[0].Port))
	}
	if want := []string{"IPv41", "IPv42", "IPv43", "IPv44", "IPv61", "IPv62", "IPv63", "IPv64"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// Other ports are written into the slice of the former ones.
func TestMirrorUsesSlicesAgain(t *testing.T) {
	w := &world{slices: map[string]*discoveryv1.EndpointSlice{}}
	subset := corev1.EndpointSubset{Addresses: addresses("192.0.2.1"), Ports: []corev1.EndpointPort{{Port: 1}}}
	w.apply(t, Mirror(userEndpoints(subset), nil, nil, 0))
	subset.Ports = []corev1.EndpointPort{{Port: 2}}
	plan := Mirror(userEndpoints(subset), slices.Collect(maps.Values(w.slices)), nil, 0)
	if len(plan.Create) != 0 || len(plan.Update) != 1 || len(plan.Delete) != 0 {
		t.Errorf("%d creates, %d updates, %d deletes; want one update", len(plan.Create), len(plan.Update), len(plan.Delete))
	}
}
