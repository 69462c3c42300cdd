package allocator

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

// errClaimed is returned when the object of a claim exists already.
var errClaimed = errors.New("claimed already")

// claims is one kind of object whose names are what is claimed.
type claims struct {
	store *store.REST
	// build makes the object that claims name for a Service.
	build func(name string, owner svc.Name) runtime.Object
	// owner returns the Service that a claim is for, and false for an object
	// that is not a claim of a Service.
	owner func(runtime.Object) (svc.Name, bool)
}

// newAddressClaims claims cluster IPs as IPAddress objects.
func newAddressClaims(ipAddresses *store.REST) *claims {
	return &claims{
		store: ipAddresses,
		build: func(name string, owner svc.Name) runtime.Object {
			return &networkingv1.IPAddress{
				ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
					networkingv1.LabelIPAddressFamily: string(familyOf(name)),
					networkingv1.LabelManagedBy:       networking.ManagedBy,
				}},
				Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{
					Resource: "services", Namespace: owner.Namespace, Name: owner.Name,
				}},
			}
		},
		owner: func(obj runtime.Object) (svc.Name, bool) {
			ref := obj.(*networkingv1.IPAddress).Spec.ParentRef
			if ref == nil || ref.Group != "" || ref.Resource != "services" {
				return svc.Name{}, false
			}
			return svc.Name{Namespace: ref.Namespace, Name: ref.Name}, true
		},
	}
}

// newPortClaims claims node ports as objects that no API shows. They are Leases by
// type, because a holder is all there is to say about a port; they live under a
// separate key.
func newPortClaims(opts generic.RESTOptionsGetter) (*claims, error) {
	s, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: coordinationv1.GroupName, Resource: "nodeports"},
		Singular: "nodeport",
		New:      store.Empty[coordinationv1.Lease],
		NewList:  store.Empty[coordinationv1.LeaseList],
		Strategy: store.Rules[*coordinationv1.Lease]{ClusterScoped: true}.Strategy(),
	}, opts)
	if err != nil {
		return nil, fmt.Errorf("cannot build the storage of node port claims: %w", err)
	}
	return &claims{
		store: s,
		build: func(name string, owner svc.Name) runtime.Object {
			return &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec:       coordinationv1.LeaseSpec{HolderIdentity: new(owner.String())},
			}
		},
		owner: func(obj runtime.Object) (svc.Name, bool) {
			holder := obj.(*coordinationv1.Lease).Spec.HolderIdentity
			if holder == nil {
				return svc.Name{}, false
			}
			n, err := svc.ParseName(*holder)
			return n, err == nil
		},
	}, nil
}

// clusterContext is ctx without the namespace of the request that led here.
func clusterContext(ctx context.Context) context.Context {
	return genericrequest.WithNamespace(ctx, metav1.NamespaceNone)
}

// create makes the claim, or returns errClaimed when it exists.
func (c *claims) create(ctx context.Context, name string, owner svc.Name) error {
	_, err := c.store.Create(clusterContext(ctx), c.build(name, owner), rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return errClaimed
	}
	return err
}

// errOwner stops the deletion of a claim that belongs to another Service.
var errOwner = errors.New("the claim belongs to another Service")

// release removes the claim if it is that of owner. A claim that does not exist
// or belongs to another is not changed, without an error.
func (c *claims) release(ctx context.Context, name string, owner svc.Name) error {
	_, err := c.remove(ctx, name, func(obj runtime.Object) error {
		if o, ok := c.owner(obj); !ok || o != owner {
			return errOwner
		}
		return nil
	})
	return err
}

// remove deletes the claim if check, called on the object that is deleted,
// agrees. It reports whether it was this call that deleted it.
func (c *claims) remove(ctx context.Context, name string, check func(runtime.Object) error) (bool, error) {
	_, _, err := c.store.Delete(clusterContext(ctx), name,
		func(_ context.Context, obj runtime.Object) error { return check(obj) }, &metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) || errors.Is(err, errOwner) {
		return false, nil
	}
	return err == nil, err
}

// get reads the claim from the store itself, not from a cache.
func (c *claims) get(ctx context.Context, name string) (runtime.Object, error) {
	return c.store.Get(clusterContext(ctx), name, &metav1.GetOptions{})
}

// exists reports whether there is a claim now. What this server knows of the
// claims lags behind its own releases.
func (c *claims) exists(ctx context.Context, name string) (bool, error) {
	_, err := c.get(ctx, name)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// cacheTimeout bounds the wait for a watch cache.
const cacheTimeout = 30 * time.Second

// listCached lists from the watch cache of l. A cache that has not read the store
// yet, after a start or because its watch broke, rejects lists with 429; it is asked
// again until it answers, ctx ends or cacheTimeout has passed.
func listCached(ctx context.Context, l rest.Lister) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, cacheTimeout)
	defer cancel()
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	for {
		list, err := l.List(ctx, &metainternal.ListOptions{ResourceVersion: "0"})
		if !apierrors.IsTooManyRequests(err) {
			return list, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-retry.C:
		}
	}
}

// list returns the claims by name, from the watch cache: what a repair does is
// checked against the store before.
func (c *claims) list(ctx context.Context) (map[string]runtime.Object, error) {
	list, err := listCached(clusterContext(ctx), c.store)
	if err != nil {
		return nil, err
	}
	out := map[string]runtime.Object{}
	return out, meta.EachListItem(list, func(obj runtime.Object) error {
		out[nameOf(obj)] = obj
		return nil
	})
}

// removeExactly deletes the claim if it is still the object that was read, and
// reports whether it did.
func (c *claims) removeExactly(ctx context.Context, claim runtime.Object) (bool, error) {
	m, err := meta.Accessor(claim)
	if err != nil {
		return false, err
	}
	return c.remove(ctx, m.GetName(), func(obj runtime.Object) error {
		if cur, err := meta.Accessor(obj); err != nil || cur.GetUID() != m.GetUID() {
			return errOwner
		}
		return nil
	})
}

// nameOf returns the name of a claim.
func nameOf(obj any) string {
	m, err := meta.Accessor(obj)
	if err != nil {
		return ""
	}
	return m.GetName()
}
