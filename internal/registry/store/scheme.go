package store

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// AddFieldLabels allows field selectors of a kind on metadata.name,
// metadata.namespace and the given labels, which the kind's Attrs must supply.
func AddFieldLabels(s *runtime.Scheme, gvk schema.GroupVersionKind, labels ...string) error {
	allowed := append([]string{"metadata.name", "metadata.namespace"}, labels...)
	return s.AddFieldLabelConversionFunc(gvk, func(label, value string) (string, string, error) {
		if slices.Contains(allowed, label) {
			return label, value, nil
		}
		return "", "", fmt.Errorf("field label not supported: %s; a %s can be selected by %s", label, gvk.Kind, strings.Join(allowed, ", "))
	})
}
