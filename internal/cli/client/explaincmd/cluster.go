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

// read gets the objects for a question that is not about one known Service. A user without the right to read a kind in
// all namespaces gets one namespace.
func read(ctx context.Context, client kubernetes.Interface, q *explain.Question, namespace string) (*cluster, error) {
	if q.Service.Namespace != "" {
		namespace = q.Service.Namespace
	}
	c := newCluster()
	c.settings(ctx, client)
	if list, err := namespaces(ctx, client); err == nil {
		c.objects.Namespaces = list
	}
	r := &reading{client: client, question: q, namespace: namespace, domains: c.objects.Domains}
	var err error
	if c.objects.Services, err = r.services(ctx); err != nil {
		return nil, fmt.Errorf("cannot read Services: %w", err)
	}
	if c.objects.Slices, err = r.slices(ctx, c.objects.Services); err != nil {
		return nil, fmt.Errorf("cannot read EndpointSlices: %w", err)
	}
	slices.SortFunc(c.objects.Slices, func(a, b *discoveryv1.EndpointSlice) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	if pods, err := r.pods(ctx, c.objects.Services); err == nil {
		c.objects.Pods = append([]*corev1.Pod{}, pods...) // not nil: they could be read
	}
	c.readNodes(ctx, client)
	return c, nil
}

func newCluster() *cluster {
	c := &cluster{nodes: map[string]*corev1.Node{}, tables: map[string]*table.Table{}}
	c.objects.PodTrouble = base.PodTrouble
	return c
}

// readNodes reads the Nodes, if the user may.
func (c *cluster) readNodes(ctx context.Context, client kubernetes.Interface) {
	nodes, err := base.Paged[*corev1.NodeList, corev1.Node](ctx, metav1.ListOptions{}, client.CoreV1().Nodes().List, nil)
	if err != nil {
		return
	}
	c.putNodes(nodes)
}

// readOne gets the objects for a question about one Service from the client of --from: this Service, its slices, the Pods that it
// selects, and the client. It returns nil where the question needs more: the Service does not exist, so that the answer names others.
func readOne(ctx context.Context, client kubernetes.Interface, q *explain.Question, from, namespace string) (*cluster, error) {
	if q.Service == (svc.Name{}) {
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
	c := newCluster()
	c.objects.Services = []*corev1.Service{s}
	if c.objects.Slices, err = slicesOf(ctx, client, n); err != nil {
		return nil, fmt.Errorf("cannot read EndpointSlices: %w", err)
	}
	slices.SortFunc(c.objects.Slices, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	if pods, err := podsOf(ctx, client, s); err == nil {
		c.objects.Pods = pods
	}
	c.readNodes(ctx, client)
	c.settings(ctx, client)
	c.readClient(ctx, client, from, namespace)
	return c, nil
}

// readClient adds the Pod that is, or has the address of, the client of --from, unless it is a node.
func (c *cluster) readClient(ctx context.Context, client kubernetes.Interface, from, namespace string) {
	if a, err := netip.ParseAddr(from); err == nil {
		if pods, err := podsAt(ctx, client, a.Unmap(), namespace); err == nil {
			c.objects.Pods = append(c.objects.Pods, pods...)
		}
		return
	}
	if from == "" || c.nodes[from] != nil {
		return
	}
	name := podName(from, namespace)
	if p, err := client.CoreV1().Pods(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{}); err == nil {
		c.objects.Pods = append(c.objects.Pods, p)
	}
}

// podName is the Pod that a user has written, NAME or NAMESPACE/NAME.
func podName(text, namespace string) svc.Name {
	if ns, name, ok := strings.Cut(text, "/"); ok {
		return svc.Name{Namespace: ns, Name: name}
	}
	return svc.Name{Namespace: namespace, Name: text}
}

func (c *cluster) putNodes(list []*corev1.Node) {
	for _, n := range list {
		c.nodes[n.Name] = n
		c.names = append(c.names, n.Name)
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
