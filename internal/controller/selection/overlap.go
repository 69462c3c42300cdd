package selection

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/epslice"
)

// Several Services for the same Pods are common practice: a headless one beside
// one with an address, one for each port, one for all Pods beside one for those
// of a release. There the selectors are equal, or one includes the other.
// Selectors that cross (each requires a label that the other does not) and still
// select the same Pod are mostly a label too many on it. That gets an Event, on
// the younger of the two Services.

// cross reports whether neither of two selectors is empty or includes the other.
func cross(a, b map[string]string) bool {
	return len(a) > 0 && len(b) > 0 && !selects(a, b) && !selects(b, a)
}

// younger reports whether a was created after b.
func younger(a, b *corev1.Service) bool {
	if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
		return c > 0
	}
	return a.Name > b.Name
}

// addCrossings records which Services, of those named in changes, which select
// the same Pod, have selectors that cross.
func (sp *space) addCrossings(changes []Change) {
	for i := range changes {
		for j := range i {
			a, b := sp.services[changes[i].Service.Name].service, sp.services[changes[j].Service.Name].service
			if !cross(a.Spec.Selector, b.Spec.Selector) {
				continue
			}
			if younger(b, a) {
				a, b = b, a
			}
			if sp.crossings[a.Name] == nil {
				sp.crossings[a.Name] = map[string]bool{}
			}
			sp.crossings[a.Name][b.Name] = true
		}
	}
}

// addCrossingsOf does so for every Pod of a Service that is new or has a new
// selector.
func (sp *space) addCrossingsOf(service *corev1.Service) {
	for _, pod := range sp.selected(service.Spec.Selector) {
		sp.addCrossings(sp.matching(nil, service.Namespace, pod.Labels, Change{}))
	}
}

// Crossing returns the older Services whose selector crosses that of service and
// which select one of its Pods, by name.
func (x *Index) Crossing(service *corev1.Service) []*corev1.Service {
	x.mu.Lock()
	defer x.mu.Unlock()
	sp := x.spaces[service.Namespace]
	if sp == nil {
		return nil
	}
	var out []*corev1.Service
	for _, name := range slices.Sorted(maps.Keys(sp.crossings[service.Name])) {
		other := sp.services[name]
		if other != nil && younger(service, other.service) && cross(service.Spec.Selector, other.service.Spec.Selector) &&
			len(sp.selected(union(service, other.service))) > 0 {
			out = append(out, other.service)
		} else {
			delete(sp.crossings[service.Name], name) // until they select a Pod again
		}
	}
	return out
}

// union returns the selector of the Pods that both Services select: nil, which
// selects none, if the two contradict each other.
func union(a, b *corev1.Service) map[string]string {
	out := maps.Clone(a.Spec.Selector)
	for k, v := range b.Spec.Selector {
		if have, ok := out[k]; ok && have != v {
			return nil
		}
		out[k] = v
	}
	return out
}

// OverlapEvents returns the Events for crossing selectors.
func OverlapEvents(service *corev1.Service, others []*corev1.Service) []epslice.Event {
	var out []epslice.Event
	for _, o := range others {
		var pairs []string
		for k, v := range union(service, o) {
			pairs = append(pairs, k+"="+v)
		}
		slices.Sort(pairs)
		out = append(out, epslice.Event{Reason: "OverlappingSelectors",
			Message: fmt.Sprintf("Service %s selects some of the same pods, those with the labels %s; "+
				"if that is not intended, correct the labels of the pods or one of the selectors", o.Name, strings.Join(pairs, ","))})
	}
	return out
}
