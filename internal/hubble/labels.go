package hubble

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// sourced finds keys of a selector with a source, as in "k8s:app=web": the syntax of Kubernetes has no colon in keys.
//
//nolint:gochecknoglobals // constant
var sourced = regexp.MustCompile(`(^|[,\s!])(any|k8s|reserved):`)

// sourceKey is before the source in the key of a selector, where the colon was.
const sourceKey = "label-source-"

// labelled matches flows by selectors of labels. A key without a source is that of any source.
func labelled(want func(*flow.FlowFilter) []string, of func(*flow.Flow) []string) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		var selectors []labels.Selector
		for _, text := range want(f) {
			s, err := labels.Parse(sourced.ReplaceAllString(text, "${1}"+sourceKey+"${2}."))
			if err != nil {
				return nil, fmt.Errorf("%q is not a label selector: %w", text, err)
			}
			selectors = append(selectors, s)
		}
		return func(m *flow.Flow) bool {
			set := labelSet(of(m))
			return slices.ContainsFunc(selectors, func(s labels.Selector) bool { return s.Matches(set) })
		}, nil
	}
}

// labelSet are the labels of a Peer for selectors.
type labelSet []string

// Lookup is part of labels.Labels.
func (l labelSet) Lookup(key string) (string, bool) {
	source := ""
	if rest, ok := strings.CutPrefix(key, sourceKey); ok {
		source, key, _ = strings.Cut(rest, ".")
	}
	for _, text := range l {
		from, text, _ := strings.Cut(text, ":")
		if k, v, _ := strings.Cut(text, "="); k == key && (source == "" || source == "any" || source == from) {
			return v, true
		}
	}
	return "", false
}

// Has is part of labels.Labels.
func (l labelSet) Has(key string) bool {
	_, ok := l.Lookup(key)
	return ok
}

// Get is part of labels.Labels.
func (l labelSet) Get(key string) string {
	v, _ := l.Lookup(key)
	return v
}
