package controller

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/epslice"
)

// Several Services for the same Pods are common practice: a headless one beside
// one with an address, one for each port, one for all Pods beside one for those
// of a release. There the selectors are equal, or one has all of the other and
// more. Selectors that cross (each asks for something that the other does not)
// and meet in a Pod all the same are mostly a label too many on it. That is
// worth a remark, on the younger of the two Services.

// cross says whether two selectors are there and neither has all of the other.
func cross(a, b map[string]string) bool {
	return len(a) > 0 && len(b) > 0 && !selects(a, b) && !selects(b, a)
}

// younger says whether a was made after b.
func younger(a, b *corev1.Service) bool {
	if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
		return c > 0
	}
	return a.Name > b.Name
}

// meet remembers the Services that select the same Pod, named in changes, and
// whose selectors cross.
func (sp *space) meet(changes []change) {
	for i := range changes {
		for j := range i {
			a, b := sp.services[changes[i].service.Name].service, sp.services[changes[j].service.Name].service
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

// meetAll looks at every Pod of a Service that is new or has a new selector.
func (sp *space) meetAll(service *corev1.Service) {
	for _, pod := range sp.selected(service.Spec.Selector) {
		sp.meet(sp.matching(nil, service.Namespace, pod.Labels, time.Time{}))
	}
}

// crossing returns the older Services whose selector crosses that of service and
// which select one of its Pods, by name.
func (x *selection) crossing(service *corev1.Service) []*corev1.Service {
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
			len(sp.selected(both(service, other.service))) > 0 {
			out = append(out, other.service)
		} else {
			delete(sp.crossings[service.Name], name) // until they meet again
		}
	}
	return out
}

// both is the selector of the Pods that two Services select; nil, which selects
// none, where they contradict each other.
func both(a, b *corev1.Service) map[string]string {
	out := maps.Clone(a.Spec.Selector)
	for k, v := range b.Spec.Selector {
		if have, ok := out[k]; ok && have != v {
			return nil
		}
		out[k] = v
	}
	return out
}

// overlapNotes tells a user of crossing selectors.
func overlapNotes(service *corev1.Service, others []*corev1.Service) []epslice.Note {
	var out []epslice.Note
	for _, o := range others {
		var pairs []string
		for k, v := range both(service, o) {
			pairs = append(pairs, k+"="+v)
		}
		slices.Sort(pairs)
		out = append(out, epslice.Note{Reason: "OverlappingSelectors",
			Message: fmt.Sprintf("Service %s selects some of the same pods, those with the labels %s; if that is not meant, correct the labels of the pods or a selector", o.Name, strings.Join(pairs, ","))})
	}
	return out
}
