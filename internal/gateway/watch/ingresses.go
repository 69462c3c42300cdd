package watch

import (
	"maps"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/svc"
)

// buildIngresses builds the fronts of Ingresses that have changed. The caller holds mu.
func (w *Watch) buildIngresses() {
	if len(w.changedIngresses) > 0 {
		changes := map[svc.Name]*networkingv1.Ingress{}
		for n := range w.changedIngresses {
			changes[n] = w.objects.Ingresses[n]
		}
		for n := range w.renewedIngresses {
			if changes[n] == nil {
				changes[n] = w.objects.Ingresses[n]
			}
		}
		maps.DeleteFunc(w.renewedIngresses, func(n svc.Name, _ bool) bool { return w.changedIngresses[n] })
		next, changed := w.split.Next(changes, w.renewedIngresses)
		clear(w.renewedIngresses)
		w.split = next
		maps.Copy(w.dirtyIngresses, changed)
	}
	for f, dirty := range w.dirtyIngresses {
		at := w.split.Ingresses(f)
		if dirty && len(at) > 0 {
			objects := w.objects
			objects.Ingresses = at
			before := w.ingressFronts[f]
			w.ingressFronts[f] = gateway.BuildIngress(&objects, before)
			builtIngresses(w, f, before, w.ingressFronts[f])
		} else if len(at) == 0 {
			builtIngresses(w, f, w.ingressFronts[f], nil)
			delete(w.ingressFronts, f)
		}
	}
	clear(w.changedIngresses)
	clear(w.dirtyIngresses)
}
