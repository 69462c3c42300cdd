package epslice

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

const testLimit = 3

// behaviours 12, 17 to 19, 27, 28: after every step of a random history each
// selected Pod that counts is in exactly one endpoint of each family it has,
// no slice is over the limit, and planning again finds nothing to do.
func TestPlanIsExactAndIdempotent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		w.weigh = true
		for range 12 {
			w.step(t)
			in := w.input(testLimit)
			plan := Slices(in)
			if least := leastWrites(w, in); len(plan.Create)+len(plan.Update)+len(plan.Delete) != least {
				t.Fatalf("%d creates, %d updates, %d deletes; %d writes are enough", len(plan.Create), len(plan.Update), len(plan.Delete), least)
			}
			w.apply(t, plan)
			checkExact(t, w)
			if again := Slices(w.input(testLimit)); !again.Empty() {
				t.Fatalf("a second plan wants %d creates, %d updates, %d deletes", len(again.Create), len(again.Update), len(again.Delete))
			}
		}
	})
}

func checkExact(t *rapid.T, w *world) {
	t.Helper()
	found := map[string]int{}
	families := map[discoveryv1.AddressType]int{}
	for _, s := range w.slices {
		families[s.AddressType]++
		if len(s.Endpoints) > testLimit {
			t.Fatalf("%s holds %d endpoints", s.Name, len(s.Endpoints))
		}
		for _, e := range s.Endpoints {
			found[string(s.AddressType)+"/"+e.TargetRef.Name]++
			p := w.pods[e.TargetRef.Name]
			if p == nil {
				t.Fatalf("%s is in %s and does not exist", e.TargetRef.Name, s.Name)
			}
			checkEndpoint(t, w, p, &e, s)
		}
		if s.Labels[discoveryv1.LabelServiceName] != "web" || s.Labels[discoveryv1.LabelManagedBy] != ManagedBySelector ||
			s.Labels["a"] != w.service.Labels["a"] {
			t.Fatalf("labels of %s: %v", s.Name, s.Labels)
		}
	}
	want := 0
	for _, family := range w.service.Spec.IPFamilies {
		if families[discoveryv1.AddressType(family)] == 0 {
			t.Fatalf("no slice of family %s", family)
		}
		for _, p := range w.pods {
			if w.nodes[p.Spec.NodeName] == nil && !w.service.Spec.PublishNotReadyAddresses || !Counts(p) {
				continue
			}
			for _, ip := range p.Status.PodIPs {
				if _, kind, _ := parseIP(ip.IP); kind == discoveryv1.AddressType(family) {
					want++
					if n := found[string(family)+"/"+p.Name]; n != 1 {
						t.Fatalf("%s is there %d times in %s", p.Name, n, family)
					}
				}
			}
		}
	}
	if len(found) != want {
		t.Fatalf("%d endpoints, want %d", len(found), want)
	}
}

func checkEndpoint(t *rapid.T, w *world, p *corev1.Pod, e *discoveryv1.Endpoint, s *discoveryv1.EndpointSlice) {
	t.Helper()
	serving, terminating := Ready(p), p.DeletionTimestamp != nil
	ready := w.service.Spec.PublishNotReadyAddresses || serving && !terminating
	if *e.Conditions.Ready != ready || *e.Conditions.Serving != serving || *e.Conditions.Terminating != terminating ||
		e.TargetRef.UID != p.UID {
		t.Fatalf("%s: wrong conditions or target: %+v", p.Name, e)
	}
	zone := ""
	if n := w.nodes[p.Spec.NodeName]; n != nil {
		zone = n.Labels[corev1.LabelTopologyZone]
	}
	if (e.Zone == nil) != (zone == "") || e.Zone != nil && *e.Zone != zone {
		t.Fatalf("%s: zone %v, want %q", p.Name, e.Zone, zone)
	}
	if k := newPortResolver(w.service).of(p).key; k != portsKey(s.Ports) {
		t.Fatalf("%s is in a slice with other ports", p.Name)
	}
	want, _ := svc.ParseWeight(p.Annotations[svc.WeightAnnotation])
	if got, ok := svc.ParseWeight(s.Annotations[svc.WeightAnnotation]); got != want || !ok {
		t.Fatalf("%s is in a slice of weight %d, want %d", p.Name, got, want)
	}
}

// leastWrites is a second opinion on the number of writes, by trying: each
// endpoint that is in no slice of its ports yet may go to any slice or a new
// one; a slice costs one write if what is in it has to change.
func leastWrites(w *world, in Input) int {
	total := 0
	wanted := map[discoveryv1.AddressType]bool{}
	for _, family := range in.Service.Spec.IPFamilies {
		wanted[discoveryv1.AddressType(family)] = true
	}
	for _, s := range in.Present {
		if !wanted[s.AddressType] {
			total++
		}
	}
	for _, family := range in.Service.Spec.IPFamilies {
		total += leastWritesOf(w, in, discoveryv1.AddressType(family))
	}
	return total
}

// slot is a slice in the search: its ports once something is in it.
type slot struct {
	key   portKey
	n     int
	dirty bool // costs a write already
	empty bool // costs a write unless something is put into it and it is not new
	fresh bool
}

func leastWritesOf(w *world, in Input, t discoveryv1.AddressType) int {
	// The wanted endpoints are taken from a plan that starts with nothing.
	bare := in
	bare.Present = nil
	want := map[endpointKey]*discoveryv1.Endpoint{}
	keys := map[endpointKey]portKey{}
	labels := wantedLabels(in.Service, ManagedBySelector)
	for _, s := range Slices(bare).Create {
		for i := range s.Endpoints {
			if s.AddressType == t {
				want[keyOf(&s.Endpoints[i])] = &s.Endpoints[i]
				keys[keyOf(&s.Endpoints[i])] = groupKey(s)
			}
		}
	}
	// Ports that Pods have, though none of them has an address of this family:
	// an empty slice of those ports may stay.
	p := &planner{in: &in, resolver: newPortResolver(in.Service), nodes: map[string]*nodeFacts{}, plan: &Plan{}}
	p.collectPods()
	known := map[portKey]bool{}
	for _, f := range p.pods {
		known[f.ports.key.weighted(f.weight)] = true
	}
	var slots []slot
	for _, s := range in.Present {
		if s.AddressType != t {
			continue
		}
		sl := slot{key: groupKey(s), dirty: !maps.Equal(s.Labels, labels)}
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			if x := want[keyOf(e)]; x != nil && keys[keyOf(e)] == sl.key {
				sl.n++
				sl.dirty = sl.dirty || !sameEndpoint(x, e) || !sameHints(x.Hints, e.Hints)
				delete(want, keyOf(e))
			} else {
				sl.dirty = true
			}
		}
		if sl.n == 0 && (len(s.Endpoints) > 0 || !known[sl.key]) {
			sl.empty, sl.dirty = true, true
		}
		slots = append(slots, sl)
	}
	left := map[portKey]int{}
	for k := range want {
		left[keys[k]]++
	}
	if len(left) == 0 && !slices.ContainsFunc(slots, func(s slot) bool { return !s.empty }) {
		// Only a placeholder stays; it costs nothing if it is one already.
		for _, s := range in.Present {
			if s.AddressType == t && len(s.Ports) == 0 && len(s.Endpoints) == 0 && maps.Equal(s.Labels, labels) {
				return len(slots) - 1
			}
		}
		return max(1, len(slots))
	}
	return search(slots, left, slices.Sorted(maps.Keys(left)))
}

// search tries every slice for the next endpoint.
func search(slots []slot, left map[portKey]int, order []portKey) int {
	var next portKey
	found := false
	for _, k := range order {
		if left[k] > 0 {
			next, found = k, true
			break
		}
	}
	if !found {
		cost := 0
		for _, s := range slots {
			if s.dirty {
				cost++
			}
		}
		return cost
	}
	left[next]--
	best := 1 << 30
	tried := map[slot]bool{}
	for i := range slots {
		s := slots[i]
		if tried[s] || s.n >= testLimit || !s.empty && s.key != next {
			continue
		}
		tried[s] = true
		slots[i] = slot{key: next, n: s.n + 1, dirty: true}
		best = min(best, search(slots, left, order))
		slots[i] = s
	}
	// A new slice is worth trying only where no written one has room: it is
	// never cheaper than that.
	if best >= cost(slots)+1 {
		best = min(best, search(append(slices.Clone(slots), slot{key: next, n: 1, dirty: true, fresh: true}), left, order))
	}
	left[next]++
	return best
}

func cost(slots []slot) int {
	n := 0
	for _, s := range slots {
		if s.dirty {
			n++
		}
	}
	return n
}

// A lower limit is kept too, when the controller starts again with it.
func TestLoweredLimit(t *testing.T) {
	w := manyPods(10)
	w.apply(t, Slices(w.input(10)))
	if len(w.slices) != 1 {
		t.Fatalf("%d slices, want 1", len(w.slices))
	}
	w.apply(t, Slices(w.input(4)))
	total := 0
	for _, s := range w.slices {
		total += len(s.Endpoints)
		if len(s.Endpoints) > 4 {
			t.Errorf("%s holds %d endpoints", s.Name, len(s.Endpoints))
		}
	}
	if total != 10 || len(w.slices) != 3 {
		t.Errorf("%d endpoints in %d slices, want 10 in 3", total, len(w.slices))
	}
}

// One Pod's change writes one slice, however many there are.
func TestOneFlipIsOneWrite(t *testing.T) {
	w := manyPods(1050)
	w.apply(t, Slices(w.input(0)))
	if len(w.slices) != 11 {
		t.Fatalf("%d slices, want 11 (behaviour 28)", len(w.slices))
	}
	p := w.pods["p500"].DeepCopy()
	setReady(p, false)
	w.pods["p500"] = p
	plan := Slices(w.input(0))
	if len(plan.Create) != 0 || len(plan.Update) != 1 || len(plan.Delete) != 0 {
		t.Errorf("%d creates, %d updates, %d deletes; want one update", len(plan.Create), len(plan.Update), len(plan.Delete))
	}
}

func manyPods(n int) *world {
	w := &world{
		service: &corev1.Service{}, pods: map[string]*corev1.Pod{}, slices: map[string]*discoveryv1.EndpointSlice{},
		nodes: map[string]*corev1.Node{"n0": testNode("n0", "z0")}, clock: time.Unix(1700000000, 0),
	}
	w.service.Name, w.service.Namespace, w.service.UID = "web", "ns", "svc-1"
	w.service.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	w.service.Spec.ClusterIP = "10.96.0.5"
	w.service.Spec.Ports = []corev1.ServicePort{{Port: 80}}
	for i := range n {
		p := &corev1.Pod{}
		p.Name, p.Namespace = fmt.Sprintf("p%d", i), "ns"
		p.Spec.NodeName = "n0"
		p.Status.PodIPs = []corev1.PodIP{{IP: fmt.Sprintf("10.244.%d.%d", i/250, i%250+1)}}
		setReady(p, true)
		w.pods[p.Name] = p
	}
	return w
}

// The cost of planning for one change, with nothing else around it.
func BenchmarkPlan(b *testing.B) {
	for _, n := range []int{10, 5000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w := manyPods(n)
			w.apply(b, Slices(w.input(0)))
			p := w.pods["p5"].DeepCopy()
			setReady(p, false)
			w.pods["p5"] = p
			in := w.input(0)
			for b.Loop() {
				if len(Slices(in).Update) != 1 {
					b.Fatal("not one update")
				}
			}
		})
	}
}

func BenchmarkPlanEndpoints(b *testing.B) {
	w := manyPods(5000)
	in := w.input(0)
	current := Endpoints(w.service, in.Pods, nil, time.Time{})
	for b.Loop() {
		Endpoints(w.service, in.Pods, current, time.Time{})
	}
}
