package watch

import (
	"log/slog"
	"maps"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// A change of an Ingress with a front for itself builds this front again and no other. Ingresses that go, or that get another class, take
// their fronts with them.
func TestIngressFronts(t *testing.T) {
	t.Parallel()
	w := New(Options{Log: slog.New(slog.DiscardHandler), Changed: func() {}, Statuses: true})
	for class, controller := range map[string]string{"ours": names.IngressController, "other": "example.com/x"} {
		c := &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: class}}
		c.Spec.Controller = controller
		w.ingressClasses[class] = c
	}
	generation := int64(0)
	set := func(name, class, front string) svc.Name {
		generation++
		in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, Generation: generation}}
		if in.Spec.IngressClassName = &class; front != "" {
			in.Annotations = map[string]string{fronts.Annotation: front}
		}
		setIngress(w, svc.NameOf(in), in)
		return svc.NameOf(in)
	}
	update := func() {
		w.classify()
		w.build()
	}
	shared := names.SharedFront()
	_, x, y := set("web", "ours", ""), set("x", "ours", fronts.Own), set("y", "ours", fronts.Own)
	set("foreign", "other", fronts.Own)
	update()
	was := []any{w.ingressFronts[shared], w.ingressFronts[x], w.ingressFronts[y]}
	if len(w.ingressFronts) != 3 || w.ingressFronts[x] == nil || w.ingressFronts[y] == nil {
		t.Fatalf("fronts %v", w.ingressFronts)
	}
	set("x", "ours", fronts.Own)
	update()
	if w.ingressFronts[shared] != was[0] || w.ingressFronts[x] == was[1] || w.ingressFronts[y] != was[2] {
		t.Error("a change of an Ingress builds other fronts, too, or not its own")
	}
	set("x", "ours", "")
	set("y", "other", fronts.Own)
	update()
	if len(w.ingressFronts) != 1 || w.ingressFronts[shared] == was[0] || len(w.split.Ingresses(shared)) != 2 {
		t.Errorf("fronts %v", w.ingressFronts)
	}
	for n := range maps.Clone(w.ingresses) {
		setIngress(w, n, nil)
	}
	update()
	if len(w.ingressFronts) != 0 {
		t.Errorf("without Ingresses: %v", w.ingressFronts)
	}
}
