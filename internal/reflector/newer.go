package reflector

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// IsNewer reports whether a is a later state of an object than b. A state counts as newer if its resourceVersion cannot be
// compared.
func IsNewer(a, b metav1.Object) bool {
	n, err := resourceversion.CompareResourceVersion(a.GetResourceVersion(), b.GetResourceVersion())
	return err != nil || n > 0
}
