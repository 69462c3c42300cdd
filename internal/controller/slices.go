package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// sliceStore caches all EndpointSlices by Service, and writes plans for them.
type sliceStore struct {
	*assumeCache[*discoveryv1.EndpointSlice]
	client      kubernetes.Interface
	subscribers []func(owner svc.Name)

	mu sync.Mutex
	// unknown are the slices whose last write failed in a way that leaves open whether it was
	// carried out, by Service and name.
	unknown map[svc.Name]map[string]*discoveryv1.EndpointSlice
}

// slicesOf returns the slice store of this Run, made at the first call. changed
// is called for every Service whose slices another client changed.
func slicesOf(s *controllerContext, changed func(owner svc.Name)) (*sliceStore, error) {
	if s.slices != nil {
		s.slices.subscribers = append(s.slices.subscribers, changed)
		return s.slices, nil
	}
	informer := s.informers.Discovery().V1().EndpointSlices().Informer()
	st := &sliceStore{
		client: s.client, subscribers: []func(svc.Name){changed}, unknown: map[svc.Name]map[string]*discoveryv1.EndpointSlice{},
	}
	st.assumeCache = newAssumeCache(sliceOwner, storedIn(informer))
	err := s.handle(informer, cacheHandler(st.assumeCache, st.changed))
	s.slices = st
	return st, err
}

func (st *sliceStore) changed(owner svc.Name) {
	for _, f := range st.subscribers {
		f(owner)
	}
}

func (st *sliceStore) run(ctx context.Context) { st.expireLoop(ctx, st.changed) }

func sliceOwner(s *discoveryv1.EndpointSlice) (svc.Name, bool) {
	name := s.Labels[discoveryv1.LabelServiceName]
	return svc.Name{Namespace: s.Namespace, Name: name}, name != ""
}

// storedIn returns a function that reports whether an informer's store has the
// named object.
func storedIn(informer cache.SharedIndexInformer) func(svc.Name) bool {
	return func(name svc.Name) bool {
		_, ok, err := informer.GetStore().GetByKey(name.String())
		return ok && err == nil
	}
}

// cacheHandler feeds a cache from an informer and calls changed for each group
// that another client's write has changed.
func cacheHandler[T metav1.Object](c *assumeCache[T], changed func(svc.Name)) cache.ResourceEventHandler {
	observe := func(old, obj T, hasOld bool) {
		for _, owner := range c.observe(old, obj, hasOld) {
			changed(owner)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			var none T
			observe(none, o.(T), false)
		},
		UpdateFunc: func(old, o any) { observe(old.(T), o.(T), true) },
		DeleteFunc: func(o any) {
			if obj, ok := final[T](o); ok {
				if owner, ok := c.observeDelete(obj); ok {
					changed(owner)
				}
			}
		},
	}
}

// managed returns the slices of a Service that one of the controllers manages.
func (st *sliceStore) managed(owner svc.Name, by string) []*discoveryv1.EndpointSlice {
	all := st.list(owner)
	out := all[:0]
	for _, s := range all {
		if s.Labels[discoveryv1.LabelManagedBy] == by {
			out = append(out, s)
		}
	}
	return out
}

// takenError is the error for a new slice whose name another object has.
type takenError struct{ name string }

func (e *takenError) Error() string { return "EndpointSlice name " + e.name + " is taken" }

// takenNames has, by Service, the names that its new slices may not have.
type takenNames struct {
	mu    sync.Mutex
	names map[svc.Name][]string
}

func (t *takenNames) of(name svc.Name) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.names[name]
}

// add adds the names of the takenErrors in the error of a write.
func (t *takenNames) add(name svc.Name, err error) {
	taken := takenIn(err)
	if len(taken) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.names == nil {
		t.names = map[svc.Name][]string{}
	}
	t.names[name] = append(t.names[name], taken...)
}

func (t *takenNames) forget(name svc.Name) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.names, name)
}

func takenIn(err error) []string {
	var names []string
	var taken *takenError
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range many.Unwrap() {
			names = append(names, takenIn(e)...)
		}
	} else if errors.As(err, &taken) {
		names = append(names, taken.name)
	}
	return names
}

// errReplan asks for a new plan, because the cache has just changed.
var errReplan = errors.New("cache was out of date")

// write carries out a plan: creates, updates, deletes, in this order, so that
// an endpoint that moves is never missing. It continues after an error. What a
// failed write reveals about the API is in the cache before it returns.
func (st *sliceStore) write(ctx context.Context, owner svc.Name, plan *epslice.Plan) error {
	var errs []error
	api := st.client.DiscoveryV1().EndpointSlices(owner.Namespace)
	for _, s := range plan.Create {
		made, err := api.Create(ctx, s, metav1.CreateOptions{})
		switch {
		case err == nil:
			st.assume(made)
		case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
			return errors.Join(errs...) // nothing can be created there
		case apierrors.IsAlreadyExists(err):
			errs = append(errs, st.resolveName(ctx, owner, s))
		default:
			errs = append(errs, st.failed(owner, s, "create", err))
		}
	}
	for _, s := range plan.Update {
		made, err := api.Update(ctx, s, metav1.UpdateOptions{})
		switch {
		case err == nil:
			st.assume(made)
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			errs = append(errs, st.refresh(ctx, owner, s))
		default:
			errs = append(errs, st.failed(owner, s, "update", err))
		}
	}
	for _, s := range plan.Delete {
		errs = append(errs, st.delete(ctx, owner, s))
	}
	return errors.Join(errs...)
}

func (st *sliceStore) delete(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	err := ignoreReplaced(st.client.DiscoveryV1().EndpointSlices(s.Namespace).Delete(ctx, s.Name, onlyUID(s.UID)))
	if err == nil {
		st.assumeDeleted(nameOf(s), owner, s.UID)
		return nil
	}
	return st.failed(owner, s, "delete", err)
}

// failed returns the error of a write, and has settle look at the slice unless the API has
// rejected it: an answer may be lost of a write that was carried out.
func (st *sliceStore) failed(owner svc.Name, s *discoveryv1.EndpointSlice, verb string, err error) error {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Code >= http.StatusInternalServerError {
		st.mu.Lock()
		defer st.mu.Unlock()
		if st.unknown[owner] == nil {
			st.unknown[owner] = map[string]*discoveryv1.EndpointSlice{}
		}
		st.unknown[owner][s.Name] = s
	}
	return fmt.Errorf("%s EndpointSlice %s/%s: %w", verb, s.Namespace, s.Name, err)
}

// settle brings the cache up to date with the slices of a Service whose writes failed. Without
// it a plan could put an endpoint into a second slice.
func (st *sliceStore) settle(ctx context.Context, owner svc.Name) error {
	st.mu.Lock()
	unknown := slices.Collect(maps.Values(st.unknown[owner]))
	st.mu.Unlock()
	for _, s := range unknown {
		look := st.refresh
		if s.UID == "" {
			look = st.resolveName
		}
		if err := look(ctx, owner, s); !errors.Is(err, errReplan) && len(takenIn(err)) == 0 {
			return err
		}
		st.mu.Lock()
		delete(st.unknown[owner], s.Name)
		if len(st.unknown[owner]) == 0 {
			delete(st.unknown, owner)
		}
		st.mu.Unlock()
	}
	return nil
}

// refresh brings the cache up to date with one slice.
func (st *sliceStore) refresh(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	now, err := st.client.DiscoveryV1().EndpointSlices(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		st.assumeDeleted(nameOf(s), owner, s.UID)
	case err != nil:
		return fmt.Errorf("get EndpointSlice %s/%s: %w", s.Namespace, s.Name, err)
	case now.UID != s.UID:
		st.assumeDeleted(nameOf(s), owner, s.UID)
		st.assume(now)
	default:
		st.assume(now)
	}
	return errReplan
}

// resolveName finds out which object has the name of a new slice. Mostly it is
// the slice itself, from an earlier attempt whose answer was lost.
func (st *sliceStore) resolveName(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	existing, err := st.client.DiscoveryV1().EndpointSlices(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return errReplan
	case err != nil:
		return fmt.Errorf("get EndpointSlice %s/%s: %w", s.Namespace, s.Name, err)
	}
	its, ok := sliceOwner(existing)
	if !ok || its != owner || existing.DeletionTimestamp != nil ||
		existing.Labels[discoveryv1.LabelManagedBy] != s.Labels[discoveryv1.LabelManagedBy] {
		return &takenError{existing.Name}
	}
	st.assume(existing)
	return errReplan
}

// deleteAll deletes slices of a Service that is gone.
func (st *sliceStore) deleteAll(ctx context.Context, owner svc.Name, list []*discoveryv1.EndpointSlice) error {
	return st.write(ctx, owner, &epslice.Plan{Delete: list})
}

// serviceGone asks the API server whether a Service that is not in the informer
// does not exist. Informers of different kinds are not in step: a slice may
// arrive before the Service it is for.
func serviceGone(ctx context.Context, client kubernetes.Interface, name svc.Name) (bool, error) {
	_, err := client.CoreV1().Services(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	return false, err
}
