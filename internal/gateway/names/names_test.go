package names

import (
	"slices"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Of several default classes the newest counts, as in Kubernetes, whatever their order.
func TestDefaultClass(t *testing.T) {
	class := func(name, isDefault string, age time.Duration) *networkingv1.IngressClass {
		return &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{
			Name: name, CreationTimestamp: metav1.NewTime(time.Unix(1_000_000, 0).Add(-age)),
			Annotations: map[string]string{networkingv1.AnnotationIsDefaultIngressClass: isDefault},
		}}
	}
	for _, c := range []struct {
		all  []*networkingv1.IngressClass
		want string
	}{
		{nil, ""},
		{[]*networkingv1.IngressClass{class("a", "false", 0)}, ""},
		{[]*networkingv1.IngressClass{class("a", "false", 0), class("b", "true", 9)}, "b"},
		{[]*networkingv1.IngressClass{class("old", "true", 2*time.Second), class("new", "true", time.Second)}, "new"},
		{[]*networkingv1.IngressClass{class("new", "true", time.Second), class("old", "true", 2*time.Second)}, "new"},
		{[]*networkingv1.IngressClass{class("z", "true", time.Second), class("y", "true", time.Second)}, "y"},
	} {
		if got := DefaultClass(slices.Values(c.all)); got != c.want {
			t.Errorf("%d classes: %q, want %q", len(c.all), got, c.want)
		}
	}
}
