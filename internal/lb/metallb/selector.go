package metallb

import (
	"cmp"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// oneOf returns one selector that matches what any of a list does, nil if the list is empty. It reports false if there is none:
// several that differ must each be one label with its values, and the label the same.
func oneOf(selectors []metav1.LabelSelector) (*metav1.LabelSelector, bool) {
	var differ []metav1.LabelSelector
	for i := range selectors {
		if !slices.ContainsFunc(differ, func(s metav1.LabelSelector) bool { return selectsSame(&s, &selectors[i]) }) {
			differ = append(differ, selectors[i])
		}
	}
	switch len(differ) {
	case 0:
		return nil, true
	case 1:
		return &differ[0], true
	}
	all := metav1.LabelSelectorRequirement{Operator: metav1.LabelSelectorOpIn}
	for i := range differ {
		r := requirements(&differ[i])
		if len(r) != 1 || r[0].Operator != metav1.LabelSelectorOpIn || i > 0 && r[0].Key != all.Key {
			return nil, false
		}
		all.Key, all.Values = r[0].Key, append(all.Values, r[0].Values...)
	}
	slices.Sort(all.Values)
	all.Values = slices.Compact(all.Values)
	return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{all}}, true
}

// selectsSame reports whether two selectors ask for the same, also if one writes it as labels and the other one as expressions, or in
// another order. A nil selector stands for all.
func selectsSame(a, b *metav1.LabelSelector) bool {
	return reflect.DeepEqual(requirements(a), requirements(b))
}

// requirements are what a selector asks for, each once and in order.
func requirements(s *metav1.LabelSelector) (out []metav1.LabelSelectorRequirement) {
	if s == nil {
		return nil
	}
	for key, value := range s.MatchLabels {
		out = append(out, metav1.LabelSelectorRequirement{Key: key, Operator: metav1.LabelSelectorOpIn, Values: []string{value}})
	}
	for _, r := range s.MatchExpressions {
		values := slices.Sorted(slices.Values(r.Values))
		r.Values = slices.Compact(values)
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b metav1.LabelSelectorRequirement) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Operator, b.Operator), slices.Compare(a.Values, b.Values))
	})
	return slices.CompactFunc(out, func(a, b metav1.LabelSelectorRequirement) bool { return reflect.DeepEqual(a, b) })
}
