package workloads

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/placement"
)

// failedDelay is the least age of a failed Pod of a DaemonSet before another one takes its
// place: a node may reject each at once.
const failedDelay = 10 * time.Second

// Daemons is what is to be done for a DaemonSet.
type Daemons struct {
	// Create has the nodes that lack a Pod.
	Create []string
	// Delete are Pods that are too many, old, or have ended.
	Delete []*corev1.Pod
	Status appsv1.DaemonSetStatus
	// After is when to look again, 0 for when something changes.
	After time.Duration
}

// daemons is a decision on its way.
type daemons struct {
	d       *appsv1.DaemonSet
	hash    string
	nodes   map[string][]*corev1.Pod // all Pods that keep others from their node, by that node
	deleted leaving
	now     time.Time
	out     Daemons

	// spec is the template's, with what all daemons tolerate, and requires what it asks of nodes.
	spec     corev1.PodSpec
	requires placement.NodeRequirement
}

// PlanDaemonSet decides for d, which has the Pods owned; hash is that of its current
// revision. deleted are Pods that have been deleted already.
func PlanDaemonSet(d *appsv1.DaemonSet, hash string, owned []*corev1.Pod, nodes []*corev1.Node,
	deleted map[types.UID]bool, now time.Time,
) Daemons {
	p := &daemons{d: d, hash: hash, nodes: map[string][]*corev1.Pod{}, deleted: deleted, now: now, spec: d.Spec.Template.Spec}
	p.spec.Tolerations = slices.Clone(p.spec.Tolerations)
	tolerateNodes(&p.spec)
	p.requires = placement.RequirementOf(&p.spec)
	for _, pod := range owned {
		if name := targetNode(pod); name != "" && !(ended(pod) && p.goes(pod)) {
			p.nodes[name] = append(p.nodes[name], pod)
		}
	}
	for _, list := range p.nodes {
		slices.SortFunc(list, oldestPodFirst)
	}
	nodes = slices.SortedFunc(slices.Values(nodes), func(a, b *corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	var should []string
	for _, n := range nodes {
		runs, stays := p.eligible(n)
		if runs {
			should = append(should, n.Name)
		}
		if d.DeletionTimestamp == nil {
			p.manage(n.Name, runs, stays)
		}
	}
	p.status(nodes, should)
	if d.DeletionTimestamp == nil && len(p.out.Create)+len(p.out.Delete) == 0 &&
		d.Spec.UpdateStrategy.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		p.roll(should)
	}
	return p.out
}

// targetNode is the node a Pod of a DaemonSet is on, or is for.
func targetNode(pod *corev1.Pod) string {
	if pod.Spec.NodeName != "" || pod.Spec.Affinity == nil || pod.Spec.Affinity.NodeAffinity == nil {
		return pod.Spec.NodeName
	}
	required := pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if required == nil {
		return ""
	}
	for _, t := range required.NodeSelectorTerms {
		for _, f := range t.MatchFields {
			if f.Key == metav1.ObjectNameField && f.Operator == corev1.NodeSelectorOpIn && len(f.Values) == 1 {
				return f.Values[0]
			}
		}
	}
	return ""
}

func oldestPodFirst(a, b *corev1.Pod) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
}

// eligible reports whether a Pod should run on a node, and whether one that runs there may
// stay.
func (p *daemons) eligible(n *corev1.Node) (runs, stays bool) {
	if p.spec.NodeName != "" && p.spec.NodeName != n.Name || !p.requires.Matches(n) {
		return false, false
	}
	runs, stays = true, true
	for i := range n.Spec.Taints {
		if t := &n.Spec.Taints[i]; !placement.Tolerates(p.spec.Tolerations, t) {
			runs = runs && t.Effect == corev1.TaintEffectPreferNoSchedule
			stays = stays && t.Effect != corev1.TaintEffectNoExecute
		}
	}
	return runs, stays
}

func (p *daemons) goes(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp != nil || p.deleted[pod.UID]
}

func (p *daemons) surges() bool {
	s := p.d.Spec.UpdateStrategy
	return s.Type == appsv1.RollingUpdateDaemonSetStrategyType && s.RollingUpdate != nil && share(s.RollingUpdate.MaxSurge, 100, true) > 0
}

// manage brings the Pods of one node to one, or two in the middle of an update with surge.
func (p *daemons) manage(node string, runs, stays bool) {
	pods := p.nodes[node]
	var alive []*corev1.Pod
	for _, pod := range pods {
		switch {
		case p.goes(pod):
		case !stays:
			p.out.Delete = append(p.out.Delete, pod)
		case ended(pod):
			if wait := failedDelay - p.now.Sub(pod.CreationTimestamp.Time); wait > 0 && pod.Status.Phase == corev1.PodFailed {
				p.again(wait)
			} else {
				p.out.Delete = append(p.out.Delete, pod)
			}
		default:
			alive = append(alive, pod)
		}
	}
	switch {
	case runs && (len(pods) == 0 || p.surges() && len(alive) == 0 && !slices.ContainsFunc(pods, ended)):
		p.out.Create = append(p.out.Create, node)
	case len(alive) < 2:
	case !p.surges():
		p.out.Delete = append(p.out.Delete, alive[1:]...)
	default:
		p.pair(alive)
	}
}

// pair keeps the oldest Pod of the current revision, and the oldest of others while it is
// ready and the new one is not available.
func (p *daemons) pair(alive []*corev1.Pod) {
	var fresh, old *corev1.Pod
	for _, pod := range alive {
		switch {
		case p.current(pod) && fresh == nil:
			fresh = pod
		case !p.current(pod) && old == nil:
			old = pod
		default:
			p.out.Delete = append(p.out.Delete, pod)
		}
	}
	if fresh != nil && old != nil && (!IsReady(old) || p.available(fresh)) {
		p.out.Delete = append(p.out.Delete, old)
	}
}

func (p *daemons) current(pod *corev1.Pod) bool {
	return pod.Labels[appsv1.ControllerRevisionHashLabelKey] == p.hash
}

func (p *daemons) available(pod *corev1.Pod) bool {
	wait, ok := availableIn(pod, p.d.Spec.MinReadySeconds, p.now)
	if ok && wait > 0 {
		p.again(wait)
	}
	return ok && wait == 0
}

func (p *daemons) again(after time.Duration) {
	if p.out.After == 0 || after < p.out.After {
		p.out.After = after
	}
}

func (p *daemons) status(nodes []*corev1.Node, should []string) {
	s := *p.d.Status.DeepCopy()
	wanted := make(map[string]bool, len(should))
	for _, name := range should {
		wanted[name] = true
	}
	s = appsv1.DaemonSetStatus{ObservedGeneration: p.d.Generation, CollisionCount: s.CollisionCount, Conditions: s.Conditions}
	s.DesiredNumberScheduled = int32(len(should))
	for _, n := range nodes {
		pods := p.nodes[n.Name]
		switch {
		case len(pods) == 0:
			continue
		case !wanted[n.Name]:
			s.NumberMisscheduled++
			continue
		}
		s.CurrentNumberScheduled++
		if IsReady(pods[0]) {
			s.NumberReady++
		}
		if p.available(pods[0]) {
			s.NumberAvailable++
		}
		if p.current(pods[0]) {
			s.UpdatedNumberScheduled++
		}
	}
	s.NumberUnavailable = s.DesiredNumberScheduled - s.NumberAvailable
	p.out.Status = s
}

// onNode returns the Pods of the current and of another revision that stay on a node; ok is
// false if there are several of one.
func (p *daemons) onNode(node string) (fresh, old *corev1.Pod, ok bool) {
	for _, pod := range p.nodes[node] {
		switch {
		case p.goes(pod):
		case p.current(pod):
			if fresh != nil {
				return nil, nil, false
			}
			fresh = pod
		default:
			if old != nil {
				return nil, nil, false
			}
			old = pod
		}
	}
	return fresh, old, true
}

// roll goes a step of a rolling update over the nodes that should have a Pod.
func (p *daemons) roll(should []string) {
	r := p.d.Spec.UpdateStrategy.RollingUpdate
	if r == nil {
		return
	}
	surge, unavailable := share(r.MaxSurge, len(should), true), share(r.MaxUnavailable, len(should), true)
	if surge > 0 {
		p.rollWithSurge(should, surge)
		return
	}
	unavailable = max(1, unavailable)
	var candidates []*corev1.Pod
	missing := 0
	for _, node := range should {
		fresh, old, ok := p.onNode(node)
		switch {
		case !ok || (fresh == nil) == (old == nil):
			missing++
		case fresh != nil:
			if !p.available(fresh) {
				missing++
			}
		case !p.available(old):
			p.out.Delete = append(p.out.Delete, old)
			missing++
		default:
			candidates = append(candidates, old)
		}
	}
	p.out.Delete = append(p.out.Delete, candidates[:min(len(candidates), max(0, unavailable-missing))]...)
}

// rollWithSurge creates new Pods beside old ones, at most surge that are not available.
func (p *daemons) rollWithSurge(should []string, surge int) {
	var candidates []string
	for _, node := range should {
		fresh, old, ok := p.onNode(node)
		switch {
		case !ok:
			surge--
		case old == nil:
		case fresh != nil:
			if !p.available(fresh) {
				surge--
			}
		case !p.available(old):
			p.out.Create = append(p.out.Create, node)
		default:
			candidates = append(candidates, node)
		}
	}
	p.out.Create = append(p.out.Create, candidates[:min(len(candidates), max(0, surge))]...)
}

// tolerateNodes adds what Pods of DaemonSets tolerate: they belong to their node, whatever
// state it is in.
func tolerateNodes(s *corev1.PodSpec) {
	add := func(key string, effect corev1.TaintEffect) {
		t := corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: effect}
		if !slices.Contains(s.Tolerations, t) {
			s.Tolerations = append(s.Tolerations, t)
		}
	}
	add(corev1.TaintNodeNotReady, corev1.TaintEffectNoExecute)
	add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoExecute)
	for _, key := range []string{
		corev1.TaintNodeDiskPressure, corev1.TaintNodeMemoryPressure, corev1.TaintNodePIDPressure, corev1.TaintNodeUnschedulable,
	} {
		add(key, corev1.TaintEffectNoSchedule)
	}
	if s.HostNetwork {
		add(corev1.TaintNodeNetworkUnavailable, corev1.TaintEffectNoSchedule)
	}
}

// NewDaemon returns the Pod of d for a node.
func NewDaemon(d *appsv1.DaemonSet, hash, node string) *corev1.Pod {
	pod := NewPod(&d.Spec.Template, d, DaemonSetKind)
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	pod.Labels[appsv1.ControllerRevisionHashLabelKey] = hash
	if g := d.Annotations[appsv1.DeprecatedTemplateGeneration]; g != "" {
		pod.Labels["pod-template-generation"] = g
	}
	tolerateNodes(&pod.Spec)
	here := []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	// The node has been chosen by the terms of the template already.
	pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: here}},
	}
	return pod
}

// History is what is to be done for the revisions of a DaemonSet.
type History struct {
	// Current is the revision of the template; it is to be created if Create is set, to be
	// updated if Update is.
	Current        *appsv1.ControllerRevision
	Create, Update bool
	// Old are the others, the oldest first.
	Old []*appsv1.ControllerRevision
}

// PlanHistory finds the revision of d's template among those it has.
func PlanHistory(d *appsv1.DaemonSet, owned []*appsv1.ControllerRevision) (h History) {
	data := revisionData(d)
	newest := int64(0)
	for _, r := range slices.SortedFunc(slices.Values(owned), func(a, b *appsv1.ControllerRevision) int {
		return cmp.Compare(a.Revision, b.Revision)
	}) {
		if sameJSON(r.Data.Raw, data) {
			if h.Current != nil {
				h.Old = append(h.Old, h.Current) // the same once more; the newer one counts
			}
			h.Current = r
			continue
		}
		h.Old = append(h.Old, r)
		newest = max(newest, r.Revision)
	}
	switch {
	case h.Current == nil:
		h.Create = true
		sum := hash(&d.Spec.Template, d.Status.CollisionCount)
		labels := maps.Clone(d.Spec.Template.Labels)
		if labels == nil {
			labels = map[string]string{}
		}
		labels[appsv1.ControllerRevisionHashLabelKey] = sum
		h.Current = &appsv1.ControllerRevision{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: d.Namespace, Name: d.Name + "-" + sum, Labels: labels, Annotations: maps.Clone(d.Annotations),
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, DaemonSetKind)},
			},
			Data: runtime.RawExtension{Raw: data}, Revision: newest + 1,
		}
	case h.Current.Revision <= newest: // back to an old template
		h.Update = true
		h.Current = h.Current.DeepCopy()
		h.Current.Revision = newest + 1
		if cause, ok := d.Annotations["kubernetes.io/change-cause"]; ok {
			metav1.SetMetaDataAnnotation(&h.Current.ObjectMeta, "kubernetes.io/change-cause", cause)
		}
	}
	return h
}

// SurplusHistory returns the old revisions that are not kept: none that a Pod still has.
func SurplusHistory(d *appsv1.DaemonSet, old []*appsv1.ControllerRevision, owned []*corev1.Pod) (out []*appsv1.ControllerRevision) {
	surplus := len(old)
	if d.Spec.RevisionHistoryLimit != nil {
		surplus -= int(*d.Spec.RevisionHistoryLimit)
	}
	used := map[string]bool{}
	for _, p := range owned {
		used[p.Labels[appsv1.ControllerRevisionHashLabelKey]] = true
	}
	for _, r := range old {
		if len(out) < surplus && !used[r.Labels[appsv1.ControllerRevisionHashLabelKey]] {
			out = append(out, r)
		}
	}
	return out
}

// IsRevisionOf reports whether r holds the template of d.
func IsRevisionOf(r *appsv1.ControllerRevision, d *appsv1.DaemonSet) bool {
	return sameJSON(r.Data.Raw, revisionData(d))
}

// revisionData is the patch that brings a DaemonSet back to its present template, which
// kubectl rollout undo applies.
func revisionData(d *appsv1.DaemonSet) []byte {
	text, _ := json.Marshal(&d.Spec.Template) // API types can always be encoded
	var template map[string]any
	_ = json.Unmarshal(text, &template)
	template["$patch"] = "replace"
	data, _ := json.Marshal(map[string]any{"spec": map[string]any{"template": template}})
	return data
}

func sameJSON(a, b []byte) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && equality.Semantic.DeepEqual(x, y)
}

// TemplateHash is the hash of a template as names of revisions end with it.
func TemplateHash(r *appsv1.ControllerRevision) string {
	return cmp.Or(r.Labels[appsv1.ControllerRevisionHashLabelKey], strconv.FormatInt(r.Revision, 10))
}
