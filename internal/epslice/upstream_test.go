package epslice

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	upstream "k8s.io/endpointslice"
	"k8s.io/endpointslice/topologycache"
	endpointsliceutil "k8s.io/endpointslice/util"
	"k8s.io/klog/v2"
	"pgregory.net/rapid"
)

// theirs is the reconciler of kube-controller-manager on a fake client.
type theirs struct {
	client   *fake.Clientset
	nodes    cache.Indexer
	topology *topologycache.TopologyCache
	r        *upstream.Reconciler
	recorder *record.FakeRecorder
	writes   int
}

func newTheirs() *theirs {
	u := &theirs{client: fake.NewSimpleClientset(), nodes: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}),
		topology: topologycache.NewTopologyCache(), recorder: record.NewFakeRecorder(100)}
	n := 0
	u.client.PrependReactor("*", "endpointslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		switch a.GetVerb() {
		case "create":
			u.writes++
			s := a.(clienttesting.CreateAction).GetObject().(*discoveryv1.EndpointSlice)
			if s.Name == "" {
				n++
				s.Name = fmt.Sprintf("%s%03d", s.GenerateName, n)
				s.UID = types.UID(s.Name)
			}
		case "update", "delete":
			u.writes++
		}
		return false, nil, nil
	})
	u.r = upstream.NewReconciler(u.client, corelisters.NewNodeLister(u.nodes), testLimit, endpointsliceutil.NewEndpointSliceTracker(),
		u.topology, u.recorder, ManagedBySelector, upstream.WithPreferSameTrafficDistributionEnabled(true))
	return u
}

func (u *theirs) list(t rapid.TB) []*discoveryv1.EndpointSlice {
	list, err := u.client.DiscoveryV1().EndpointSlices("ns").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	var out []*discoveryv1.EndpointSlice
	for i := range list.Items {
		out = append(out, &list.Items[i])
	}
	return out
}

// reconcile lets upstream do one step and returns how much it wrote.
func (u *theirs) reconcile(t rapid.TB, w *world) int {
	for _, o := range u.nodes.List() {
		_ = u.nodes.Delete(o)
	}
	var nodes []*corev1.Node
	for _, n := range w.nodes {
		_ = u.nodes.Add(n)
		nodes = append(nodes, n)
	}
	u.topology.SetNodes(klog.Logger{}, nodes)
	u.writes = 0
	var pods []*corev1.Pod
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		pods = append(pods, w.pods[name].DeepCopy())
	}
	err := u.r.Reconcile(klog.Logger{}, w.service.DeepCopy(), pods, u.list(t), w.clock)
	if err != nil && !strings.Contains(err.Error(), "skipping Pod") {
		t.Fatalf("upstream: %v", err)
	}
	return u.writes
}

// told takes what upstream has told since the last call and returns why hints
// ended, by family.
func (u *theirs) told() []string {
	var out []string
	for {
		select {
		case e := <-u.recorder.Events:
			if strings.HasPrefix(e, "Warning TopologyAwareHintsDisabled ") {
				out = append(out, e)
			}
		default:
			slices.Sort(out)
			return out
		}
	}
}

// contents is what clients see, whatever slice it is in: "family ports
// endpoint". An empty slice counts only where there is nothing else.
func contents(list []*discoveryv1.EndpointSlice, hints bool) []string {
	var out []string
	filled := map[discoveryv1.AddressType]bool{}
	for _, s := range list {
		filled[s.AddressType] = filled[s.AddressType] || len(s.Endpoints) > 0
	}
	for _, s := range list {
		ports := fmt.Sprintf("%q", strings.Split(string(portsKey(s.Ports)), "\x01"))
		labels := fmt.Sprint(s.Labels, s.GenerateName, s.OwnerReferences[0].String())
		for _, e := range s.Endpoints {
			e.Addresses = slices.Sorted(slices.Values(e.Addresses))
			if !hints {
				e.Hints = nil
			}
			out = append(out, fmt.Sprintf("%s %s %s %s %v", s.AddressType, ports, labels, e.String(),
				s.Annotations[corev1.EndpointsLastChangeTriggerTime] != ""))
		}
		if !filled[s.AddressType] {
			out = append(out, fmt.Sprintf("%s %s %s empty", s.AddressType, ports, labels))
		}
	}
	sort.Strings(out)
	return out
}

// behaviours 12, 17 to 19, 27 to 29: the same endpoints with the same conditions,
// ports, hints and labels as upstream after every step of a random history.
func TestSameAsUpstream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w, u := newWorld(t), newTheirs()
		for range 10 {
			w.step(t)
			w.apply(t, Slices(w.input(testLimit)))
			u.reconcile(t, w)
			u.told()
			if d := cmp.Diff(contents(u.list(t), true), contents(slices.Collect(maps.Values(w.slices)), true)); d != "" {
				t.Fatalf("upstream -, ours +:\n%s", d)
			}
		}
	})
}

// From the same slices a plan never takes more writes than upstream.
func TestNeverMoreWritesThanUpstream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w, u := newWorld(t), newTheirs()
		for range 10 {
			w.step(t)
			w.slices = map[string]*discoveryv1.EndpointSlice{}
			for _, s := range u.list(t) {
				w.slices[s.Name] = s
			}
			plan := Slices(w.input(testLimit))
			before := len(w.slices)
			ours := len(plan.Create) + len(plan.Update) + len(plan.Delete)
			if theirs := u.reconcile(t, w); ours > theirs {
				t.Fatalf("%d creates, %d updates, %d deletes with %d slices there; upstream writes %d",
					len(plan.Create), len(plan.Update), len(plan.Delete), before, theirs)
			}
		}
	})
}

// Topology-aware hints are spread by rules that leave room; what has to agree
// is whether there are hints, and how many endpoints each zone gets at least.
func TestTopologyHintsAsUpstream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w, u := newWorld(t), newTheirs()
		w.service.Annotations = map[string]string{corev1.AnnotationTopologyMode: "Auto"}
		for range 8 {
			w.step(t)
			in := w.input(testLimit)
			in.Topology = NewTopology(slices.Collect(maps.Values(w.nodes)))
			plan := Slices(in)
			w.apply(t, plan)
			u.reconcile(t, w)
			var told []string
			for _, n := range plan.Events {
				if n.Reason == "TopologyAwareHintsDisabled" {
					told = append(told, fmt.Sprintf("Warning %s %s", n.Reason, n.Message))
				}
			}
			slices.Sort(told)
			if d := cmp.Diff(u.told(), told); d != "" {
				t.Fatalf("why there are no hints: upstream -, ours +:\n%s", d)
			}
			mine := slices.Collect(maps.Values(w.slices))
			if d := cmp.Diff(contents(u.list(t), false), contents(mine, false)); d != "" {
				t.Fatalf("upstream -, ours +:\n%s", d)
			}
			for _, family := range w.service.Spec.IPFamilies {
				a, b := hintsOf(u.list(t), family), hintsOf(mine, family)
				if (len(a) == 0) != (len(b) == 0) {
					t.Fatalf("%s: upstream hints %v, ours %v", family, a, b)
				}
				checkHints(t, in.Topology, mine, family)
			}
			for round := 0; ; round++ {
				in = w.input(testLimit)
				in.Topology = NewTopology(slices.Collect(maps.Values(w.nodes)))
				again := Slices(in)
				if again.Empty() {
					break
				}
				if round == 3 {
					t.Fatalf("plan after plan changes %d slices", len(again.Update))
				}
				w.apply(t, again)
			}
		}
	})
}

func hintsOf(list []*discoveryv1.EndpointSlice, family corev1.IPFamily) map[string]int {
	out := map[string]int{}
	for _, s := range list {
		for _, e := range s.Endpoints {
			if string(s.AddressType) == string(family) && e.Hints != nil {
				for _, z := range e.Hints.ForZones {
					out[z.Name]++
				}
			}
		}
	}
	return out
}

// checkHints reports that either no endpoint is hinted, or every ready one is, to
// a zone that has nodes.
func checkHints(t *rapid.T, topology *Topology, list []*discoveryv1.EndpointSlice, family corev1.IPFamily) {
	t.Helper()
	hints := hintsOf(list, family)
	if len(hints) == 0 {
		return
	}
	for zone := range hints {
		if topology.ratios[zone] == 0 {
			t.Fatalf("hints for zone %s, which has no share: %v", zone, hints)
		}
	}
	for _, s := range list {
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; string(s.AddressType) == string(family) && isReady(e) != (e.Hints != nil) {
				t.Fatalf("%s: ready %v, hints %v", e.TargetRef.Name, isReady(e), e.Hints)
			}
		}
	}
}
