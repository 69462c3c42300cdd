package placement

import (
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// Reasons of rules about other Pods.
const (
	reasonPodAffinity  = "node(s) didn't match pod affinity rules"
	reasonAntiAffinity = "node(s) didn't match pod anti-affinity rules"
	reasonRepelled     = "node(s) didn't satisfy existing pods anti-affinity rules"
	reasonSpread       = "node(s) didn't match pod topology spread constraints"
	reasonSpreadLabel  = "node(s) didn't match pod topology spread constraints (missing required label)"
)

// question is one Pod to be placed, with what of the others concerns it: counted once, and
// not for each node.
type question struct {
	pod   *corev1.Pod
	group string
	wish  usage
	nodes NodeRequirement

	attracts, avoids []counted
	lonely           bool              // the first of its group, for attracts
	repelled         map[[2]string]int // topology key and value of Pods that do not want it
	spread, evenly   []spread          // required, wished for
	near             []counted         // wished for, by weight
	preferred        *nodeaffinity.PreferredSchedulingTerms
}

// counted is a term with the Pods that it selects, by topology value.
type counted struct {
	term
	at     map[string]int
	weight int64
}

// spread is a constraint with the Pods that it selects by topology value.
type spread struct {
	key  string
	skew int
	at   map[string]int
	// least is the smallest number of all values that count.
	least int
	self  int // 1 if the Pod itself is selected
}

func (c *Cluster) question(pod *corev1.Pod) *question {
	q := &question{pod: pod, group: groupOf(pod), wish: wishOf(pod), nodes: RequirementOf(&pod.Spec), repelled: c.repel(pod)}
	if a := pod.Spec.Affinity; a != nil {
		c.affinity(q, a)
	}
	for i := range pod.Spec.TopologySpreadConstraints {
		t := &pod.Spec.TopologySpreadConstraints[i]
		if s := c.spread(q, t); t.WhenUnsatisfiable == corev1.ScheduleAnyway {
			q.evenly = append(q.evenly, s)
		} else {
			q.spread = append(q.spread, s)
		}
	}
	return q
}

func (c *Cluster) affinity(q *question, a *corev1.Affinity) {
	count := func(t *corev1.PodAffinityTerm, weight int32) counted {
		compiled := newTerm(q.pod, t)
		return counted{compiled, c.domains(compiled), int64(weight)}
	}
	if to := a.PodAffinity; to != nil {
		required := to.RequiredDuringSchedulingIgnoredDuringExecution
		for i := range required {
			q.attracts = append(q.attracts, count(&required[i], 0))
		}
		wished := to.PreferredDuringSchedulingIgnoredDuringExecution
		for i := range wished {
			q.near = append(q.near, count(&wished[i].PodAffinityTerm, wished[i].Weight))
		}
	}
	if from := a.PodAntiAffinity; from != nil {
		required := from.RequiredDuringSchedulingIgnoredDuringExecution
		for i := range required {
			q.avoids = append(q.avoids, count(&required[i], 0))
		}
		wished := from.PreferredDuringSchedulingIgnoredDuringExecution
		for i := range wished {
			q.near = append(q.near, count(&wished[i].PodAffinityTerm, -wished[i].Weight))
		}
	}
	// The first Pod of those that want to be together may go anywhere.
	q.lonely = true
	for _, t := range q.attracts {
		q.lonely = q.lonely && len(t.at) == 0 && c.selects(t.term, q.pod)
	}
	if n := a.NodeAffinity; n != nil {
		q.preferred, _ = nodeaffinity.NewPreferredSchedulingTerms(n.PreferredDuringSchedulingIgnoredDuringExecution)
	}
}

// repel counts where placed Pods do not want this one beside them.
func (c *Cluster) repel(pod *corev1.Pod) map[[2]string]int {
	out := map[[2]string]int{}
	for key := range c.repelling {
		p := c.pods[key]
		n := c.nodes[p.node]
		if n == nil {
			continue
		}
		for _, t := range p.avoids {
			if v, ok := n.Labels[t.key]; ok && c.selects(t, pod) {
				out[[2]string{t.key, v}]++
			}
		}
	}
	return out
}

// spread counts for a constraint. A topology value counts if a node that has it is one for
// the Pod by its node affinity, and by its taints if the constraint says so.
func (c *Cluster) spread(q *question, t *corev1.TopologySpreadConstraint) spread {
	pod := q.pod
	compiled := term{
		selector: extended(pod, t.LabelSelector, t.MatchLabelKeys, nil), namespaces: []string{pod.Namespace}, key: t.TopologyKey,
	}
	s := spread{key: t.TopologyKey, skew: int(t.MaxSkew), at: map[string]int{}}
	if c.selects(compiled, pod) {
		s.self = 1
	}
	counts := func(n *corev1.Node) bool {
		if t.NodeAffinityPolicy == nil || *t.NodeAffinityPolicy == corev1.NodeInclusionPolicyHonor {
			if !q.nodes.Matches(n) {
				return false
			}
		}
		if t.NodeTaintsPolicy != nil && *t.NodeTaintsPolicy == corev1.NodeInclusionPolicyHonor {
			for i := range n.Spec.Taints {
				if x := &n.Spec.Taints[i]; x.Effect != corev1.TaintEffectPreferNoSchedule && !Tolerates(pod.Spec.Tolerations, x) {
					return false
				}
			}
		}
		return true
	}
	for _, n := range c.nodes {
		v, ok := n.Labels[t.TopologyKey]
		if !ok || !counts(n) {
			continue
		}
		s.at[v] += 0
		for key := range c.on[n.Name] {
			if p := c.pods[key].pod; p.DeletionTimestamp == nil && c.selects(compiled, p) {
				s.at[v]++
			}
		}
	}
	s.least = math.MaxInt
	for _, n := range s.at {
		s.least = min(s.least, n)
	}
	if len(s.at) == 0 || t.MinDomains != nil && len(s.at) < int(*t.MinDomains) {
		s.least = 0
	}
	return s
}

// allows returns which rule about other Pods a node would break, or "".
func (q *question) allows(n *corev1.Node) string {
	for key, count := range q.repelled {
		if v, ok := n.Labels[key[0]]; count > 0 && ok && v == key[1] {
			return reasonRepelled
		}
	}
	for _, t := range q.attracts {
		if v, ok := n.Labels[t.key]; !ok || t.at[v] == 0 && !q.lonely {
			return reasonPodAffinity
		}
	}
	for _, t := range q.avoids {
		if v, ok := n.Labels[t.key]; ok && t.at[v] > 0 {
			return reasonAntiAffinity
		}
	}
	for _, s := range q.spread {
		v, ok := n.Labels[s.key]
		if !ok {
			return reasonSpreadLabel
		}
		if s.at[v]+s.self-s.least > s.skew {
			return reasonSpread
		}
	}
	return ""
}

// score is how well a node that fits has what the Pod wishes for.
func (q *question) score(n *corev1.Node) (score int64) {
	if q.preferred != nil {
		score += q.preferred.Score(n)
	}
	for _, t := range q.near {
		if v, ok := n.Labels[t.key]; ok && t.at[v] > 0 {
			score += t.weight
		}
	}
	for _, s := range q.evenly {
		score -= int64(s.at[n.Labels[s.key]])
	}
	for i := range n.Spec.Taints {
		if t := &n.Spec.Taints[i]; t.Effect == corev1.TaintEffectPreferNoSchedule && !Tolerates(q.pod.Spec.Tolerations, t) {
			score--
		}
	}
	return score
}
