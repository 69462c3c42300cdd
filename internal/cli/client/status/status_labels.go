package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/svc"
)

// label is one label of Pods of a namespace.
type label struct{ namespace, key, value string }

func (l label) String() string { return l.key + "=" + l.value }

// podIndex finds Pods by labels, so that the cost of looking at all Services does not
// depend on how many Pods each selects.
type podIndex struct {
	// whole is set if these are all Pods.
	whole   bool
	pods    map[string][]*corev1.Pod // of a namespace
	byLabel map[label][]*corev1.Pod
	// folded has the labels that are equal but for case.
	folded map[label][]label
	// byKey and byValue have the labels of a namespace with a key or a value.
	byKey, byValue map[label][]label
	byName         map[svc.Name]*corev1.Pod
}

func newPodIndex(pods []corev1.Pod, whole bool) *podIndex {
	x := &podIndex{whole, map[string][]*corev1.Pod{}, map[label][]*corev1.Pod{}, map[label][]label{}, map[label][]label{}, map[label][]label{},
		map[svc.Name]*corev1.Pod{}}
	for i := range pods {
		p := &pods[i]
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		x.pods[p.Namespace] = append(x.pods[p.Namespace], p)
		x.byName[svc.NameOf(p)] = p
		for k, v := range p.Labels {
			l := label{p.Namespace, k, v}
			if x.byLabel[l] == nil {
				x.folded[l.fold()] = append(x.folded[l.fold()], l)
				x.byKey[label{p.Namespace, k, ""}] = append(x.byKey[label{p.Namespace, k, ""}], l)
				x.byValue[label{p.Namespace, "", v}] = append(x.byValue[label{p.Namespace, "", v}], l)
			}
			x.byLabel[l] = append(x.byLabel[l], p)
		}
	}
	return x
}

func (l label) fold() label {
	return label{l.namespace, strings.ToLower(l.key), strings.ToLower(l.value)}
}

// candidates returns the Pods with the label of a selector that the fewest have, maxLooks
// at most.
func (x *podIndex) candidates(namespace string, selector map[string]string) []*corev1.Pod {
	best := x.pods[namespace]
	for k, v := range selector {
		if with := x.byLabel[label{namespace, k, v}]; len(with) < len(best) {
			best = with
		}
	}
	return best[:min(len(best), maxLooks)]
}

// matching returns the Pods that a selector selects, of the first maxLooks.
func (x *podIndex) matching(namespace string, selector map[string]string) []*corev1.Pod {
	var out []*corev1.Pod
	for _, p := range x.candidates(namespace, selector) {
		selected := true
		for k, v := range selector {
			has, ok := p.Labels[k]
			selected = selected && ok && has == v
		}
		if selected {
			out = append(out, p)
		}
	}
	return out
}

// unmatched returns why a selector selects no Pod, with what is closest to it: "no Pod
// has app=Web (3 have app=web)". It returns "" if the selector selects some, or if that
// is not known.
func (x *podIndex) unmatched(namespace string, selector map[string]string) string {
	if !x.whole || len(x.matching(namespace, selector)) > 0 {
		return ""
	}
	for _, k := range slices.Sorted(maps.Keys(selector)) {
		l := label{namespace, k, selector[k]}
		if len(x.byLabel[l]) > 0 {
			continue
		}
		hint := ""
		if near, n := x.nearest(l, selector); n > 0 {
			hint = fmt.Sprintf(" (%d %s %s)", n, haveOrHas(n), near)
		}
		return fmt.Sprintf("no Pod has %s%s", l, hint)
	}
	if len(x.candidates(namespace, selector)) == maxLooks {
		return "" // one of the others may match
	}
	var each []string
	for _, k := range slices.Sorted(maps.Keys(selector)) {
		l := label{namespace, k, selector[k]}
		n := len(x.byLabel[l])
		each = append(each, fmt.Sprintf("%d %s %s", n, haveOrHas(n), l))
	}
	return fmt.Sprintf("no Pod has all of %s (%s)", selectorText(selector), strings.Join(each, ", "))
}

func haveOrHas(n int) string {
	if n == 1 {
		return "has"
	}
	return "have"
}

// nearest returns the label that may have been meant by l, which no Pod has, and how
// many Pods have it: one that is equal but for case; one with this key that all Pods
// have that match the rest of the selector, or that is a slip away; or one with this
// value.
func (x *podIndex) nearest(l label, selector map[string]string) (near label, pods int) {
	most := func(among []label, ok func(label) bool) bool {
		for _, o := range among[:min(len(among), maxLooks)] {
			if n := len(x.byLabel[o]); ok(o) && (n > pods || n == pods && cmp.Less(o.String(), near.String())) {
				near, pods = o, n
			}
		}
		return pods > 0
	}
	anyLabel := func(label) bool { return true }
	if most(x.folded[l.fold()], anyLabel) {
		return near, pods
	}
	sameKey := x.byKey[label{l.namespace, l.key, ""}]
	if rest := maps.Clone(selector); len(rest) > 1 {
		delete(rest, l.key)
		with := map[label]int{}
		for _, p := range x.matching(l.namespace, rest) {
			if v, ok := p.Labels[l.key]; ok {
				with[label{l.namespace, l.key, v}]++
			}
		}
		for o, n := range with {
			if n > pods || n == pods && cmp.Less(o.String(), near.String()) {
				near, pods = o, n
			}
		}
		if pods > 0 {
			return near, pods
		}
	}
	if most(sameKey, func(o label) bool { return base.IsSlip(l.value, o.value) }) {
		return near, pods
	}
	most(x.byValue[label{l.namespace, "", l.value}], anyLabel)
	return near, pods
}
