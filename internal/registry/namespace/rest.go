package namespace

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storageerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// namespaceREST is the storage without deletecollection, which Kubernetes does
// not offer for namespaces, and with a deletion in two steps.
type namespaceREST struct {
	all *store.REST
}

var (
	_ rest.CreaterUpdater       = (*namespaceREST)(nil)
	_ rest.Lister               = (*namespaceREST)(nil)
	_ rest.Watcher              = (*namespaceREST)(nil)
	_ rest.GracefulDeleter      = (*namespaceREST)(nil)
	_ rest.StorageWithReadiness = (*namespaceREST)(nil)
	_ rest.ResetFieldsStrategy  = (*namespaceREST)(nil)
)

// finalizeREST is the subresource finalize, which in Kubernetes accepts only PUT.
type finalizeREST struct{ updateOnly }

type updateOnly interface {
	rest.Storage
	rest.Updater
	rest.ResetFieldsStrategy
}

// GetCreateStrategy returns what decides about creations.
func (r *namespaceREST) GetCreateStrategy() rest.RESTCreateStrategy { return r.all.GetCreateStrategy() }

// GetUpdateStrategy returns what decides about updates.
func (r *namespaceREST) GetUpdateStrategy() rest.RESTUpdateStrategy { return r.all.GetUpdateStrategy() }

func newREST(all *store.REST) *namespaceREST { return &namespaceREST{all} }

func (r *namespaceREST) New() runtime.Object                    { return r.all.New() }
func (r *namespaceREST) NewList() runtime.Object                { return r.all.NewList() }
func (r *namespaceREST) Destroy()                               { r.all.Destroy() }
func (r *namespaceREST) NamespaceScoped() bool                  { return false }
func (r *namespaceREST) GetSingularName() string                { return r.all.GetSingularName() }
func (r *namespaceREST) ShortNames() []string                   { return r.all.ShortNames() }
func (r *namespaceREST) ReadinessCheck() error                  { return r.all.ReadinessCheck() }
func (r *namespaceREST) StorageVersion() runtime.GroupVersioner { return r.all.StorageVersion() }

func (r *namespaceREST) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return r.all.GetResetFields()
}

func (r *namespaceREST) Get(ctx context.Context, name string, o *metav1.GetOptions) (runtime.Object, error) {
	return r.all.Get(ctx, name, o)
}

func (r *namespaceREST) List(ctx context.Context, o *internalversion.ListOptions) (runtime.Object, error) {
	return r.all.List(ctx, o)
}

func (r *namespaceREST) Watch(ctx context.Context, o *internalversion.ListOptions) (watch.Interface, error) {
	return r.all.Watch(ctx, o)
}

func (r *namespaceREST) ConvertToTable(ctx context.Context, obj, o runtime.Object) (*metav1.Table, error) {
	return r.all.ConvertToTable(ctx, obj, o)
}

func (r *namespaceREST) Create(ctx context.Context, obj runtime.Object, v rest.ValidateObjectFunc,
	o *metav1.CreateOptions) (runtime.Object, error) {
	return r.all.Create(ctx, obj, v, o)
}

func (r *namespaceREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, force bool, o *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return r.all.Update(ctx, name, info, create, update, force, o)
}

// Delete marks a live namespace Terminating. A namespace so marked leaves the
// store when nothing holds it any more.
func (r *namespaceREST) Delete(ctx context.Context, name string, v rest.ValidateObjectFunc,
	o *metav1.DeleteOptions) (runtime.Object, bool, error) {
	obj, err := r.all.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, false, err
	}
	ns := obj.(*corev1.Namespace)
	if o == nil {
		o = &metav1.DeleteOptions{}
	}
	pre := storage.Preconditions{}
	if o.Preconditions != nil {
		pre.UID, pre.ResourceVersion = o.Preconditions.UID, o.Preconditions.ResourceVersion
	}
	// A name may be used again; what is deleted is this object and no later one.
	if pre.UID == nil {
		pre.UID = &ns.UID
	} else if *pre.UID != ns.UID {
		return nil, false, conflict(name, fmt.Errorf("precondition failed: UID in precondition: %v, UID in object meta: %v", *pre.UID, ns.UID))
	}
	if pre.ResourceVersion != nil && *pre.ResourceVersion != ns.ResourceVersion {
		return nil, false, conflict(name, fmt.Errorf(
			"precondition failed: ResourceVersion in precondition: %v, ResourceVersion in object meta: %v", *pre.ResourceVersion,
			ns.ResourceVersion))
	}
	if ns.DeletionTimestamp.IsZero() {
		return r.terminate(ctx, name, v, &pre, o)
	}
	if len(ns.Spec.Finalizers) != 0 {
		return ns, false, nil
	}
	return r.all.Delete(ctx, name, v, o)
}

func (r *namespaceREST) terminate(ctx context.Context, name string, v rest.ValidateObjectFunc, pre *storage.Preconditions,
	o *metav1.DeleteOptions) (runtime.Object, bool, error) {
	key, err := r.all.KeyFunc(ctx, name)
	if err != nil {
		return nil, false, err
	}
	out := r.all.NewFunc()
	err = r.all.Storage.GuaranteedUpdate(ctx, key, out, false, pre, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		ns, ok := obj.(*corev1.Namespace)
		if !ok {
			return nil, fmt.Errorf("expected a Namespace, got %T", obj)
		}
		if err := v(ctx, ns); err != nil {
			return nil, err
		}
		if ns.DeletionTimestamp.IsZero() {
			now := metav1.Now()
			ns.DeletionTimestamp = &now
		}
		ns.Status.Phase = corev1.NamespaceTerminating
		return ns, nil
	}), dryrun.IsDryRun(o.DryRun), nil)
	if err != nil {
		err = storageerr.InterpretGetError(err, corev1.Resource("namespaces"), name)
		return nil, false, storageerr.InterpretUpdateError(err, corev1.Resource("namespaces"), name)
	}
	return out, false, nil
}

func conflict(name string, err error) error {
	return apierrors.NewConflict(corev1.Resource("namespaces"), name, err)
}

// goneAfterUpdate reports whether an update took away the last thing that kept a
// terminating namespace.
func goneAfterUpdate(ctx context.Context, key string, obj, existing runtime.Object) bool {
	ns := obj.(*corev1.Namespace)
	return len(ns.Spec.Finalizers) == 0 && genericregistry.ShouldDeleteDuringUpdate(ctx, key, obj, existing)
}
