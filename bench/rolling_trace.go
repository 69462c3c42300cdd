package main

import (
	"context"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// removal is when the removal of a Pod from its Service had come how far, as watches show it.
type removal struct {
	deleted  time.Time
	slice    time.Time // an EndpointSlice has it as terminating
	awaited  time.Time // nodes are asked to report that
	reported time.Time // all have
	drained  time.Time // the Pod's condition says so
	version  uint64    // of the slice
}

// removalSteps are the parts of a removal, in their order.
var removalSteps = []string{
	"until its EndpointSlice says so", "until the nodes are asked to report", "until all have reported", "until the Pod's condition",
}

// steps returns how long each of removalSteps took, in milliseconds.
func (r *removal) steps() []float64 {
	at := []time.Time{r.deleted, r.slice, r.awaited, r.reported, r.drained}
	var out []float64
	for i, t := range at[1:] {
		out = append(out, milliseconds.in(max(0, t.Sub(at[i])))) // watches are not in step
	}
	return out
}

// removals follows the removals of Pods.
type removals struct {
	mu      sync.Mutex
	pods    map[types.UID]*removal
	awaited uint64
	reports map[string]uint64 // by node
}

// followRemovals returns the removals of Pods from now on, until ctx ends.
func (r *rollingRig) followRemovals(ctx context.Context) (*removals, error) {
	x := &removals{pods: map[types.UID]*removal{}, reports: map[string]uint64{}}
	for _, h := range r.nodes {
		x.reports[h.name] = 0
	}
	slices, err1 := r.client.DiscoveryV1().EndpointSlices(benchNamespace).Watch(ctx, metav1.ListOptions{})
	awaited, err2 := r.client.CoordinationV1().Leases(metav1.NamespaceSystem).Watch(ctx,
		metav1.ListOptions{FieldSelector: "metadata.name=fairlead-programmed"})
	reports, err3 := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Watch(ctx, metav1.ListOptions{})
	for _, err := range []error{err1, err2, err3} {
		if err != nil {
			return nil, err
		}
	}
	for _, from := range []watch.Interface{slices, awaited, reports} {
		go func() {
			defer from.Stop()
			for e := range from.ResultChan() {
				x.see(e)
			}
		}()
	}
	return x, nil
}

// see takes the event of a watch.
func (x *removals) see(e watch.Event) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := time.Now()
	switch o := e.Object.(type) {
	case *corev1.Pod:
		out := func(c corev1.PodCondition) bool { return c.Type == "fairlead.dev/Drained" }
		if r := x.of(o.UID, now); r.drained.IsZero() && slices.ContainsFunc(o.Status.Conditions, out) {
			r.drained = now
		}
	case *discoveryv1.EndpointSlice:
		for _, p := range o.Endpoints {
			if p.TargetRef == nil || p.Conditions.Terminating == nil || !*p.Conditions.Terminating {
				continue
			}
			if r := x.of(p.TargetRef.UID, now); r.slice.IsZero() {
				r.slice, r.version = now, number(o.ResourceVersion)
			}
		}
	case *coordinationv1.Lease:
		if _, ok := x.reports[o.Name]; ok {
			x.reports[o.Name] = slicesIn(o.Annotations["fairlead.dev/programmed"])
		} else if text, ok := o.Annotations["fairlead.dev/wanted"]; ok {
			x.awaited = slicesIn(text)
		}
	}
	all := uint64(math.MaxUint64)
	for _, v := range x.reports {
		all = min(all, v)
	}
	for _, r := range x.pods {
		if r.version > 0 && r.awaited.IsZero() && x.awaited >= r.version {
			r.awaited = now
		}
		if r.version > 0 && r.reported.IsZero() && all >= r.version {
			r.reported = now
		}
	}
}

func (x *removals) of(pod types.UID, now time.Time) *removal {
	if x.pods[pod] == nil {
		x.pods[pod] = &removal{deleted: now}
	}
	return x.pods[pod]
}

// drained returns the Pods that came to their end.
func (x *removals) drained() (out []*removal) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range x.pods {
		if !r.drained.IsZero() {
			out = append(out, r)
		}
	}
	return out
}

// slicesIn returns the version of EndpointSlices in an annotation of package barrier, 0 for
// none.
func slicesIn(text string) uint64 {
	for word := range strings.SplitSeq(text, ",") {
		if v, ok := strings.CutPrefix(word, "proxy-endpointslices="); ok {
			return number(v)
		}
	}
	return 0
}

func number(text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// removalFigures are how long removals took.
func removalFigures(all []*removal) []figure {
	var whole []float64
	steps := make([][]float64, len(removalSteps))
	for _, r := range all {
		whole = append(whole, milliseconds.in(r.drained.Sub(r.deleted)))
		for i, took := range r.steps() {
			steps[i] = append(steps[i], took)
		}
	}
	figures := []figure{
		unpaired("from a Pod's deletion until all nodes have taken it out, p50", milliseconds, percentile(whole, 0.5), expectation{below: 100}),
		unpaired("the same, p99", milliseconds, percentile(whole, 0.99), expectation{}),
	}
	for i, what := range removalSteps {
		figures = append(figures, unpaired("of which "+what+", p50", milliseconds, percentile(steps[i], 0.5), expectation{}))
	}
	return figures
}
