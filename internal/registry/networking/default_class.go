package networking

import (
	"context"

	networkingv1 "k8s.io/api/networking/v1"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/gateway/names"
)

// giveDefaultClass makes a new Ingress that names no class one of the default
// class, as the admission plug-in DefaultIngressClass of Kubernetes.
func giveDefaultClass(classes rest.Lister) genericregistry.BeginCreateFunc {
	return func(ctx context.Context, obj runtime.Object, _ *metav1.CreateOptions) (genericregistry.FinishFunc, error) {
		done := func(context.Context, bool) {}
		ingress := obj.(*networkingv1.Ingress)
		if _, old := ingress.Annotations[classAnnotation]; old || ingress.Spec.IngressClassName != nil {
			return done, nil
		}
		list, err := classes.List(genericapirequest.WithNamespace(ctx, metav1.NamespaceNone), &metainternalversion.ListOptions{})
		if err != nil {
			return nil, err
		}
		items := list.(*networkingv1.IngressClassList).Items
		if c := names.DefaultClass(func(yield func(*networkingv1.IngressClass) bool) {
			for i := range items {
				if !yield(&items[i]) {
					return
				}
			}
		}); c != "" {
			ingress.Spec.IngressClassName = &c
		}
		return done, nil
	}
}
