package placement

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	resourcehelper "k8s.io/component-helpers/resource"
)

// Cluster is what has been placed where. It is not safe for concurrent use.
type Cluster struct {
	// Namespace returns the labels of a namespace, for terms that select by them.
	Namespace func(name string) labels.Set

	nodes map[string]*corev1.Node
	pods  map[string]placed          // by key
	on    map[string]map[string]bool // keys of Pods by node
	used  map[string]usage           // by node
	// groups counts Pods that are alike by group and node.
	groups map[string]map[string]int
	// repelling are the keys of Pods with required anti-affinity.
	repelling map[string]bool
}

type placed struct {
	pod  *corev1.Pod
	node string
	wish usage
	// avoids are its terms of required anti-affinity.
	avoids []term
}

// usage is what Pods ask for of a node.
type usage struct{ pods, cpu, memory int64 }

// NewCluster returns a Cluster without nodes.
func NewCluster(namespace func(name string) labels.Set) *Cluster {
	return &Cluster{
		Namespace: namespace, nodes: map[string]*corev1.Node{}, pods: map[string]placed{}, on: map[string]map[string]bool{},
		used: map[string]usage{}, groups: map[string]map[string]int{}, repelling: map[string]bool{},
	}
}

// SetNode adds a node, or takes its new state, and returns the state before, nil if it is new.
func (c *Cluster) SetNode(n *corev1.Node) (before *corev1.Node) {
	before = c.nodes[n.Name]
	c.nodes[n.Name] = n
	return before
}

// DeleteNode removes a node. Its Pods stay until they are removed.
func (c *Cluster) DeleteNode(name string) { delete(c.nodes, name) }

// Nodes is how many nodes there are.
func (c *Cluster) Nodes() int { return len(c.nodes) }

// Requests is what a Pod asks for of CPU and memory, as one list.
func Requests(pod *corev1.Pod) corev1.ResourceList {
	all := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true})
	out := corev1.ResourceList{}
	for _, r := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		if q, ok := all[r]; ok && !q.IsZero() {
			out[r] = q
		}
	}
	return out
}

func wishOf(pod *corev1.Pod) usage {
	r := Requests(pod)
	return usage{1, r.Cpu().MilliValue(), r.Memory().Value()}
}

// Put counts a Pod on a node. key is its name for this Cluster.
func (c *Cluster) Put(key string, pod *corev1.Pod, node string) {
	c.Remove(key)
	p := placed{pod: pod, node: node, wish: wishOf(pod)}
	if a := pod.Spec.Affinity; a != nil && a.PodAntiAffinity != nil {
		for i := range a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution {
			p.avoids = append(p.avoids, newTerm(pod, &a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[i]))
		}
	}
	c.pods[key] = p
	if c.on[node] == nil {
		c.on[node] = map[string]bool{}
	}
	c.on[node][key] = true
	c.add(p, 1)
	if len(p.avoids) > 0 {
		c.repelling[key] = true
	}
}

// Remove ends counting a Pod.
func (c *Cluster) Remove(key string) {
	p, ok := c.pods[key]
	if !ok {
		return
	}
	delete(c.pods, key)
	delete(c.repelling, key)
	if delete(c.on[p.node], key); len(c.on[p.node]) == 0 {
		delete(c.on, p.node)
	}
	c.add(p, -1)
}

// Repels reports whether a Pod that is counted keeps others away by anti-affinity.
func (c *Cluster) Repels(key string) bool { return c.repelling[key] }

func (c *Cluster) add(p placed, sign int64) {
	u := c.used[p.node]
	u = usage{u.pods + sign*p.wish.pods, u.cpu + sign*p.wish.cpu, u.memory + sign*p.wish.memory}
	if c.used[p.node] = u; u == (usage{}) {
		delete(c.used, p.node)
	}
	group := groupOf(p.pod)
	if c.groups[group] == nil {
		c.groups[group] = map[string]int{}
	}
	if c.groups[group][p.node] += int(sign); c.groups[group][p.node] == 0 {
		delete(c.groups[group], p.node)
	}
	if len(c.groups[group]) == 0 {
		delete(c.groups, group)
	}
}

// groupOf names the Pods that must be spread: the Pods of a namespace with the same labels
// except labels of a revision. The Pods of a set and, nearly always, of a Service are such.
func groupOf(pod *corev1.Pod) string {
	var b strings.Builder
	b.WriteString(pod.Namespace)
	for _, k := range slices.Sorted(maps.Keys(pod.Labels)) {
		switch k {
		case "pod-template-hash", "controller-revision-hash", "pod-template-generation":
		default:
			fmt.Fprintf(&b, "\x00%s=%s", k, pod.Labels[k])
		}
	}
	return b.String()
}

// Choose returns the node that suits a Pod best, or "" with the number of nodes by the
// reason why they do not. free reports whether the Pod can have its ports on a node.
func (c *Cluster) Choose(pod *corev1.Pod, free func(node string) bool) (node string, reasons map[string]int) {
	reasons = map[string]int{}
	q := c.question(pod)
	var fit []*corev1.Node
	try := func(n *corev1.Node) {
		if why := c.fits(q, n, free); why != "" {
			reasons[why]++
		} else {
			fit = append(fit, n)
		}
	}
	if names, named := namedNodes(&pod.Spec); named {
		others := len(c.nodes)
		for name := range names {
			if n := c.nodes[name]; n != nil {
				try(n)
				others--
			}
		}
		if others > 0 {
			reasons[ReasonAffinity] += others
		}
	} else {
		for _, n := range c.nodes {
			try(n)
		}
	}
	if len(fit) == 0 {
		return "", reasons
	}
	zones := map[string]int{}
	for name, count := range c.groups[q.group] {
		if n := c.nodes[name]; n != nil {
			zones[n.Labels[corev1.LabelTopologyZone]] += count
		}
	}
	best := slices.MinFunc(fit, func(a, b *corev1.Node) int {
		return cmp.Or(
			-cmp.Compare(q.score(a), q.score(b)),
			cmp.Compare(c.groups[q.group][a.Name], c.groups[q.group][b.Name]),
			cmp.Compare(zones[a.Labels[corev1.LabelTopologyZone]], zones[b.Labels[corev1.LabelTopologyZone]]),
			cmp.Compare(c.used[a.Name].pods, c.used[b.Name].pods),
			strings.Compare(a.Name, b.Name),
		)
	})
	return best.Name, nil
}

// fits returns why the Pod of q cannot go to a node, or "".
func (c *Cluster) fits(q *question, n *corev1.Node, free func(string) bool) string {
	if why := misfit(q.pod, q.nodes, n); why != "" {
		return why
	}
	if !free(n.Name) {
		return "node(s) didn't have free ports for the requested pod ports"
	}
	if why := c.room(q.wish, n); why != "" {
		return why
	}
	return q.allows(n)
}

// MayTake reports whether a node could take a Pod as far as the node and its room decide that:
// rules about other Pods are left out.
func (c *Cluster) MayTake(pod *corev1.Pod, node string, free func(node string) bool) bool {
	n := c.nodes[node]
	return n != nil && c.room(wishOf(pod), n) == "" && free(node) && misfit(pod, RequirementOf(&pod.Spec), n) == ""
}

// room returns what a node has too little of. What it does not tell has no limit.
func (c *Cluster) room(wish usage, n *corev1.Node) string {
	u := c.used[n.Name]
	over := func(name corev1.ResourceName, used, wish int64, of func(*resource.Quantity) int64) bool {
		q, ok := n.Status.Allocatable[name]
		return ok && wish > 0 && used+wish > of(&q)
	}
	switch {
	case over(corev1.ResourcePods, u.pods, wish.pods, (*resource.Quantity).Value):
		return "Too many pods"
	case over(corev1.ResourceCPU, u.cpu, wish.cpu, (*resource.Quantity).MilliValue):
		return "Insufficient cpu"
	case over(corev1.ResourceMemory, u.memory, wish.memory, (*resource.Quantity).Value):
		return "Insufficient memory"
	}
	return ""
}

// term is a compiled term of a Pod: which others it is about, and what being together means.
type term struct {
	selector   labels.Selector
	namespaces []string
	byLabels   labels.Selector // of namespaces; nil for none
	key        string
}

// newTerm compiles a term of a Pod. A selector that cannot be read selects nothing;
// validation has seen to it that there is none.
func newTerm(pod *corev1.Pod, t *corev1.PodAffinityTerm) term {
	selector := extended(pod, t.LabelSelector, t.MatchLabelKeys, t.MismatchLabelKeys)
	out := term{selector: selector, namespaces: t.Namespaces, key: t.TopologyKey}
	if t.NamespaceSelector != nil {
		if s, err := metav1.LabelSelectorAsSelector(t.NamespaceSelector); err == nil {
			out.byLabels = s
		}
	}
	if len(t.Namespaces) == 0 && t.NamespaceSelector == nil {
		out.namespaces = []string{pod.Namespace}
	}
	return out
}

// extended returns a selector with what it takes from the Pod's own labels.
func extended(pod *corev1.Pod, selector *metav1.LabelSelector, same, different []string) labels.Selector {
	if selector == nil {
		return labels.Nothing()
	}
	s := selector.DeepCopy()
	add := func(keys []string, operator metav1.LabelSelectorOperator) {
		for _, k := range keys {
			if v, ok := pod.Labels[k]; ok {
				s.MatchExpressions = append(s.MatchExpressions, metav1.LabelSelectorRequirement{Key: k, Operator: operator, Values: []string{v}})
			}
		}
	}
	add(same, metav1.LabelSelectorOpIn)
	add(different, metav1.LabelSelectorOpNotIn)
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return out
}

func (c *Cluster) selects(t term, pod *corev1.Pod) bool {
	if !t.selector.Matches(labels.Set(pod.Labels)) {
		return false
	}
	return slices.Contains(t.namespaces, pod.Namespace) || t.byLabels != nil && t.byLabels.Matches(c.Namespace(pod.Namespace))
}

// domains counts the placed Pods that a term selects by the value of its topology key.
func (c *Cluster) domains(t term) map[string]int {
	out := map[string]int{}
	for _, p := range c.pods {
		if n := c.nodes[p.node]; n != nil && c.selects(t, p.pod) {
			if v, ok := n.Labels[t.key]; ok {
				out[v]++
			}
		}
	}
	return out
}
