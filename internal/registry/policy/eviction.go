package policy

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"
	"k8s.io/client-go/util/retry"
	pdbhelper "k8s.io/component-helpers/apps/poddisruptionbudget"
)

// maxDisrupted is how many evictions of one budget may be unconfirmed by its controller.
const maxDisrupted = 2000

// evictionTries bounds how often a conflict is tried again.
const evictionTries = 20

// Pods is what an eviction does with Pods. It makes one only in place of an evicted registration.
type Pods interface {
	rest.Getter
	rest.GracefulDeleter
	rest.Creater
}

// evictionREST is pods/eviction: it deletes a Pod if its PodDisruptionBudget allows.
type evictionREST struct {
	pods    Pods
	status  rest.Updater // of Pods
	budgets rest.Lister
	update  rest.Updater // of the status of budgets
	nodes   rest.Getter
}

var (
	_ rest.NamedCreater             = (*evictionREST)(nil)
	_ rest.GroupVersionKindProvider = (*evictionREST)(nil)
)

// NewEviction returns the storage of pods/eviction on the storages of Pods, of budgets and of Nodes.
func NewEviction(pods Pods, podStatus rest.Updater, budgets rest.Lister, budgetStatus rest.Updater, nodes rest.Getter) rest.Storage {
	return &evictionREST{pods, podStatus, budgets, budgetStatus, nodes}
}

// GroupVersionKind is that of an Eviction, which belongs to another group.
func (*evictionREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return policyv1.SchemeGroupVersion.WithKind("Eviction")
}

// New returns an empty Eviction.
func (*evictionREST) New() runtime.Object { return &policyv1.Eviction{} }

// Destroy does nothing: the back ends belong to the whole objects.
func (*evictionREST) Destroy() {}

// Create evicts the Pod called name, or answers 429 while its budget does not allow it.
func (r *evictionREST) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc,
	options *metav1.CreateOptions,
) (runtime.Object, error) {
	e, ok := obj.(*policyv1.Eviction)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a Eviction object: %T", obj))
	}
	if name != e.Name {
		return nil, apierrors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	how, err := deleteOptions(e, options)
	if err != nil {
		return nil, err
	}
	if validate != nil {
		if err := validate(ctx, e.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	fixed := how.Preconditions != nil && how.Preconditions.ResourceVersion != nil
	backoff := retry.DefaultRetry
	backoff.Steps, backoff.Factor = evictionTries, 1.2
	counted := false
	err = retry.OnError(backoff, func(err error) bool { return !fixed && !counted && apierrors.IsConflict(err) }, func() (err error) {
		counted, err = r.try(ctx, name, how)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

// deleteOptions returns the options of the eviction, with the dry run of the request.
func deleteOptions(e *policyv1.Eviction, options *metav1.CreateOptions) (*metav1.DeleteOptions, error) {
	out := &metav1.DeleteOptions{}
	if e.DeleteOptions != nil {
		out = e.DeleteOptions.DeepCopy()
	}
	switch {
	case len(out.DryRun) == 0:
		out.DryRun = options.DryRun
	case len(options.DryRun) != 0 && fmt.Sprint(out.DryRun) != fmt.Sprint(options.DryRun):
		return nil, apierrors.NewBadRequest(fmt.Sprintf("Non-matching dry-run options in request and content: %v and %v",
			options.DryRun, out.DryRun))
	}
	return out, nil
}

// try evicts once. counted reports whether a budget has been looked at: what it has counted
// must not be counted again, so that only the client may try again.
func (r *evictionREST) try(ctx context.Context, name string, how *metav1.DeleteOptions) (counted bool, err error) {
	obj, err := r.pods.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	pod := obj.(*corev1.Pod)
	if err := met(how.Preconditions, pod); err != nil {
		return true, err
	}
	// Nothing may change between the look at the Pod and its deletion where the decision
	// depends on it; ended Pods stay as they are.
	budget, exact := "", false
	switch {
	case pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
	case pod.Status.Phase == corev1.PodPending:
		exact = true
	default:
		if budget, exact, err = r.allowed(ctx, pod, dryrun.IsDryRun(how.DryRun)); err != nil {
			return true, err
		}
	}
	fixed := how.Preconditions != nil && how.Preconditions.ResourceVersion != nil
	err = r.delete(ctx, pod, how.DeepCopy(), exact)
	if exact && budget != "" && !fixed && apierrors.IsConflict(err) { // it may be ready by now
		err = tooMany(budget, 10, "is still being processed by the server.")
	}
	return budget != "", err
}

// met returns a conflict unless a Pod meets the preconditions of its deletion.
func met(want *metav1.Preconditions, pod *corev1.Pod) error {
	switch {
	case want == nil:
	case want.UID != nil && *want.UID != pod.UID:
		return apierrors.NewConflict(corev1.Resource("pods"), pod.Name,
			fmt.Errorf("the UID in the precondition (%s) does not match the UID in record (%s)", *want.UID, pod.UID))
	case want.ResourceVersion != nil && *want.ResourceVersion != pod.ResourceVersion:
		return apierrors.NewConflict(corev1.Resource("pods"), pod.Name,
			fmt.Errorf("the ResourceVersion in the precondition (%s) does not match the ResourceVersion in record (%s)",
				*want.ResourceVersion, pod.ResourceVersion))
	}
	return nil
}

// allowed returns an error unless a Pod that runs may be evicted, and the name of its budget,
// "" for none; exact is that it may only as it is now, unready. An eviction that is allowed is
// counted in the budget's status.
func (r *evictionREST) allowed(ctx context.Context, pod *corev1.Pod, dryRun bool) (name string, exact bool, err error) {
	budget, err := r.budgetOf(ctx, pod)
	if err != nil || budget == nil {
		return "", false, err
	}
	if !isReady(pod) {
		s := &budget.Status
		p := budget.Spec.UnhealthyPodEvictionPolicy
		if p != nil && *p == policyv1.AlwaysAllow || s.CurrentHealthy >= s.DesiredHealthy && s.DesiredHealthy > 0 {
			return budget.Name, true, nil
		}
	}
	backoff := retry.DefaultRetry
	backoff.Steps, backoff.Factor = evictionTries, 1.2
	err = retry.RetryOnConflict(backoff, func() error { return r.take(ctx, budget.Name, pod.Name, dryRun) })
	return budget.Name, false, err
}

func isReady(pod *corev1.Pod) bool {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func (r *evictionREST) budgetOf(ctx context.Context, pod *corev1.Pod) (found *policyv1.PodDisruptionBudget, err error) {
	list, err := r.budgets.List(ctx, &internalversion.ListOptions{})
	if err != nil {
		return nil, err
	}
	items := list.(*policyv1.PodDisruptionBudgetList).Items
	for i := range items {
		selector, err := metav1.LabelSelectorAsSelector(items[i].Spec.Selector)
		if err != nil || !selector.Matches(labels.Set(pod.Labels)) {
			continue
		}
		if found != nil {
			//nolint:staticcheck,revive // in the words of kube-apiserver
			return nil, apierrors.NewInternalError(
				errors.New("This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."))
		}
		found = &items[i]
	}
	return found, nil
}

// take counts an eviction in the status of a budget, or answers 429.
func (r *evictionREST) take(ctx context.Context, budget, pod string, dryRun bool) error {
	change := func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
		b := old.DeepCopyObject().(*policyv1.PodDisruptionBudget)
		if err := room(b); err != nil {
			return nil, err
		}
		s := &b.Status
		if s.DisruptionsAllowed--; s.DisruptionsAllowed == 0 {
			pdbhelper.UpdateDisruptionAllowedCondition(b)
		}
		if s.DisruptedPods == nil {
			s.DisruptedPods = map[string]metav1.Time{}
		}
		s.DisruptedPods[pod] = metav1.NewTime(time.Now())
		return b, nil
	}
	options := &metav1.UpdateOptions{}
	if dryRun {
		options.DryRun = []string{metav1.DryRunAll}
	}
	_, _, err := r.update.Update(ctx, budget, rest.DefaultUpdatedObjectInfo(nil, change), rest.ValidateAllObjectFunc,
		rest.ValidateAllObjectUpdateFunc, false, options)
	return err
}

// tooMany is the answer 429 of a budget, in the words of kube-apiserver.
func tooMany(budget string, seconds int, why string) error {
	err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", seconds)
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes,
		metav1.StatusCause{Type: policyv1.DisruptionBudgetCause, Message: fmt.Sprintf("The disruption budget %s %s", budget, why)})
	return err
}

// room returns an error unless b allows one more eviction, in the words of kube-apiserver.
func room(b *policyv1.PodDisruptionBudget) error {
	s := &b.Status
	resource := schema.GroupResource{Group: policyv1.GroupName, Resource: "poddisruptionbudget"}
	condition := meta.FindStatusCondition(s.Conditions, policyv1.DisruptionAllowedCondition)
	switch {
	case s.ObservedGeneration < b.Generation:
		return tooMany(b.Name, 10, "is still being processed by the server.")
	case s.DisruptionsAllowed < 0:
		return apierrors.NewForbidden(resource, b.Name, errors.New("pdb disruptions allowed is negative"))
	case len(s.DisruptedPods) > maxDisrupted:
		return apierrors.NewForbidden(resource, b.Name,
			errors.New("DisruptedPods map too big - too many evictions not confirmed by PDB controller"))
	case s.DisruptionsAllowed > 0:
		return nil
	case condition != nil && condition.Status == metav1.ConditionFalse && condition.Reason == policyv1.SyncFailedReason:
		return tooMany(b.Name, 0, "does not allow evicting pods currently because it failed sync: "+condition.Message)
	case s.CurrentHealthy <= s.DesiredHealthy:
		return tooMany(b.Name, 0, fmt.Sprintf("needs %d healthy pods and has %d currently", s.DesiredHealthy, s.CurrentHealthy))
	}
	return tooMany(b.Name, 0, "does not allow evicting pods currently")
}

// delete marks the Pod as disrupted and deletes it; exact is with no change in between.
func (r *evictionREST) delete(ctx context.Context, pod *corev1.Pod, how *metav1.DeleteOptions, exact bool) error {
	if how.Preconditions == nil {
		how.Preconditions = &metav1.Preconditions{}
	}
	if how.Preconditions.UID == nil {
		how.Preconditions.UID = &pod.UID
	}
	if exact && how.Preconditions.ResourceVersion == nil {
		how.Preconditions.ResourceVersion = &pod.ResourceVersion
	}
	again, err := r.returning(ctx, pod)
	if err != nil {
		return err
	}
	if again != nil {
		how.GracePeriodSeconds = new(int64) // nothing runs that could need a moment
	}
	if !dryrun.IsDryRun(how.DryRun) {
		change := func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
			p := old.DeepCopyObject().(*corev1.Pod)
			if err := met(how.Preconditions, p); err != nil {
				return nil, err
			}
			markDisrupted(p)
			return p, nil
		}
		updated, _, err := r.status.Update(ctx, pod.Name, rest.DefaultUpdatedObjectInfo(nil, change), rest.ValidateAllObjectFunc,
			rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
		if err != nil {
			return err
		}
		if how.Preconditions.ResourceVersion != nil {
			how.Preconditions.ResourceVersion = &updated.(*corev1.Pod).ResourceVersion
		}
	}
	if again != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), returnTime)
		defer cancel()
	}
	if _, _, err := r.pods.Delete(ctx, pod.Name, rest.ValidateAllObjectFunc, how); err != nil || again == nil || dryrun.IsDryRun(how.DryRun) {
		return err
	}
	return r.register(ctx, again)
}

func markDisrupted(p *corev1.Pod) {
	now := corev1.PodCondition{
		Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "EvictionByEvictionAPI",
		Message: "Eviction API: evicting", LastTransitionTime: metav1.Now(),
	}
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == now.Type {
			if c.Status == now.Status {
				now.LastTransitionTime = c.LastTransitionTime
			}
			*c = now
			return
		}
	}
	p.Status.Conditions = append(p.Status.Conditions, now)
}
