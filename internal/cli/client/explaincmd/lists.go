package explaincmd

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
)

// everywhere lists in all namespaces, or in one if the user may not.
func everywhere[T any](namespace string, list func(namespace string) ([]T, error)) ([]T, error) {
	out, err := list(metav1.NamespaceAll)
	if apierrors.IsForbidden(err) {
		return list(namespace)
	}
	return out, err
}

func namespaces(ctx context.Context, client kubernetes.Interface) (out []string, err error) {
	list, err := base.Paged[*corev1.NamespaceList, corev1.Namespace](ctx, metav1.ListOptions{}, client.CoreV1().Namespaces().List, nil)
	for _, n := range list {
		out = append(out, n.Name)
	}
	return out, err
}

// slicesOf are the slices of one Service.
func slicesOf(ctx context.Context, client kubernetes.Interface, n svc.Name) ([]*discoveryv1.EndpointSlice, error) {
	o := metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: n.Name}.String()}
	return base.Paged[*discoveryv1.EndpointSliceList, discoveryv1.EndpointSlice](ctx, o,
		client.DiscoveryV1().EndpointSlices(n.Namespace).List, nil)
}

// podsOf are the Pods that a Service selects; without a selector all of its namespace: its slices may name any Pod.
func podsOf(ctx context.Context, client kubernetes.Interface, s *corev1.Service) ([]*corev1.Pod, error) {
	o := metav1.ListOptions{LabelSelector: labels.Set(s.Spec.Selector).String()}
	return base.Paged[*corev1.PodList, corev1.Pod](ctx, o, client.CoreV1().Pods(s.Namespace).List, nil)
}

// podsAt are the Pods with an address: by the field that has the first one of a Pod, else by a look at all of them, page by page.
func podsAt(ctx context.Context, client kubernetes.Interface, a netip.Addr, namespace string) ([]*corev1.Pod, error) {
	has := func(p *corev1.Pod) bool {
		return slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == a.String() })
	}
	list := func(o metav1.ListOptions) ([]*corev1.Pod, error) {
		return everywhere(namespace, func(namespace string) ([]*corev1.Pod, error) {
			return base.Paged[*corev1.PodList](ctx, o, client.CoreV1().Pods(namespace).List, has)
		})
	}
	out, err := list(metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("status.podIP", a.String()).String()})
	if len(out) > 0 || apierrors.IsForbidden(err) {
		return out, err
	}
	return list(metav1.ListOptions{})
}

// reading lists what a question needs.
type reading struct {
	client    kubernetes.Interface
	question  *explain.Question
	namespace string // of a user who may not read all
	domains   []string
}

// services lists the Services with the address, or the ones that are meant by the name or the Service, with similar names.
func (r *reading) services(ctx context.Context) ([]*corev1.Service, error) {
	var keep func(*corev1.Service) bool
	if q := r.question; q.Address.IsValid() {
		keep = func(s *corev1.Service) bool { return explain.MayHave(s, q.Address) }
	} else {
		wanted := []svc.Name{q.Service}
		if q.Name != "" {
			wanted = explain.Meant(q.Name, r.domains)
		}
		keep = func(s *corev1.Service) bool {
			return slices.ContainsFunc(wanted, func(n svc.Name) bool { return n.Namespace == s.Namespace || n.Name == s.Name })
		}
	}
	return everywhere(r.namespace, func(namespace string) ([]*corev1.Service, error) {
		return base.Paged[*corev1.ServiceList](ctx, metav1.ListOptions{}, r.client.CoreV1().Services(namespace).List, keep)
	})
}

// about are the Services that the answer may be about.
func (r *reading) about(services []*corev1.Service) []*corev1.Service {
	if r.question.Address.IsValid() {
		return services
	}
	wanted := append(explain.Meant(r.question.Name, r.domains), r.question.Service)
	return slices.DeleteFunc(slices.Clone(services), func(s *corev1.Service) bool { return !slices.Contains(wanted, svc.NameOf(s)) })
}

func (r *reading) slices(ctx context.Context, services []*corev1.Service) (out []*discoveryv1.EndpointSlice, err error) {
	for _, s := range r.about(services) {
		list, err := slicesOf(ctx, r.client, svc.NameOf(s))
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
	}
	return out, nil
}

func (r *reading) pods(ctx context.Context, services []*corev1.Service) (out []*corev1.Pod, err error) {
	about := r.about(services)
	for _, s := range about {
		list, err := podsOf(ctx, r.client, s)
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
	}
	if len(about) == 0 && r.question.Address.IsValid() {
		return podsAt(ctx, r.client, r.question.Address.Addr(), r.namespace)
	}
	return out, nil
}
