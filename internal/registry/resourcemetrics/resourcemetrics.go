// Package resourcemetrics serves metrics.k8s.io/v1beta1: what nodes and Pods use now, as their agents measure it. Nothing is
// stored. kubectl top, k9s and dashboards ask for it.
package resourcemetrics

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"github.com/fairlead/fairlead/internal/registry/node"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// window is the time over which agents measure processors (api.Server.Summary).
const window = 500 * time.Millisecond

// Source is where objects are read.
type Source interface {
	rest.Getter
	rest.Lister
}

// NewStorage returns the storages by resource path. Agents measure; nodes and pods are the storages of Nodes and Pods.
func NewStorage(agents *node.Agents, nodes, pods Source) map[string]rest.Storage {
	c := newCollector(agents)
	return map[string]rest.Storage{
		"nodes": &nodeMetrics{TableConvertor: nodeTable(), nodes: nodes, collector: c},
		"pods":  &podMetrics{TableConvertor: podTable(), pods: pods, collector: c},
	}
}

// AddToScheme adds what the kinds need beyond their types.
func AddToScheme(s *runtime.Scheme) error {
	if err := store.AddFieldLabels(s, metricsv1beta1.SchemeGroupVersion.WithKind("NodeMetrics")); err != nil {
		return err
	}
	return store.AddFieldLabels(s, metricsv1beta1.SchemeGroupVersion.WithKind("PodMetrics"))
}

// nodeMetrics is the usage of nodes.
type nodeMetrics struct {
	rest.TableConvertor
	nodes     Source
	collector *collector
}

var (
	_ Source                    = (*nodeMetrics)(nil)
	_ rest.Storage              = (*nodeMetrics)(nil)
	_ rest.Scoper               = (*nodeMetrics)(nil)
	_ rest.SingularNameProvider = (*nodeMetrics)(nil)
)

// New returns an empty NodeMetrics.
func (*nodeMetrics) New() runtime.Object { return &metricsv1beta1.NodeMetrics{} }

// NewList returns an empty list of them.
func (*nodeMetrics) NewList() runtime.Object { return &metricsv1beta1.NodeMetricsList{} }

// NamespaceScoped reports that they are in no namespace.
func (*nodeMetrics) NamespaceScoped() bool { return false }

// GetSingularName returns no name, since "node" is a Node.
func (*nodeMetrics) GetSingularName() string { return "" }

// Destroy does nothing: nothing is stored.
func (*nodeMetrics) Destroy() {}

// Get returns the usage of a node; 404 if there is no such Node, 503 if its agent does not measure it.
func (r *nodeMetrics) Get(ctx context.Context, name string, o *metav1.GetOptions) (runtime.Object, error) {
	obj, err := r.nodes.Get(ctx, name, o)
	if err != nil {
		return nil, err
	}
	s, err := r.collector.of(ctx, name)
	if err != nil {
		return nil, err
	}
	if !s.Node.measured() {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("the agent of node %s does not measure it", name))
	}
	return metricsOfNode(obj.(*corev1.Node), s), nil
}

// List returns the usage of the nodes that o selects, without those whose agents do not answer. If none answers, the error
// says why one of them does not.
func (r *nodeMetrics) List(ctx context.Context, o *internalversion.ListOptions) (runtime.Object, error) {
	obj, err := r.nodes.List(ctx, selection(o))
	if err != nil {
		return nil, err
	}
	nodes := obj.(*corev1.NodeList).Items
	names := make([]string, 0, len(nodes))
	for i := range nodes {
		names = append(names, nodes[i].Name)
	}
	summaries, failed := r.collector.all(ctx, names)
	if err := none(summaries, failed); err != nil {
		return nil, err
	}
	out := &metricsv1beta1.NodeMetricsList{Items: []metricsv1beta1.NodeMetrics{}}
	for i := range nodes {
		if s := summaries[nodes[i].Name]; s != nil && s.Node.measured() {
			out.Items = append(out.Items, *metricsOfNode(&nodes[i], s))
		}
	}
	return out, nil
}

func metricsOfNode(n *corev1.Node, s *summary) *metricsv1beta1.NodeMetrics {
	return &metricsv1beta1.NodeMetrics{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels, CreationTimestamp: metav1.Now()},
		Timestamp:  metav1.NewTime(s.Node.CPU.Time), Window: metav1.Duration{Duration: window}, Usage: s.Node.list(),
	}
}

// podMetrics is the usage of Pods.
type podMetrics struct {
	rest.TableConvertor
	pods      Source
	collector *collector
}

var (
	_ Source                    = (*podMetrics)(nil)
	_ rest.Storage              = (*podMetrics)(nil)
	_ rest.Scoper               = (*podMetrics)(nil)
	_ rest.SingularNameProvider = (*podMetrics)(nil)
)

// New returns an empty PodMetrics.
func (*podMetrics) New() runtime.Object { return &metricsv1beta1.PodMetrics{} }

// NewList returns an empty list of them.
func (*podMetrics) NewList() runtime.Object { return &metricsv1beta1.PodMetricsList{} }

// NamespaceScoped reports that they are in the namespaces of their Pods.
func (*podMetrics) NamespaceScoped() bool { return true }

// GetSingularName returns no name, since "pod" is a Pod.
func (*podMetrics) GetSingularName() string { return "" }

// Destroy does nothing: nothing is stored.
func (*podMetrics) Destroy() {}

// Get returns the usage of a Pod; 404 if there is no such Pod, or if its node does not measure it, as while it starts.
func (r *podMetrics) Get(ctx context.Context, name string, o *metav1.GetOptions) (runtime.Object, error) {
	obj, err := r.pods.Get(ctx, name, o)
	if err != nil {
		return nil, err
	}
	pod := obj.(*corev1.Pod)
	if runs(pod) {
		s, err := r.collector.of(ctx, pod.Spec.NodeName)
		if err != nil {
			return nil, err
		}
		if m := metricsOfPod(pod, s); m != nil {
			return m, nil
		}
	}
	return nil, apierrors.NewNotFound(metricsv1beta1.Resource("pods"), request.NamespaceValue(ctx)+"/"+name)
}

// List returns the usage of the Pods that run and that o selects, without those whose agents do not answer. If none answers,
// the error says why one of them does not.
func (r *podMetrics) List(ctx context.Context, o *internalversion.ListOptions) (runtime.Object, error) {
	obj, err := r.pods.List(ctx, selection(o))
	if err != nil {
		return nil, err
	}
	pods := obj.(*corev1.PodList).Items
	var names []string
	for i := range pods {
		if runs(&pods[i]) {
			names = append(names, pods[i].Spec.NodeName)
		}
	}
	slices.Sort(names)
	summaries, failed := r.collector.all(ctx, slices.Compact(names))
	if err := none(summaries, failed); err != nil {
		return nil, err
	}
	out := &metricsv1beta1.PodMetricsList{Items: []metricsv1beta1.PodMetrics{}}
	for i := range pods {
		if s := summaries[pods[i].Spec.NodeName]; s != nil && runs(&pods[i]) {
			if m := metricsOfPod(&pods[i], s); m != nil {
				out.Items = append(out.Items, *m)
			}
		}
	}
	return out, nil
}

func runs(p *corev1.Pod) bool { return p.Spec.NodeName != "" && p.Status.Phase == corev1.PodRunning }

// metricsOfPod returns what s has of a Pod, nil if it has nothing.
func metricsOfPod(p *corev1.Pod, s *summary) *metricsv1beta1.PodMetrics {
	i := slices.IndexFunc(s.Pods, func(u podUsage) bool { return u.PodRef.UID == string(p.UID) })
	if i < 0 {
		return nil
	}
	m := &metricsv1beta1.PodMetrics{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace, Labels: p.Labels, CreationTimestamp: metav1.Now()},
		Window:     metav1.Duration{Duration: window},
	}
	for _, c := range s.Pods[i].Containers {
		if !c.measured() {
			continue
		}
		m.Timestamp = metav1.NewTime(c.CPU.Time)
		m.Containers = append(m.Containers, metricsv1beta1.ContainerMetrics{Name: c.Name, Usage: c.list()})
	}
	if len(m.Containers) == 0 {
		return nil
	}
	return m
}

// list returns u as quantities.
func (u usage) list() corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewScaledQuantity(int64(u.CPU.UsageNanoCores), resource.Nano),
		corev1.ResourceMemory: *resource.NewQuantity(int64(u.Memory.WorkingSetBytes), resource.BinarySI),
	}
}

// none returns an error if no agent has answered, though some were asked.
func none(summaries map[string]*summary, failed map[string]error) error {
	if len(summaries) > 0 || len(failed) == 0 {
		return nil
	}
	first := slices.Min(slices.Collect(maps.Keys(failed)))
	if more := len(failed) - 1; more > 0 {
		return apierrors.NewServiceUnavailable(fmt.Sprintf("%v (and %d other nodes)", failed[first], more))
	}
	return failed[first]
}

// selection is the part of o that selects objects: the answer comes in one piece.
func selection(o *internalversion.ListOptions) *internalversion.ListOptions {
	out := &internalversion.ListOptions{LabelSelector: labels.Everything(), FieldSelector: fields.Everything()}
	if o != nil && o.LabelSelector != nil {
		out.LabelSelector = o.LabelSelector
	}
	if o != nil && o.FieldSelector != nil {
		out.FieldSelector = o.FieldSelector
	}
	return out
}

// columns are what kubectl get shows.
func columns() []store.Column {
	return []store.Column{
		{Name: "CPU", Description: "Processors in use"}, {Name: "Memory", Description: "Memory in use that the kernel cannot drop at once"},
		{Name: "Window", Description: "Time over which CPU was measured"},
	}
}

func nodeTable() rest.TableConvertor {
	return store.NewTable(columns(), func(m *metricsv1beta1.NodeMetrics) []any {
		return []any{m.Usage.Cpu().String(), m.Usage.Memory().String(), m.Window.Duration.String()}
	})
}

func podTable() rest.TableConvertor {
	return store.NewTable(columns(), func(m *metricsv1beta1.PodMetrics) []any {
		var cpu, memory resource.Quantity
		for _, c := range m.Containers {
			cpu.Add(*c.Usage.Cpu())
			memory.Add(*c.Usage.Memory())
		}
		return []any{cpu.String(), memory.String(), m.Window.Duration.String()}
	})
}
