package controller

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// sliceStore is the view of all EndpointSlices, by Service, and the writer of
// plans for them.
type sliceStore struct {
	*view[*discoveryv1.EndpointSlice]
	client kubernetes.Interface
	tell   []func(owner svc.Name)
}

// slicesOf returns the slice store of this Run, made at the first call. tell is
// called for every Service whose slices somebody else changed.
func slicesOf(s *shared, tell func(owner svc.Name)) (*sliceStore, error) {
	if s.slices != nil {
		s.slices.tell = append(s.slices.tell, tell)
		return s.slices, nil
	}
	informer := s.informers.Discovery().V1().EndpointSlices().Informer()
	st := &sliceStore{client: s.client, tell: []func(svc.Name){tell}}
	st.view = newView(sliceOwner, func(name svc.Name) bool {
		_, ok, err := informer.GetStore().GetByKey(name.String())
		return ok && err == nil
	})
	err := s.handle(informer, viewHandler(st.view, st.news))
	s.slices = st
	return st, err
}

func (st *sliceStore) news(owner svc.Name) {
	for _, f := range st.tell {
		f(owner)
	}
}

func (st *sliceStore) audit(ctx context.Context) { st.view.audit(ctx, st.news) }

func sliceOwner(s *discoveryv1.EndpointSlice) (svc.Name, bool) {
	name := s.Labels[discoveryv1.LabelServiceName]
	return svc.Name{Namespace: s.Namespace, Name: name}, name != ""
}

// viewHandler feeds a view from an informer and tells of what is news.
func viewHandler[T metav1.Object](v *view[T], tell func(svc.Name)) cache.ResourceEventHandler {
	observe := func(old, obj T, hasOld bool) {
		for _, owner := range v.observed(old, obj, hasOld) {
			tell(owner)
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
				if owner, news := v.vanished(obj); news {
					tell(owner)
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

// takenError says that a new slice's name is in use by something else.
type takenError struct{ name string }

func (e *takenError) Error() string { return "the name " + e.name + " is taken" }

// errAgain asks for a new plan, because the view has just learnt something.
var errAgain = errors.New("plan again")

// write carries out a plan: creates, updates, deletes, in this order, so that
// an endpoint that moves is never missing. It goes on after an error. What a
// failed write reveals about the API is in the view before it returns.
func (st *sliceStore) write(ctx context.Context, owner svc.Name, plan *epslice.Plan) error {
	var errs []error
	api := st.client.DiscoveryV1().EndpointSlices(owner.Namespace)
	for _, s := range plan.Create {
		made, err := api.Create(ctx, s, metav1.CreateOptions{})
		switch {
		case err == nil:
			st.wrote(made)
		case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
			return errors.Join(errs...) // nothing can be created there any more
		case apierrors.IsAlreadyExists(err):
			errs = append(errs, st.meet(ctx, owner, s))
		default:
			errs = append(errs, fmt.Errorf("create EndpointSlice %s/%s: %w", s.Namespace, s.Name, err))
		}
	}
	for _, s := range plan.Update {
		made, err := api.Update(ctx, s, metav1.UpdateOptions{})
		switch {
		case err == nil:
			st.wrote(made)
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			errs = append(errs, st.look(ctx, owner, s))
		default:
			errs = append(errs, fmt.Errorf("update EndpointSlice %s/%s: %w", s.Namespace, s.Name, err))
		}
	}
	for _, s := range plan.Delete {
		errs = append(errs, st.delete(ctx, owner, s))
	}
	return errors.Join(errs...)
}

func (st *sliceStore) delete(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	err := st.client.DiscoveryV1().EndpointSlices(s.Namespace).Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}})
	switch {
	case err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err): // a conflict: another one of that name
		st.deleted(nameOf(s), owner, s.UID)
		return nil
	}
	return fmt.Errorf("delete EndpointSlice %s/%s: %w", s.Namespace, s.Name, err)
}

// look brings the view up to date with one slice.
func (st *sliceStore) look(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	now, err := st.client.DiscoveryV1().EndpointSlices(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		st.deleted(nameOf(s), owner, s.UID)
	case err != nil:
		return fmt.Errorf("get EndpointSlice %s/%s: %w", s.Namespace, s.Name, err)
	case now.UID != s.UID:
		st.deleted(nameOf(s), owner, s.UID)
		st.wrote(now)
	default:
		st.wrote(now)
	}
	return errAgain
}

// meet finds out what has the name that a new slice should get. Mostly it is
// the slice itself, from an earlier try whose answer was lost.
func (st *sliceStore) meet(ctx context.Context, owner svc.Name, s *discoveryv1.EndpointSlice) error {
	there, err := st.client.DiscoveryV1().EndpointSlices(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return errAgain
	case err != nil:
		return fmt.Errorf("get EndpointSlice %s/%s: %w", s.Namespace, s.Name, err)
	}
	its, ok := sliceOwner(there)
	if !ok || its != owner || there.DeletionTimestamp != nil || there.Labels[discoveryv1.LabelManagedBy] != s.Labels[discoveryv1.LabelManagedBy] {
		return &takenError{there.Name}
	}
	st.wrote(there)
	return errAgain
}

// deleteAll deletes slices of a Service that is gone.
func (st *sliceStore) deleteAll(ctx context.Context, owner svc.Name, list []*discoveryv1.EndpointSlice) error {
	return st.write(ctx, owner, &epslice.Plan{Delete: list})
}

// serviceGone asks the API whether a Service that the informer does not show is
// really not there. Informers of different kinds run apart: a slice may come to
// be seen before the Service it is for.
func serviceGone(ctx context.Context, client kubernetes.Interface, name svc.Name) (bool, error) {
	_, err := client.CoreV1().Services(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	return false, err
}
