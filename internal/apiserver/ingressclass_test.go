package apiserver_test

import (
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A new Ingress that names no class gets the default one.
func testDefaultClass(a api) {
	create := func(name string, change func(*networkingv1.Ingress)) string {
		i := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: name}}
		i.Spec.DefaultBackend = &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "s",
			Port: networkingv1.ServiceBackendPort{Number: 80}}}
		if change != nil {
			change(i)
		}
		made, err := a.client.NetworkingV1().Ingresses(a.ns).Create(a.ctx, i, metav1.CreateOptions{})
		a.must(err)
		if made.Spec.IngressClassName == nil {
			return ""
		}
		return *made.Spec.IngressClassName
	}
	class := func(name, isDefault string) {
		_, err := a.client.NetworkingV1().IngressClasses().Create(a.ctx, &networkingv1.IngressClass{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{networkingv1.AnnotationIsDefaultIngressClass: isDefault}},
			Spec:       networkingv1.IngressClassSpec{Controller: "example.com/c"},
		}, metav1.CreateOptions{})
		a.must(err)
	}
	class("other", "false")
	if got := create("none", nil); got != "" {
		a.Errorf("without a default class: %q", got)
	}
	class("usual", "true")
	for _, c := range []struct {
		name, want string
		change     func(*networkingv1.Ingress)
	}{
		{"plain", "usual", nil},
		{"named", "other", func(i *networkingv1.Ingress) { i.Spec.IngressClassName = new("other") }},
		{"annotated", "", func(i *networkingv1.Ingress) {
			i.Annotations = map[string]string{"kubernetes.io/ingress.class": "other"}
		}},
	} {
		if got := create(c.name, c.change); got != c.want {
			a.Errorf("%s: class %q, want %q", c.name, got, c.want)
		}
	}
}
