package garbage

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
)

// namespaces empties namespaces that are being deleted, and removes their
// finalizer when nothing remains in them.
type namespaces struct {
	*kit.Kit
	loop *loop.Loop[string]
	meta metadata.Interface
}

// NewNamespaces returns the controller that empties namespaces that are being deleted.
func NewNamespaces(k *kit.Kit, name string, meta metadata.Interface) (kit.Task, error) {
	c := &namespaces{Kit: k, meta: meta}
	c.loop = loop.New(k.Log, name, min(4, k.Workers), c.sync)
	set := func(ns *corev1.Namespace) {
		if ns.DeletionTimestamp != nil {
			c.loop.Queue.Add(ns.Name)
		}
	}
	return c.loop.Run, k.Handle(k.Informers.Core().V1().Namespaces().Informer(), kit.Handlers(set, nil))
}

func (c *namespaces) sync(ctx context.Context, name string) error {
	ns, err := c.Client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && ns.DeletionTimestamp == nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("get namespace %s: %w", name, err)
	}
	if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		return nil // emptied already; other finalizers keep it
	}
	remaining := c.empty(ctx, name)
	if err := c.report(ctx, ns, remaining); err != nil {
		return err
	}
	if !remaining.empty() {
		if len(remaining.errs) == 0 {
			c.loop.Queue.AddAfter(name, remaining.wait())
			return nil
		}
		return errors.Join(remaining.errs...)
	}
	return c.finalize(ctx, ns)
}

// remainder is what remains in a namespace after a pass over it.
type remainder struct {
	resources  map[string]int // "pods" → how many
	finalizers map[string]int
	grace      time.Duration // the longest grace period of a Pod
	discovery  error
	deletion   error
	errs       []error
}

func (r *remainder) empty() bool { return len(r.resources) == 0 && len(r.errs) == 0 }

// wait returns when to check again: soon, for what has finalizers; after half of
// the grace period, for Pods that are being stopped.
func (r *remainder) wait() time.Duration {
	return min(max(r.grace/2, 100*time.Millisecond), 5*time.Second)
}

// empty deletes everything in the namespace, of every kind that the API server
// has, and returns what remains. Pods go first, and other objects stay until no Pod does: a policy must not go before
// what it guards (https://kep.k8s.io/5080).
func (c *namespaces) empty(ctx context.Context, name string) *remainder {
	left := &remainder{resources: map[string]int{}, finalizers: map[string]int{}}
	kinds, err := discovery.ToDiscoveryInterfaceWithContext(c.Client.Discovery()).ServerPreferredNamespacedResourcesWithContext(ctx)
	if err != nil {
		// The kinds found are emptied; the namespace has to wait for the others.
		left.discovery = err
		left.errs = append(left.errs, fmt.Errorf("discover the API server's kinds: %w", err))
	}
	kinds = discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "delete"}}, kinds)
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	if err := c.emptyOf(ctx, name, pods, []string{"deletecollection"}, left); err != nil {
		left.deletion = err
		left.errs = append(left.errs, err)
	}
	if len(left.resources) > 0 || left.deletion != nil {
		return left
	}
	for _, list := range kinds {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue
		}
		for i := range list.APIResources {
			resource := version.WithResource(list.APIResources[i].Name)
			if resource == pods {
				continue
			}
			if err := c.emptyOf(ctx, name, resource, list.APIResources[i].Verbs, left); err != nil {
				left.deletion = err
				left.errs = append(left.errs, err)
			}
		}
	}
	return left
}

func (c *namespaces) emptyOf(
	ctx context.Context, name string, resource schema.GroupVersionResource, verbs []string, left *remainder,
) error {
	api := c.meta.Resource(resource).Namespace(name)
	background := metav1.DeletePropagationBackground
	options := metav1.DeleteOptions{PropagationPolicy: &background}
	collected := false
	if slices.Contains(verbs, "deletecollection") {
		err := api.DeleteCollection(ctx, options, metav1.ListOptions{})
		collected = err == nil
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsMethodNotSupported(err) {
			return fmt.Errorf("delete all %s in %s: %w", resource.Resource, name, err)
		}
	}
	list, err := api.List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list %s in %s: %w", resource.Resource, name, err)
	}
	var errs []error
	for i := range list.Items {
		item := &list.Items[i]
		if !collected {
			if err := api.Delete(ctx, item.Name, options); err != nil && !apierrors.IsNotFound(err) {
				errs = append(errs, fmt.Errorf("delete %s %s/%s: %w", resource.Resource, name, item.Name, err))
			}
		}
		left.resources[resource.GroupResource().String()]++
		for _, f := range item.Finalizers {
			left.finalizers[f]++
		}
		if item.DeletionGracePeriodSeconds != nil {
			left.grace = max(left.grace, time.Duration(*item.DeletionGracePeriodSeconds)*time.Second)
		}
	}
	return errors.Join(errs...)
}

// report writes to the conditions of the namespace why it still exists.
func (c *namespaces) report(ctx context.Context, ns *corev1.Namespace, left *remainder) error {
	changed := false
	set := func(kind corev1.NamespaceConditionType, bad bool, reason, message, good string) {
		k := corev1.NamespaceCondition{Type: kind, Status: corev1.ConditionFalse, Reason: good, Message: ""}
		if bad {
			k.Status, k.Reason, k.Message = corev1.ConditionTrue, reason, message
		}
		changed = setNamespaceCondition(ns, k) || changed
	}
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	set(corev1.NamespaceDeletionDiscoveryFailure, left.discovery != nil, "DiscoveryFailed",
		"Discovery failed for some groups: "+text(left.discovery), "ResourcesDiscovered")
	set(corev1.NamespaceDeletionContentFailure, left.deletion != nil, "ContentDeletionFailed",
		"Failed to delete all resource types: "+text(left.deletion), "ContentDeleted")
	set(corev1.NamespaceContentRemaining, len(left.resources) > 0, "SomeResourcesRemain",
		"Some resources are remaining: "+counts(left.resources, "%s has %d resource instances"), "ContentRemoved")
	set(corev1.NamespaceFinalizersRemaining, len(left.finalizers) > 0, "SomeFinalizersRemain",
		"Some content in the namespace has finalizers remaining: "+counts(left.finalizers, "%s in %d resource instances"),
		"ContentHasNoFinalizers")
	if ns.Status.Phase != corev1.NamespaceTerminating {
		ns.Status.Phase, changed = corev1.NamespaceTerminating, true
	}
	// One that can be removed at once is not written to first.
	if !changed || left.empty() {
		return nil
	}
	updated, err := c.Client.CoreV1().Namespaces().UpdateStatus(ctx, ns, metav1.UpdateOptions{})
	if err != nil {
		return kit.IgnoreNotFound(fmt.Errorf("status of namespace %s: %w", ns.Name, err))
	}
	*ns = *updated
	return nil
}

// setNamespaceCondition sets a condition and reports whether that changed
// anything. A condition that was never true is not added.
func setNamespaceCondition(ns *corev1.Namespace, k corev1.NamespaceCondition) bool {
	for i := range ns.Status.Conditions {
		old := &ns.Status.Conditions[i]
		if old.Type != k.Type {
			continue
		}
		if old.Status == k.Status && old.Reason == k.Reason && old.Message == k.Message {
			return false
		}
		k.LastTransitionTime = old.LastTransitionTime
		if old.Status != k.Status {
			k.LastTransitionTime = metav1.Now()
		}
		*old = k
		return true
	}
	if k.Status != corev1.ConditionTrue {
		return false
	}
	k.LastTransitionTime = metav1.Now()
	ns.Status.Conditions = append(ns.Status.Conditions, k)
	return true
}

func counts(m map[string]int, format string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf(format, k, m[k]))
	}
	return strings.Join(parts, ", ")
}

// finalize removes the namespace's own finalizer. API servers remove the object
// with its last finalizer; the delete is for namespaces that do not.
func (c *namespaces) finalize(ctx context.Context, ns *corev1.Namespace) error {
	ns = ns.DeepCopy()
	ns.Spec.Finalizers = slices.DeleteFunc(ns.Spec.Finalizers, func(f corev1.FinalizerName) bool {
		return f == corev1.FinalizerKubernetes
	})
	after, err := c.Client.CoreV1().Namespaces().Finalize(ctx, ns, metav1.UpdateOptions{})
	if err != nil {
		return kit.IgnoreNotFound(fmt.Errorf("finalize namespace %s: %w", ns.Name, err))
	}
	c.Log.Info("emptied a deleted namespace", "namespace", ns.Name)
	if len(after.Spec.Finalizers)+len(after.Finalizers) > 0 {
		return nil
	}
	return kit.IgnoreReplaced(c.Client.CoreV1().Namespaces().Delete(ctx, ns.Name, kit.OnlyUID(ns.UID)))
}
