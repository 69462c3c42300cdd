package explaincmd

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// cluster has the objects of the API.
type cluster struct {
	objects explain.Objects
	nodes   map[string]*corev1.Node
	names   []string // of the nodes, sorted
	ranges  explain.Cluster

	mu     sync.Mutex
	tables map[string]*table.Table
}

// read gets the objects for a question. A user without the right to read a kind in all namespaces gets one namespace.
func read(ctx context.Context, client kubernetes.Interface, q *explain.Question, namespace string) (*cluster, error) {
	if q.Service.Namespace != "" {
		namespace = q.Service.Namespace
	}
	c := &cluster{nodes: map[string]*corev1.Node{}, tables: map[string]*table.Table{}}
	c.objects.PodTrouble = base.PodTrouble
	all := metav1.ListOptions{}
	services, err := client.CoreV1().Services("").List(ctx, all)
	if err != nil {
		if services, err = client.CoreV1().Services(namespace).List(ctx, all); err != nil {
			return nil, fmt.Errorf("cannot read Services: %w", err)
		}
	}
	c.objects.Services = pointers(services.Items)
	slicesOf, err := client.DiscoveryV1().EndpointSlices("").List(ctx, all)
	if err != nil {
		if slicesOf, err = client.DiscoveryV1().EndpointSlices(namespace).List(ctx, all); err != nil {
			return nil, fmt.Errorf("cannot read EndpointSlices: %w", err)
		}
	}
	c.objects.Slices = pointers(slicesOf.Items)
	slices.SortFunc(c.objects.Slices, func(a, b *discoveryv1.EndpointSlice) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	pods, err := client.CoreV1().Pods("").List(ctx, all)
	if err != nil {
		pods, err = client.CoreV1().Pods(namespace).List(ctx, all)
	}
	if err == nil {
		c.objects.Pods = pointers(pods.Items)
	}
	c.readNodes(ctx, client)
	if list, err := client.CoreV1().Namespaces().List(ctx, all); err == nil {
		for i := range list.Items {
			c.objects.Namespaces = append(c.objects.Namespaces, list.Items[i].Name)
		}
	}
	c.settings(ctx, client)
	return c, nil
}

// readNodes reads the Nodes, if the user may.
func (c *cluster) readNodes(ctx context.Context, client kubernetes.Interface) {
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	c.putNodes(nodes.Items)
}

// readOne gets the objects for a question about one Service from the client of --from: this Service, its slices, the Pods that it
// selects, and the client. It returns nil where the question needs more: the Service does not exist, so that the answer names others,
// or from is an address, which may be any Pod's.
func readOne(ctx context.Context, client kubernetes.Interface, q *explain.Question, from, namespace string) (*cluster, error) {
	if _, err := netip.ParseAddr(from); err == nil || q.Service == (svc.Name{}) {
		return nil, nil
	}
	n := q.Service
	s, err := client.CoreV1().Services(n.Namespace).Get(ctx, n.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read Service %s: %w", n, err)
	}
	c := &cluster{nodes: map[string]*corev1.Node{}, tables: map[string]*table.Table{}}
	c.objects.PodTrouble, c.objects.Services = base.PodTrouble, []*corev1.Service{s}
	list, err := client.DiscoveryV1().EndpointSlices(n.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + n.Name})
	if err != nil {
		return nil, fmt.Errorf("cannot read EndpointSlices: %w", err)
	}
	c.objects.Slices = pointers(list.Items)
	slices.SortFunc(c.objects.Slices, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	selector := metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: s.Spec.Selector})
	if len(s.Spec.Selector) == 0 {
		selector = "" // its slices may name any Pod
	}
	if pods, err := client.CoreV1().Pods(n.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector}); err == nil {
		c.objects.Pods = pointers(pods.Items)
	}
	c.readNodes(ctx, client)
	if from != "" && c.nodes[from] == nil {
		name := podName(from, namespace)
		if p, err := client.CoreV1().Pods(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{}); err == nil {
			c.objects.Pods = append(c.objects.Pods, p)
		}
	}
	c.settings(ctx, client)
	return c, nil
}

// podName is the Pod that a user has written, NAME or NAMESPACE/NAME.
func podName(text, namespace string) svc.Name {
	if ns, name, ok := strings.Cut(text, "/"); ok {
		return svc.Name{Namespace: ns, Name: name}
	}
	return svc.Name{Namespace: namespace, Name: text}
}

func (c *cluster) putNodes(list []corev1.Node) {
	for i := range list {
		c.nodes[list[i].Name] = &list[i]
		c.names = append(c.names, list[i].Name)
	}
	slices.Sort(c.names)
}

// settings reads the ranges and domains that a fairlead server publishes, else the ServiceCIDRs and the usual domain.
func (c *cluster) settings(ctx context.Context, client kubernetes.Interface) {
	c.objects.Domains = []string{"cluster.local"}
	if published, err := join.ReadCluster(ctx, client); err == nil {
		c.ranges = explain.Cluster{PodCIDRs: published.PodCIDRs, ServiceCIDRs: published.ServiceCIDRs}
		if len(published.Domains) > 0 {
			c.objects.Domains = published.Domains
		}
	}
	list, err := client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) == 0 {
		return
	}
	c.ranges.ServiceCIDRs = cidrs(list.Items)
}

func cidrs(list []networkingv1.ServiceCIDR) (out []netip.Prefix) {
	for i := range list {
		for _, text := range list[i].Spec.CIDRs {
			if p, err := netip.ParsePrefix(text); err == nil {
				out = append(out, p)
			}
		}
	}
	return out
}

// table is the Table that a node must have.
func (c *cluster) table(node string) *table.Table {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tables[node] == nil {
		c.tables[node] = explain.Build(&c.ranges, node, c.nodes[node], c.objects.Services, c.objects.Slices)
	}
	return c.tables[node]
}

func pointers[T any](list []T) []*T {
	out := make([]*T, len(list))
	for i := range list {
		out[i] = &list[i]
	}
	return out
}
