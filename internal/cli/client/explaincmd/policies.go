package explaincmd

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
)

// policies reads the NetworkPolicies of the namespaces of the endpoints and of the client, nil where the API server has no such kind, as
// a server of fairlead.
func (c *cluster) policies(ctx context.Context, client kubernetes.Interface, q *explain.Question) *explain.Policies {
	var in []string
	for _, s := range c.objects.Slices {
		in = append(in, s.Namespace)
	}
	for _, p := range c.objects.Pods {
		if slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool {
			return slices.ContainsFunc(q.Client.Addrs, func(a netip.Addr) bool { return a.String() == ip.IP })
		}) {
			in = append(in, p.Namespace)
		}
	}
	slices.Sort(in)
	out := &explain.Policies{}
	for _, namespace := range slices.Compact(in) {
		list, err := base.Paged[*networkingv1.NetworkPolicyList, networkingv1.NetworkPolicy](ctx, metav1.ListOptions{},
			client.NetworkingV1().NetworkPolicies(namespace).List, nil)
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			out.Unread = append(out.Unread, explain.Line{
				Text:   "which NetworkPolicies there are is not known: " + base.OneLine(err),
				Source: "NetworkPolicies of namespace " + namespace})
		}
		out.List = append(out.List, list...)
	}
	if len(out.List) == 0 {
		return out
	}
	out.Namespaces = namespaceLabels(ctx, client)
	if len(q.Client.Addrs) > 0 {
		_, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: 1})
		out.SomePods = err != nil
	}
	return out
}

// namespaceLabels returns the labels of all namespaces, nil if the user may not read them.
func namespaceLabels(ctx context.Context, client kubernetes.Interface) map[string]labels.Set {
	list, err := base.Paged[*corev1.NamespaceList, corev1.Namespace](ctx, metav1.ListOptions{}, client.CoreV1().Namespaces().List, nil)
	if err != nil {
		return nil
	}
	out := map[string]labels.Set{}
	for _, n := range list {
		out[n.Name] = n.Labels
	}
	return out
}
