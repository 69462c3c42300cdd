// Package garbage deletes objects whose owners no longer exist, and the content of namespaces that are being deleted.
package garbage

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
)

// garbage deletes objects whose owners are gone, of every kind that the API server
// has, and finishes the deletion of owners: in the foreground when no dependent
// blocks it any more, as an orphaning one when no dependent refers to the owner
// any more (https://kubernetes.io/docs/concepts/architecture/garbage-collection/).
//
// It decides by a graph of all objects, which watches of their metadata keep. A
// watch may lag, so an owner counts as absent only if its deletion was seen or the
// API server does not have it, and a dependent is read again before it is deleted.
type garbage struct {
	*kit.Kit
	loop  *loop.Loop[objectRef]
	meta  metadata.Interface
	graph *ownerGraph

	mu    sync.Mutex
	kinds map[schema.GroupKind]servedKind
	// unresolved are dependents that have an owner of a kind the API server does
	// not have. They are left alone until it has others.
	unresolved map[objectRef]bool
}

// servedKind is where the objects of a kind are.
type servedKind struct {
	resource   schema.GroupVersionResource
	namespaced bool
}

const (
	// recheckPeriod is when an owner is checked again that exists and whose
	// watch has not delivered it yet.
	recheckPeriod = 30 * time.Second
	// writesAtOnce bounds the requests for the dependents of one owner.
	writesAtOnce = 8
)

// New returns the garbage collector, which watches and deletes by meta.
func New(k *kit.Kit, name string, meta metadata.Interface) kit.Task {
	c := &garbage{
		Kit: k, meta: meta, graph: newOwnerGraph(),
		kinds: map[schema.GroupKind]servedKind{}, unresolved: map[objectRef]bool{},
	}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	return c.run
}

func (c *garbage) check(list []objectRef) {
	for _, o := range list {
		c.loop.Queue.Add(o)
	}
}

func (c *garbage) api(o objectRef) metadata.ResourceInterface {
	return c.meta.Resource(o.resource).Namespace(o.name.Namespace)
}

func (c *garbage) sync(ctx context.Context, ref objectRef) error {
	o, ok := c.graph.get(ref.uid)
	if !ok {
		return nil
	}
	switch o.deletion {
	case orphaning:
		return c.orphan(ctx, o.objectRef)
	case foreground:
		if slices.ContainsFunc(c.graph.dependentsOf(o.uid), func(d ownedObject) bool { return d.blocks(o.uid) }) {
			return nil // it is checked again when one of them goes
		}
		return c.removeFinalizer(ctx, o.objectRef, metav1.FinalizerDeleteDependents)
	case terminating:
		return nil
	}
	if by, err := c.classify(ctx, ref, o.owners); err != nil || by.keep() {
		return err
	}
	return c.collect(ctx, ref)
}

// collect deletes a dependent without owners, as the API server has it now, or
// drops its references to those owners that are gone.
func (c *garbage) collect(ctx context.Context, ref objectRef) error {
	live, err := c.api(ref).Get(ctx, ref.name.Name, metav1.GetOptions{})
	if err != nil {
		return kit.IgnoreNotFound(err)
	}
	if live.UID != ref.uid || live.DeletionTimestamp != nil {
		return nil
	}
	by, err := c.classify(ctx, ref, live.OwnerReferences)
	if err != nil || by.keep() {
		return err
	}
	if by.present > 0 {
		return c.setOwners(ctx, ref, live, slices.DeleteFunc(slices.Clone(live.OwnerReferences), func(r metav1.OwnerReference) bool {
			return slices.Contains(by.absent, r.UID) || slices.Contains(by.waiting, r.UID)
		}))
	}
	dependents := c.graph.dependentsOf(ref.uid)
	policy := metav1.DeletePropagationBackground
	switch {
	case len(by.waiting) > 0 && len(dependents) > 0:
		// The owner has to wait for these dependents too. In a circle nothing
		// waits for this object.
		policy = metav1.DeletePropagationForeground
		if slices.ContainsFunc(dependents, func(d ownedObject) bool { return d.deletion == foreground }) {
			return c.deleteUnblocked(ctx, ref, live, policy)
		}
	case slices.Contains(live.Finalizers, metav1.FinalizerOrphanDependents):
		policy = metav1.DeletePropagationOrphan
	case slices.Contains(live.Finalizers, metav1.FinalizerDeleteDependents):
		policy = metav1.DeletePropagationForeground
	}
	return c.delete(ctx, ref, live, policy)
}

func (c *garbage) deleteUnblocked(
	ctx context.Context, ref objectRef, live *metav1.PartialObjectMetadata, policy metav1.DeletionPropagation,
) error {
	owners := slices.Clone(live.OwnerReferences)
	for i := range owners {
		owners[i].BlockOwnerDeletion = new(false)
	}
	if err := c.setOwners(ctx, ref, live, owners); err != nil {
		return err
	}
	live, err := c.api(ref).Get(ctx, ref.name.Name, metav1.GetOptions{})
	if err != nil {
		return kit.IgnoreNotFound(err)
	}
	return c.delete(ctx, ref, live, policy)
}

// delete deletes the object as it was read: not one that has got an owner since.
func (c *garbage) delete(ctx context.Context, ref objectRef, live *metav1.PartialObjectMetadata, policy metav1.DeletionPropagation) error {
	err := c.api(ref).Delete(ctx, ref.name.Name, metav1.DeleteOptions{
		PropagationPolicy: &policy,
		Preconditions:     &metav1.Preconditions{UID: &ref.uid, ResourceVersion: &live.ResourceVersion},
	})
	if err != nil {
		return kit.IgnoreNotFound(fmt.Errorf("delete %s %s: %w", ref.resource.Resource, ref.name, err))
	}
	c.Log.Debug("deleted an object without owners", "resource", ref.resource.Resource, "object", ref.name)
	return nil
}

// owned sorts the owners of an object.
type owned struct {
	present         int
	absent, waiting []types.UID // waiting: for their dependents
	unresolved      bool
}

// keep reports whether the object may stay as it is.
func (o owned) keep() bool {
	return o.unresolved || o.present+len(o.absent)+len(o.waiting) == 0 || o.present > 0 && len(o.absent)+len(o.waiting) == 0
}

func (c *garbage) classify(ctx context.Context, ref objectRef, refs []metav1.OwnerReference) (owned, error) {
	var out owned
	for _, r := range refs {
		state, err := c.owner(ctx, ref, r)
		if err != nil {
			return owned{}, err
		}
		switch state {
		case ownerPresent:
			out.present++
		case ownerAbsent:
			out.absent = append(out.absent, r.UID)
		case ownerWaiting:
			out.waiting = append(out.waiting, r.UID)
		case ownerUnresolved:
			out.unresolved = true
		}
	}
	return out, nil
}

type ownerState byte

const (
	ownerPresent ownerState = iota
	ownerAbsent
	ownerWaiting
	ownerUnresolved
)

func (c *garbage) owner(ctx context.Context, dependent objectRef, r metav1.OwnerReference) (ownerState, error) {
	version, err := schema.ParseGroupVersion(r.APIVersion)
	if err != nil {
		return ownerUnresolved, nil
	}
	c.mu.Lock()
	kind, served := c.kinds[version.WithKind(r.Kind).GroupKind()]
	if !served {
		c.unresolved[dependent] = true
	}
	c.mu.Unlock()
	if !served {
		return ownerUnresolved, nil
	}
	at := objectRef{resource: kind.resource, name: svcName(kind.namespaced, dependent, r), uid: r.UID}
	if kind.namespaced && dependent.name.Namespace == "" {
		c.invalidNamespace(dependent, r)
		return ownerUnresolved, nil
	}
	if o, ok := c.graph.get(r.UID); ok {
		if o.resource.GroupResource() == at.resource.GroupResource() && o.name == at.name {
			return presentOr(o.deletion), nil
		}
		c.invalidNamespace(dependent, r)
	} else if c.graph.isGone(r.UID) {
		return ownerAbsent, nil
	}
	live, err := c.api(at).Get(ctx, r.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && live.UID != r.UID {
		return ownerAbsent, nil
	}
	if err != nil {
		return ownerUnresolved, fmt.Errorf("get owner %s %s: %w", at.resource.Resource, at.name, err)
	}
	c.loop.Queue.AddAfter(dependent, recheckPeriod)
	return presentOr(deletionOf(live)), nil
}

func presentOr(d deletion) ownerState {
	if d == foreground {
		return ownerWaiting
	}
	return ownerPresent
}

// invalidNamespace records that an owner is not in the dependent's namespace.
func (c *garbage) invalidNamespace(dependent objectRef, r metav1.OwnerReference) {
	c.Log.Warn("an owner is not where its dependent is, and counts as absent there",
		"resource", dependent.resource.Resource, "object", dependent.name, "owner", r.Kind+"/"+r.Name)
	c.mu.Lock()
	defer c.mu.Unlock()
	for kind, at := range c.kinds {
		if at.resource != dependent.resource {
			continue
		}
		c.Events.Event(&corev1.ObjectReference{
			APIVersion: dependent.resource.GroupVersion().String(), Kind: kind.Kind, UID: dependent.uid,
			Namespace: dependent.name.Namespace, Name: dependent.name.Name,
		}, corev1.EventTypeWarning, "OwnerRefInvalidNamespace", fmt.Sprintf("ownerRef [%s/%s, name: %s, uid: %s] does not exist in namespace %q",
			r.APIVersion, r.Kind, r.Name, r.UID, dependent.name.Namespace))
	}
}

// orphan drops the references to an owner from its dependents, and then the
// finalizer that holds the owner.
func (c *garbage) orphan(ctx context.Context, owner objectRef) error {
	var group errgroup.Group
	group.SetLimit(writesAtOnce)
	for _, d := range c.graph.dependentsOf(owner.uid) {
		group.Go(func() error {
			live, err := c.api(d.objectRef).Get(ctx, d.name.Name, metav1.GetOptions{})
			if err != nil {
				return kit.IgnoreNotFound(err)
			}
			others := slices.DeleteFunc(slices.Clone(live.OwnerReferences), func(r metav1.OwnerReference) bool { return r.UID == owner.uid })
			if live.UID != d.uid || len(others) == len(live.OwnerReferences) {
				return nil
			}
			return c.setOwners(ctx, d.objectRef, live, others)
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return c.removeFinalizer(ctx, owner, metav1.FinalizerOrphanDependents)
}

func (c *garbage) setOwners(ctx context.Context, ref objectRef, live *metav1.PartialObjectMetadata, owners []metav1.OwnerReference) error {
	return c.patch(ctx, ref, live, "ownerReferences", owners)
}

func (c *garbage) removeFinalizer(ctx context.Context, ref objectRef, finalizer string) error {
	live, err := c.api(ref).Get(ctx, ref.name.Name, metav1.GetOptions{})
	if err != nil {
		return kit.IgnoreNotFound(err)
	}
	others := slices.DeleteFunc(slices.Clone(live.Finalizers), func(f string) bool { return f == finalizer })
	if live.UID != ref.uid || live.DeletionTimestamp == nil || len(others) == len(live.Finalizers) {
		return nil
	}
	return c.patch(ctx, ref, live, "finalizers", others)
}

// patch replaces a list in the metadata of an object as it was read. Custom
// resources have no strategic merge patch.
func (c *garbage) patch(ctx context.Context, ref objectRef, live *metav1.PartialObjectMetadata, field string, value any) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": live.UID, "resourceVersion": live.ResourceVersion, field: value,
	}})
	if err != nil {
		return err
	}
	if _, err := c.api(ref).Patch(ctx, ref.name.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return kit.IgnoreNotFound(fmt.Errorf("%s of %s %s: %w", field, ref.resource.Resource, ref.name, err))
	}
	return nil
}
