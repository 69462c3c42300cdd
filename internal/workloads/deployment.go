package workloads

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Annotations of Deployments and their ReplicaSets, by which kubectl rollout works.
const (
	RevisionAnnotation        = "deployment.kubernetes.io/revision"
	revisionHistoryAnnotation = "deployment.kubernetes.io/revision-history"
	desiredAnnotation         = "deployment.kubernetes.io/desired-replicas"
	maxAnnotation             = "deployment.kubernetes.io/max-replicas"
)

// maxHistory is the length of the annotation with a ReplicaSet's former revisions.
const maxHistory = 2000

// Rollout is what is to be done for a Deployment, in this order.
type Rollout struct {
	// Create is the ReplicaSet of the template if it is missing and wanted.
	Create *appsv1.ReplicaSet
	// Update are ReplicaSets as they are to be, Delete the ReplicaSets to remove.
	Update, Delete []*appsv1.ReplicaSet
	// Events are about the Deployment; they hold when the writes have succeeded.
	Events []string
	// Revision is the Deployment's own annotation, Status its new status.
	Revision string
	Status   appsv1.DeploymentStatus
	// After is when to look again, 0 for when something changes.
	After time.Duration
}

// rollout is a decision on its way: it changes copies of the ReplicaSets.
type rollout struct {
	d       *appsv1.Deployment
	current *appsv1.ReplicaSet // of the template; nil if there is none
	old     []*appsv1.ReplicaSet
	created bool // current is to be created
	before  map[*appsv1.ReplicaSet]*appsv1.ReplicaSet
	out     Rollout
	now     time.Time
}

// PlanDeployment decides for d, which has the ReplicaSets owned. othersRun reports whether
// Pods of other ReplicaSets than the given one have not ended yet; a Deployment with the
// strategy Recreate asks for it.
func PlanDeployment(d *appsv1.Deployment, owned []*appsv1.ReplicaSet, othersRun func(*appsv1.ReplicaSet) bool, now time.Time) Rollout {
	r := &rollout{d: d.DeepCopy(), before: map[*appsv1.ReplicaSet]*appsv1.ReplicaSet{}, now: now}
	for _, rs := range owned {
		c := rs.DeepCopy()
		r.before[c] = rs
		r.old = append(r.old, c)
	}
	slices.SortFunc(r.old, oldestFirst)
	if i := slices.IndexFunc(r.old, func(rs *appsv1.ReplicaSet) bool { return SameTemplate(&rs.Spec.Template, &d.Spec.Template) }); i >= 0 {
		r.current = r.old[i]
		r.old = slices.Delete(r.old, i, i+1)
	}
	r.out.Revision = d.Annotations[RevisionAnnotation]
	r.decide(othersRun)
	for _, rs := range append(slices.Clone(r.old), r.current) {
		if before := r.before[rs]; before != nil && !equality.Semantic.DeepEqual(before, rs) && !slices.Contains(r.out.Delete, rs) {
			r.out.Update = append(r.out.Update, rs)
		}
	}
	if r.created {
		r.out.Create = r.current
	}
	return r.out
}

func (r *rollout) decide(othersRun func(*appsv1.ReplicaSet) bool) {
	if r.d.DeletionTimestamp != nil {
		r.out.Status = r.status()
		return
	}
	r.checkPaused()
	r.annotate()
	switch {
	case r.d.Spec.Paused:
		r.scale()
		r.cleanUp()
		r.out.Status = r.status()
		return
	case r.scaled():
		r.scale()
		r.out.Status = r.status()
		return
	case r.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType:
		r.recreate(othersRun)
	default:
		r.roll()
	}
	r.progress()
}

func oldestFirst(a, b *appsv1.ReplicaSet) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
}

// SameTemplate reports whether two templates are equal but for the label with their hash.
func SameTemplate(a, b *corev1.PodTemplateSpec) bool {
	a, b = a.DeepCopy(), b.DeepCopy()
	delete(a.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	delete(b.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	return equality.Semantic.DeepEqual(a, b)
}

func (r *rollout) all() []*appsv1.ReplicaSet {
	if r.current == nil {
		return r.old
	}
	return append(slices.Clone(r.old), r.current)
}

func running(list []*appsv1.ReplicaSet) (out []*appsv1.ReplicaSet) {
	for _, rs := range list {
		if deref(rs.Spec.Replicas) > 0 {
			out = append(out, rs)
		}
	}
	return out
}

// sum adds up a number of each ReplicaSet.
func sum(list []*appsv1.ReplicaSet, of func(*appsv1.ReplicaSet) int32) (n int32) {
	for _, rs := range list {
		n += of(rs)
	}
	return n
}

func wanted(rs *appsv1.ReplicaSet) int32    { return deref(rs.Spec.Replicas) }
func actual(rs *appsv1.ReplicaSet) int32    { return rs.Status.Replicas }
func readyOf(rs *appsv1.ReplicaSet) int32   { return rs.Status.ReadyReplicas }
func available(rs *appsv1.ReplicaSet) int32 { return rs.Status.AvailableReplicas }

// limits returns how many Pods may be there beyond, and missing from, those wanted.
func (r *rollout) limits() (surge, unavailable int32) {
	s := r.d.Spec.Strategy.RollingUpdate
	if r.d.Spec.Strategy.Type != appsv1.RollingUpdateDeploymentStrategyType || s == nil {
		return 0, 0
	}
	n := int(wantedBy(r.d))
	surge, unavailable = int32(share(s.MaxSurge, n, true)), int32(share(s.MaxUnavailable, n, false))
	if surge == 0 && unavailable == 0 {
		unavailable = 1 // percentages of few Pods; else nothing would ever change
	}
	return surge, min(unavailable, wantedBy(r.d))
}

func wantedBy(d *appsv1.Deployment) int32 { return deref(d.Spec.Replicas) }

// annotate brings the revision and what else the current ReplicaSet says of its Deployment
// up to date.
func (r *rollout) annotate() {
	if r.current == nil {
		return
	}
	r.describe(r.current, true)
	r.current.Spec.MinReadySeconds = r.d.Spec.MinReadySeconds
	r.out.Revision = r.current.Annotations[RevisionAnnotation]
	if r.hasDeadline() && r.condition(appsv1.DeploymentProgressing) == nil {
		r.setProgressing(corev1.ConditionTrue, "FoundNewReplicaSet", fmt.Sprintf("Found new replica set %q", r.current.Name))
	}
}

func revisionOf(rs *appsv1.ReplicaSet) int64 {
	n, _ := strconv.ParseInt(rs.Annotations[RevisionAnnotation], 10, 64)
	return n
}

// describe sets the annotations of the ReplicaSet of the template.
func (r *rollout) describe(rs *appsv1.ReplicaSet, exists bool) {
	if rs.Annotations == nil {
		rs.Annotations = map[string]string{}
	}
	for k, v := range r.d.Annotations {
		switch k {
		case corev1.LastAppliedConfigAnnotation, RevisionAnnotation, revisionHistoryAnnotation, desiredAnnotation, maxAnnotation,
			appsv1.DeprecatedRollbackTo:
		default:
			rs.Annotations[k] = v
		}
	}
	newest := int64(0)
	for _, o := range r.old {
		newest = max(newest, revisionOf(o))
	}
	if before := revisionOf(rs); before <= newest {
		if _, rollsBack := rs.Annotations[RevisionAnnotation]; rollsBack {
			rs.Annotations[revisionHistoryAnnotation] = appendRevision(rs.Annotations[revisionHistoryAnnotation], before)
		}
		rs.Annotations[RevisionAnnotation] = strconv.FormatInt(newest+1, 10)
	}
	if !exists {
		r.annotateSize(rs)
	}
}

// appendRevision adds a revision to a list, whose oldest ones go when it is too long.
func appendRevision(list string, n int64) string {
	all := strconv.FormatInt(n, 10)
	if list != "" {
		all = list + "," + all
	}
	for len(all) > maxHistory {
		_, all, _ = strings.Cut(all, ",")
	}
	return all
}

func (r *rollout) annotateSize(rs *appsv1.ReplicaSet) {
	if rs.Annotations == nil {
		rs.Annotations = map[string]string{}
	}
	surge, _ := r.limits()
	rs.Annotations[desiredAnnotation] = strconv.Itoa(int(wantedBy(r.d)))
	rs.Annotations[maxAnnotation] = strconv.Itoa(int(wantedBy(r.d) + surge))
}

// resize sets the replicas of a ReplicaSet and reports whether they were others.
func (r *rollout) resize(rs *appsv1.ReplicaSet, n int32) bool {
	before := wanted(rs)
	if before == n {
		return false
	}
	direction := "up"
	if n < before {
		direction = "down"
	}
	if !r.created || rs != r.current {
		r.out.Events = append(r.out.Events, fmt.Sprintf("Scaled %s replica set %s from %d to %d", direction, rs.Name, before, n))
	}
	rs.Spec.Replicas = &n
	r.annotateSize(rs)
	return true
}

// scaled reports whether the Deployment's replicas have changed since its ReplicaSets were
// sized.
func (r *rollout) scaled() bool {
	return slices.ContainsFunc(running(r.all()), func(rs *appsv1.ReplicaSet) bool {
		n, err := strconv.ParseInt(rs.Annotations[desiredAnnotation], 10, 32)
		return err == nil && int32(n) != wantedBy(r.d)
	})
}

// scale follows a change of the Deployment's replicas: in the middle of a rollout in
// proportion, so that the rollout is not hastened by it.
func (r *rollout) scale() {
	active := running(r.all())
	switch {
	case len(active) == 1:
		r.resizeAll(active[0])
		return
	case len(active) == 0:
		if newest := r.newest(); newest != nil {
			r.resizeAll(newest)
		}
		return
	case r.saturated():
		for _, rs := range running(r.old) {
			r.resize(rs, 0)
		}
		return
	case r.d.Spec.Strategy.Type != appsv1.RollingUpdateDeploymentStrategyType:
		return
	}
	surge, _ := r.limits()
	allowed := int32(0)
	if wantedBy(r.d) > 0 {
		allowed = wantedBy(r.d) + surge
	}
	r.distribute(active, allowed-sum(active, wanted), wantedBy(r.d)+surge)
}

func (r *rollout) resizeAll(rs *appsv1.ReplicaSet) {
	r.resize(rs, wantedBy(r.d))
	if _, ok := rs.Annotations[desiredAnnotation]; ok {
		r.annotateSize(rs)
	}
}

func (r *rollout) newest() *appsv1.ReplicaSet {
	if r.current != nil || len(r.old) == 0 {
		return r.current
	}
	return r.old[len(r.old)-1]
}

// saturated reports whether the current ReplicaSet has all Pods that the Deployment wants.
func (r *rollout) saturated() bool {
	rs := r.current
	if rs == nil {
		return false
	}
	desired, err := strconv.ParseInt(rs.Annotations[desiredAnnotation], 10, 32)
	n := wantedBy(r.d)
	return err == nil && wanted(rs) == n && int32(desired) == n && rs.Status.AvailableReplicas == n
}

// distribute adds replicas to ReplicaSets, or takes them away, in proportion to their
// sizes; largest is how many Pods the Deployment may have.
func (r *rollout) distribute(active []*appsv1.ReplicaSet, add, largest int32) {
	slices.SortFunc(active, func(a, b *appsv1.ReplicaSet) int {
		age := oldestFirst(a, b)
		if add > 0 {
			age = -age // of one size the newer grows first, and the older shrinks first
		}
		return cmp.Or(-cmp.Compare(wanted(a), wanted(b)), age)
	})
	sizes, added := make([]int32, len(active)), int32(0)
	for i, rs := range active {
		sizes[i] = wanted(rs)
		if left := add - added; left != 0 {
			part := r.fraction(rs, largest)
			if add > 0 {
				part = min(part, left)
			} else {
				part = max(part, left)
			}
			sizes[i] += part
			added += part
		}
	}
	sizes[0] = max(0, sizes[0]+add-added)
	for i, rs := range active {
		r.resize(rs, sizes[i])
		r.annotateSize(rs)
	}
}

// fraction is by how much a ReplicaSet grows in proportion.
func (r *rollout) fraction(rs *appsv1.ReplicaSet, largest int32) int32 {
	if wantedBy(r.d) == 0 {
		return -wanted(rs)
	}
	before, err := strconv.ParseInt(rs.Annotations[maxAnnotation], 10, 32)
	if err != nil || before <= 0 {
		if before = int64(r.d.Status.Replicas); before == 0 {
			return 0
		}
	}
	return int32(math.Round(float64(wanted(rs))*float64(largest)/float64(before))) - wanted(rs)
}

// create makes the ReplicaSet of the template.
func (r *rollout) create() {
	template := r.d.Spec.Template.DeepCopy()
	sum := hash(template, r.d.Status.CollisionCount)
	template.Labels = with(template.Labels, sum)
	selector := r.d.Spec.Selector.DeepCopy()
	selector.MatchLabels = with(selector.MatchLabels, sum)
	name := r.d.Name
	name = name[:min(len(name), validation.DNS1123SubdomainMaxLength-1-len(sum))] + "-" + sum
	zero := int32(0)
	r.current = &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: r.d.Namespace, Labels: maps.Clone(template.Labels),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(r.d, DeploymentKind)},
		},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: &zero, MinReadySeconds: r.d.Spec.MinReadySeconds, Selector: selector, Template: *template,
		},
	}
	r.created = true
	n := wantedBy(r.d)
	if r.d.Spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType {
		n = r.grown()
	}
	r.current.Spec.Replicas = &n
	r.describe(r.current, false)
	r.out.Revision = r.current.Annotations[RevisionAnnotation]
	if n > 0 {
		r.out.Events = append(r.out.Events, fmt.Sprintf("Scaled up replica set %s from 0 to %d", name, n))
	}
	if r.hasDeadline() {
		r.setProgressing(corev1.ConditionTrue, "NewReplicaSetCreated", fmt.Sprintf("Created new replica set %q", name))
	}
}

func with(in map[string]string, hash string) map[string]string {
	out := maps.Clone(in)
	if out == nil {
		out = map[string]string{}
	}
	out[appsv1.DefaultDeploymentUniqueLabelKey] = hash
	return out
}

// grown is how many replicas the current ReplicaSet may have now.
func (r *rollout) grown() int32 {
	surge, _ := r.limits()
	room := wantedBy(r.d) + surge - sum(r.all(), wanted)
	return wanted(r.current) + max(0, min(room, wantedBy(r.d)-wanted(r.current)))
}

// roll goes one step of a rolling update: up if it may, else down.
func (r *rollout) roll() {
	if r.current == nil {
		r.create()
	}
	n := wantedBy(r.d)
	if wanted(r.current) < n {
		n = r.grown()
	}
	if r.resize(r.current, n) || r.shrinkOld() {
		return
	}
	if r.complete(&r.d.Status) {
		r.cleanUp()
	}
}

// shrinkOld takes Pods of old ReplicaSets away: unavailable Pods first,
// then as many as may be unavailable. Pods of the current one that are not available yet
// count against it.
func (r *rollout) shrinkOld() bool {
	active := running(r.old)
	_, unavailable := r.limits()
	least := wantedBy(r.d) - unavailable
	most := sum(r.all(), wanted) - least - (wanted(r.current) - r.current.Status.AvailableReplicas)
	if len(active) == 0 || most <= 0 {
		return false
	}
	done := int32(0)
	for _, rs := range active {
		if down := min(most-done, wanted(rs)-rs.Status.AvailableReplicas); down > 0 {
			r.resize(rs, wanted(rs)-down)
			done += down
		}
	}
	left := sum(append(slices.Clone(active), r.current), available) - least
	for _, rs := range active {
		if down := min(left, wanted(rs)); down > 0 {
			r.resize(rs, wanted(rs)-down)
			done, left = done+down, left-down
		}
	}
	return done > 0
}

// recreate goes one step of a replacement: the new Pods come when the old ones have ended.
func (r *rollout) recreate(othersRun func(*appsv1.ReplicaSet) bool) {
	down := false
	for _, rs := range r.old {
		down = r.resize(rs, 0) || down
	}
	if down || sum(r.old, actual) > 0 || othersRun(r.before[r.current]) {
		return
	}
	if r.current == nil {
		r.create()
	}
	r.resize(r.current, wantedBy(r.d))
	if r.complete(&r.d.Status) {
		r.cleanUp()
	}
}

// cleanUp deletes old ReplicaSets beyond the revision history limit.
func (r *rollout) cleanUp() {
	limit := r.d.Spec.RevisionHistoryLimit
	if limit == nil || *limit == math.MaxInt32 {
		return
	}
	var kept []*appsv1.ReplicaSet
	for _, rs := range r.old {
		if rs.DeletionTimestamp == nil {
			kept = append(kept, rs)
		}
	}
	slices.SortStableFunc(kept, func(a, b *appsv1.ReplicaSet) int { return cmp.Compare(revisionOf(a), revisionOf(b)) })
	for _, rs := range kept[:max(0, len(kept)-int(*limit))] {
		if rs.Status.Replicas == 0 && wanted(rs) == 0 && rs.Generation <= rs.Status.ObservedGeneration {
			r.out.Delete = append(r.out.Delete, rs)
		}
	}
}
