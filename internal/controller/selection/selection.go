// Package selection knows which Services, and which other selectors, select a Pod.
package selection

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// Index is an index over labels of which Services select which Pods, in both
// directions. The work for an event of a Pod is proportional to the Services
// that have one of its labels as their rarest one, and that of finding a
// Service's Pods to the Pods that have the rarest label of its selector; neither
// depends on the size of the namespace.
type Index struct {
	mu     sync.RWMutex
	spaces map[string]*space
	nodes  map[string]*posting // the Pods of each Node
	// subscribers are set while the controllers are built.
	subscribers  []func(Change)
	podFollowers []func(before, now *corev1.Pod)
}

// Change is a possible change of the endpoints of a Service.
type Change struct {
	Service svc.Name
	// Trigger is when the cause happened, zero if not known.
	Trigger time.Time
	// Deleted is whether the Service itself was deleted.
	Deleted bool
	// Removal is whether a Pod has stopped being ready for new connections.
	Removal bool
}

// space is one namespace.
type space struct {
	services map[string]*selector
	// buckets holds each Service with a selector once, under the pair of it
	// that had the fewest Services when it came.
	buckets  map[pair]map[string]*selector
	pods     map[string]*member
	postings map[pair]*posting
	// crossings has, by the name of a Service, the names of older ones that have
	// selected one of its Pods although the selectors cross.
	crossings map[string]map[string]bool
}

type pair struct{ key, value string }

type selector struct {
	service *corev1.Service
	bucket  pair
}

// member is a Pod and where it stands in the postings.
type member struct {
	pod *corev1.Pod
	at  []place
}

type place struct {
	list  *posting
	index int
}

// posting is a list of Pods that have something in common, in no order.
type posting struct{ pods []*member }

func (p *posting) add(m *member) {
	m.at = append(m.at, place{p, len(p.pods)})
	p.pods = append(p.pods, m)
}

func (p *posting) remove(index int) {
	last := len(p.pods) - 1
	moved := p.pods[last]
	p.pods[index], p.pods[last] = moved, nil
	p.pods = p.pods[:last]
	if index == last {
		return
	}
	for i := range moved.at {
		if moved.at[i].list == p {
			moved.at[i].index = index
		}
	}
}

// NewIndex returns an empty index.
func NewIndex() *Index { return &Index{spaces: map[string]*space{}, nodes: map[string]*posting{}} }

// New returns an index that k keeps up to date.
func New(k *kit.Kit) (*Index, error) {
	x := NewIndex()
	if err := k.Handle(k.Informers.Core().V1().Services().Informer(), kit.Handlers(x.SetService, x.DeleteService)); err != nil {
		return nil, err
	}
	if err := k.Handle(k.Informers.Core().V1().Pods().Informer(), kit.Handlers(x.SetPod, x.DeletePod)); err != nil {
		return nil, err
	}
	err := k.Handle(k.Informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { x.nodeChanged(o.(*corev1.Node).Name) },
		UpdateFunc: func(old, o any) {
			if a, b := old.(*corev1.Node), o.(*corev1.Node); a.Labels[corev1.LabelTopologyZone] != b.Labels[corev1.LabelTopologyZone] {
				x.nodeChanged(b.Name)
			}
		},
		DeleteFunc: func(o any) {
			if node, ok := kit.Final[*corev1.Node](o); ok {
				x.nodeChanged(node.Name)
			}
		},
	})
	if err != nil {
		return nil, err
	}
	return x, nil
}

// Subscribe has f called for every change, without the lock held. It may be
// called only while the controllers are built.
func (x *Index) Subscribe(f func(Change)) { x.subscribers = append(x.subscribers, f) }

// FollowPods has f called with two states of a Pod, nil for one that is not there, when the
// index has the second. It may be called only while the controllers are built.
func (x *Index) FollowPods(f func(before, now *corev1.Pod)) {
	x.podFollowers = append(x.podFollowers, f)
}

func (x *Index) followed(before, now *corev1.Pod) {
	for _, f := range x.podFollowers {
		f(before, now)
	}
}

func (x *Index) notify(changes ...Change) {
	for _, c := range changes {
		for _, f := range x.subscribers {
			f(c)
		}
	}
}

func (x *Index) space(namespace string) *space {
	sp := x.spaces[namespace]
	if sp == nil {
		sp = &space{
			services: map[string]*selector{}, buckets: map[pair]map[string]*selector{}, pods: map[string]*member{},
			postings: map[pair]*posting{}, crossings: map[string]map[string]bool{},
		}
		x.spaces[namespace] = sp
	}
	return sp
}

func (x *Index) dropIfEmpty(namespace string) {
	if sp := x.spaces[namespace]; sp != nil && len(sp.services)+len(sp.pods) == 0 {
		delete(x.spaces, namespace)
	}
}

// SetService takes a Service that is new or has changed.
func (x *Index) SetService(service *corev1.Service) {
	c := Change{Service: svc.NameOf(service)}
	x.mu.Lock()
	sp := x.space(service.Namespace)
	sel := sp.services[service.Name]
	switch {
	case sel == nil:
		sel = &selector{service: service}
		sp.services[service.Name] = sel
		sp.insert(sel)
		sp.addCrossingsOf(service)
		c.Trigger = service.CreationTimestamp.Time
	case maps.Equal(sel.service.Spec.Selector, service.Spec.Selector):
		sel.service = service
	default:
		sp.remove(sel)
		sel.service = service
		sp.insert(sel)
		sp.addCrossingsOf(service)
	}
	x.mu.Unlock()
	x.notify(c)
}

// DeleteService takes a Service that was deleted.
func (x *Index) DeleteService(service *corev1.Service) {
	x.mu.Lock()
	if sp := x.spaces[service.Namespace]; sp != nil {
		if sel := sp.services[service.Name]; sel != nil {
			sp.remove(sel)
			delete(sp.services, service.Name)
			delete(sp.crossings, service.Name)
		}
		x.dropIfEmpty(service.Namespace)
	}
	x.mu.Unlock()
	x.notify(Change{Service: svc.NameOf(service), Deleted: true})
}

func (sp *space) insert(sel *selector) {
	best, found := pair{}, false
	for k, v := range sel.service.Spec.Selector {
		p := pair{k, v}
		if !found || len(sp.buckets[p]) < len(sp.buckets[best]) {
			best, found = p, true
		}
	}
	if !found {
		return
	}
	sel.bucket = best
	if sp.buckets[best] == nil {
		sp.buckets[best] = map[string]*selector{}
	}
	sp.buckets[best][sel.service.Name] = sel
}

func (sp *space) remove(sel *selector) {
	b := sp.buckets[sel.bucket]
	delete(b, sel.service.Name)
	if len(b) == 0 {
		delete(sp.buckets, sel.bucket)
	}
}

// selects reports whether labels has all of the selector; an empty selector
// selects nothing.
func selects(sel, labels map[string]string) bool {
	for k, v := range sel {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return len(sel) > 0
}

// matching appends a change like cause for each Service that selects labels.
func (sp *space) matching(out []Change, namespace string, labels map[string]string, cause Change) []Change {
	for k, v := range labels {
		for name, sel := range sp.buckets[pair{k, v}] {
			if selects(sel.service.Spec.Selector, labels) {
				cause.Service = svc.Name{Namespace: namespace, Name: name}
				out = append(out, cause)
			}
		}
	}
	return out
}

// SetPod takes a Pod that is new or has changed.
func (x *Index) SetPod(pod *corev1.Pod) {
	var changes []Change
	var before *corev1.Pod
	x.mu.Lock()
	sp := x.space(pod.Namespace)
	m := sp.pods[pod.Name]
	switch {
	case m == nil:
		m = &member{pod: pod}
		sp.pods[pod.Name] = m
		x.enlist(sp, m)
		changes = sp.matching(nil, pod.Namespace, pod.Labels, Change{Trigger: readySince(pod)})
		sp.addCrossings(changes)
		if !epslice.Counts(pod) {
			changes = nil
		}
	default:
		old := m.pod
		before = old
		moved := !maps.Equal(old.Labels, pod.Labels)
		if moved || old.Spec.NodeName != pod.Spec.NodeName {
			x.delist(sp, m)
			m.pod = pod
			x.enlist(sp, m)
		}
		m.pod = pod
		if moved || endpointChanged(old, pod) {
			cause := Change{Trigger: readySince(pod), Removal: serves(old) && (moved || old.UID != pod.UID || !serves(pod))}
			if cause.Trigger.Equal(readySince(old)) {
				cause.Trigger = time.Time{}
			}
			changes = sp.matching(nil, pod.Namespace, pod.Labels, cause)
			if moved {
				sp.addCrossings(changes)
				changes = sp.matching(changes, pod.Namespace, old.Labels, cause)
			}
		}
	}
	x.mu.Unlock()
	x.notify(changes...)
	x.followed(before, pod)
}

// DeletePod takes a Pod that was deleted.
func (x *Index) DeletePod(pod *corev1.Pod) {
	var changes []Change
	x.mu.Lock()
	if sp := x.spaces[pod.Namespace]; sp != nil {
		if m := sp.pods[pod.Name]; m != nil {
			changes = sp.matching(nil, pod.Namespace, m.pod.Labels, Change{Removal: serves(m.pod)})
			x.delist(sp, m)
			delete(sp.pods, pod.Name)
		}
		x.dropIfEmpty(pod.Namespace)
	}
	x.mu.Unlock()
	x.notify(changes...)
	x.followed(pod, nil)
}

func (x *Index) enlist(sp *space, m *member) {
	m.at = make([]place, 0, len(m.pod.Labels)+1)
	for k, v := range m.pod.Labels {
		p := pair{k, v}
		if sp.postings[p] == nil {
			sp.postings[p] = &posting{}
		}
		sp.postings[p].add(m)
	}
	if name := m.pod.Spec.NodeName; name != "" {
		if x.nodes[name] == nil {
			x.nodes[name] = &posting{}
		}
		x.nodes[name].add(m)
	}
}

func (x *Index) delist(sp *space, m *member) {
	for _, at := range m.at {
		at.list.remove(at.index)
	}
	m.at = nil
	for k, v := range m.pod.Labels {
		if p := (pair{k, v}); sp.postings[p] != nil && len(sp.postings[p].pods) == 0 {
			delete(sp.postings, p)
		}
	}
	if name := m.pod.Spec.NodeName; x.nodes[name] != nil && len(x.nodes[name].pods) == 0 {
		delete(x.nodes, name)
	}
}

// nodeChanged notifies of the Services with Pods on a Node that was added,
// deleted or moved to another zone.
func (x *Index) nodeChanged(name string) {
	seen := map[svc.Name]bool{}
	var changes []Change
	x.mu.RLock()
	if list := x.nodes[name]; list != nil {
		for _, m := range list.pods {
			for _, c := range x.spaces[m.pod.Namespace].matching(nil, m.pod.Namespace, m.pod.Labels, Change{}) {
				if !seen[c.Service] {
					seen[c.Service] = true
					changes = append(changes, c)
				}
			}
		}
	}
	x.mu.RUnlock()
	x.notify(changes...)
}

// Service returns the named Service as last seen, or nil.
func (x *Index) Service(name svc.Name) *corev1.Service {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if sp := x.spaces[name.Namespace]; sp != nil && sp.services[name.Name] != nil {
		return sp.services[name.Name].service
	}
	return nil
}

// Selecting returns the Services that select a Pod, in no order.
func (x *Index) Selecting(pod *corev1.Pod) (out []svc.Name) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if sp := x.spaces[pod.Namespace]; sp != nil {
		for _, c := range sp.matching(nil, pod.Namespace, pod.Labels, Change{}) {
			out = append(out, c.Service)
		}
	}
	return out
}

// Pods returns the Pods that a Service selects, in no order.
func (x *Index) Pods(service *corev1.Service) []*corev1.Pod {
	x.mu.RLock()
	defer x.mu.RUnlock()
	sp := x.spaces[service.Namespace]
	if sp == nil {
		return nil
	}
	return sp.selected(service.Spec.Selector)
}

// PodsWith returns the Pods of a namespace that have labels, in no order: all of them for none.
func (x *Index) PodsWith(namespace string, labels map[string]string) []*corev1.Pod {
	x.mu.RLock()
	defer x.mu.RUnlock()
	sp := x.spaces[namespace]
	switch {
	case sp == nil:
		return nil
	case len(labels) > 0:
		return sp.selected(labels)
	}
	out := make([]*corev1.Pod, 0, len(sp.pods))
	for _, m := range sp.pods {
		out = append(out, m.pod)
	}
	return out
}

// selected returns the Pods that have all of a selector, in no order.
func (sp *space) selected(sel map[string]string) []*corev1.Pod {
	var rarest *posting
	for k, v := range sel {
		list := sp.postings[pair{k, v}]
		if list == nil {
			return nil
		}
		if rarest == nil || len(list.pods) < len(rarest.pods) {
			rarest = list
		}
	}
	if rarest == nil {
		return nil
	}
	out := make([]*corev1.Pod, 0, len(rarest.pods))
	for _, m := range rarest.pods {
		if len(sel) == 1 || selects(sel, m.pod.Labels) {
			out = append(out, m.pod)
		}
	}
	return out
}

// PodsOn returns the Pods bound to a Node, in no order.
func (x *Index) PodsOn(node string) []*corev1.Pod {
	x.mu.RLock()
	defer x.mu.RUnlock()
	list := x.nodes[node]
	if list == nil {
		return nil
	}
	out := make([]*corev1.Pod, len(list.pods))
	for i, m := range list.pods {
		out[i] = m.pod
	}
	return out
}

// endpointChanged reports whether an update of a Pod can change an endpoint.
func endpointChanged(a, b *corev1.Pod) bool {
	return a.UID != b.UID ||
		(a.DeletionTimestamp == nil) != (b.DeletionTimestamp == nil) ||
		a.Spec.NodeName != b.Spec.NodeName || a.Spec.Hostname != b.Spec.Hostname || a.Spec.Subdomain != b.Spec.Subdomain ||
		epslice.Counts(a) != epslice.Counts(b) || epslice.Ready(a) != epslice.Ready(b) ||
		a.Annotations[svc.WeightAnnotation] != b.Annotations[svc.WeightAnnotation] ||
		a.Status.PodIP != b.Status.PodIP || !slices.Equal(a.Status.PodIPs, b.Status.PodIPs)
}

// serves reports whether a Service sends new connections to the Pod while others do
// that are ready.
func serves(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && epslice.Counts(pod) && epslice.Ready(pod)
}

// readySince is when the Pod's readiness changed last.
func readySince(pod *corev1.Pod) time.Time {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}
