package networking

import (
	"cmp"
	"context"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
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
		if c := defaultClass(list.(*networkingv1.IngressClassList).Items); c != "" {
			ingress.Spec.IngressClassName = &c
		}
		return done, nil
	}
}

// defaultClass is the name of the default class, of several the newest; empty
// if there is none.
func defaultClass(all []networkingv1.IngressClass) string {
	all = slices.DeleteFunc(all, func(c networkingv1.IngressClass) bool {
		return c.Annotations[networkingv1.AnnotationIsDefaultIngressClass] != "true"
	})
	if len(all) == 0 {
		return ""
	}
	return slices.MinFunc(all, func(a, b networkingv1.IngressClass) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	}).Name
}
