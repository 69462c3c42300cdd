package endpoints

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

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// SliceStore caches all EndpointSlices by Service, and writes plans for them.
type SliceStore struct {
	*kit.AssumeCache[*discoveryv1.EndpointSlice]
	client      kubernetes.Interface
	subscribers []func(owner svc.Name)

	mu sync.Mutex
	// unknown are the slices whose last write failed in a way that leaves open whether it was
	// carried out, by Service and name.
	unknown map[svc.Name]map[string]*discoveryv1.EndpointSlice
}

// NewSliceStore returns a store that k keeps up to date.
func NewSliceStore(k *kit.Kit) (*SliceStore, error) {
	st := &SliceStore{client: k.Client, unknown: map[svc.Name]map[string]*discoveryv1.EndpointSlice{}}
	var err error
	st.AssumeCache, err = kit.NewCache(k, k.Informers.Discovery().V1().EndpointSlices().Informer(), kit.ServiceOf, st.changed)
	return st, err
}

// Subscribe makes st call changed for every Service whose slices another client changed. It may be
// called only while the controllers are built.
func (st *SliceStore) Subscribe(changed func(owner svc.Name)) {
	st.subscribers = append(st.subscribers, changed)
}

func (st *SliceStore) changed(owner svc.Name) {
	for _, f := range st.subscribers {
		f(owner)
	}
}

// Run drops writes that the informer does not confirm, until ctx ends.
func (st *SliceStore) Run(ctx context.Context) { st.ExpireLoop(ctx, st.changed) }

// managed returns the slices of a Service that one of the controllers manages.
func (st *SliceStore) managed(owner svc.Name, by string) []*discoveryv1.EndpointSlice {
	all := st.List(owner)
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
func (st *SliceStore) write(ctx context.Context, owner svc.Name, plan *epslice.Plan) error {
	var errs []error
	api := st.client.DiscoveryV1().EndpointSlices(owner.Namespace)
	for _, s := range plan.Create {
		made, err := api.Create(ctx, s, metav1.CreateOptions{})
		switch {
		case err == nil:
			st.Assume(made)
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
			st.Assume(made)
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

func (st *SliceStore) delete(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	err := kit.IgnoreReplaced(st.client.DiscoveryV1().EndpointSlices(s.Namespace).Delete(ctx, s.Name, kit.OnlyUID(s.UID)))
	if err == nil {
		st.AssumeDeleted(svc.NameOf(s), owner, s.UID)
		return nil
	}
	return st.failed(owner, s, "delete", err)
}

// failed returns the error of a write, and has settle look at the slice unless the API has
// rejected it: an answer may be lost of a write that was carried out.
func (st *SliceStore) failed(owner svc.Name, s *discoveryv1.EndpointSlice, verb string, err error) error {
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
func (st *SliceStore) settle(ctx context.Context, owner svc.Name) error {
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
func (st *SliceStore) refresh(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	now, err := st.client.DiscoveryV1().EndpointSlices(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		st.AssumeDeleted(svc.NameOf(s), owner, s.UID)
	case err != nil:
		return fmt.Errorf("get EndpointSlice %s/%s: %w", s.Namespace, s.Name, err)
	case now.UID != s.UID:
		st.AssumeDeleted(svc.NameOf(s), owner, s.UID)
		st.Assume(now)
	default:
		st.Assume(now)
	}
	return errReplan
}

// resolveName finds out which object has the name of a new slice. Mostly it is
// the slice itself, from an earlier attempt whose answer was lost.
func (st *SliceStore) resolveName(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	existing, err := st.client.DiscoveryV1().EndpointSlices(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return errReplan
	case err != nil:
		return fmt.Errorf("get EndpointSlice %s/%s: %w", s.Namespace, s.Name, err)
	}
	its, ok := kit.ServiceOf(existing)
	if !ok || its != owner || existing.DeletionTimestamp != nil ||
		existing.Labels[discoveryv1.LabelManagedBy] != s.Labels[discoveryv1.LabelManagedBy] {
		return &takenError{existing.Name}
	}
	st.Assume(existing)
	return errReplan
}

// deleteAll deletes slices of a Service that is gone.
func (st *SliceStore) deleteAll(ctx context.Context, owner svc.Name, list []*discoveryv1.EndpointSlice) error {
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
