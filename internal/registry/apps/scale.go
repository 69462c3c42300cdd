package apps

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// scaled shows what the subresource scale is about of an object.
type scaled func(runtime.Object) scalable

type scalable struct {
	meta     *metav1.ObjectMeta
	replicas **int32
	current  int32
	selector *metav1.LabelSelector
}

func scaledDeployment(obj runtime.Object) scalable {
	d := obj.(*appsv1.Deployment)
	return scalable{&d.ObjectMeta, &d.Spec.Replicas, d.Status.Replicas, d.Spec.Selector}
}

func scaledReplicaSet(obj runtime.Object) scalable {
	r := obj.(*appsv1.ReplicaSet)
	return scalable{&r.ObjectMeta, &r.Spec.Replicas, r.Status.Replicas, r.Spec.Selector}
}

func (s scalable) scale() (*autoscalingv1.Scale, error) {
	selector, err := metav1.LabelSelectorAsSelector(s.selector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	out := &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.meta.Name, Namespace: s.meta.Namespace, UID: s.meta.UID, ResourceVersion: s.meta.ResourceVersion,
			CreationTimestamp: s.meta.CreationTimestamp,
		},
		Status: autoscalingv1.ScaleStatus{Replicas: s.current, Selector: selector.String()},
	}
	if *s.replicas != nil {
		out.Spec.Replicas = **s.replicas
	}
	return out, nil
}

// scaleREST is the subresource scale: only the number of replicas.
type scaleREST struct {
	store  *genericregistry.Store
	scaled scaled
}

var (
	_ rest.Patcher                  = (*scaleREST)(nil)
	_ rest.GroupVersionKindProvider = (*scaleREST)(nil)
)

// GroupVersionKind is that of a Scale, which belongs to another group.
func (*scaleREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return autoscalingv1.SchemeGroupVersion.WithKind("Scale")
}

// New returns an empty Scale.
func (*scaleREST) New() runtime.Object { return &autoscalingv1.Scale{} }

// Destroy does nothing: the back end belongs to the whole objects.
func (*scaleREST) Destroy() {}

// Get returns the Scale of an object.
func (r *scaleREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	obj, err := r.store.Get(ctx, name, options)
	if err != nil {
		return nil, err
	}
	return r.scaled(obj).scale()
}

// ConvertToTable shows the columns of the whole object.
func (r *scaleREST) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	return rest.NewDefaultTableConvertor(r.store.DefaultQualifiedResource).ConvertToTable(ctx, obj, options)
}

// Update changes the number of replicas.
func (r *scaleREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	obj, _, err := r.store.Update(ctx, name, &scaleInfo{info, name, r},
		func(ctx context.Context, obj runtime.Object) error {
			scale, err := r.scaled(obj).scale()
			if err != nil {
				return err
			}
			return create(ctx, scale)
		},
		func(ctx context.Context, obj, old runtime.Object) error {
			now, err := r.scaled(obj).scale()
			if err != nil {
				return err
			}
			before, err := r.scaled(old).scale()
			if err != nil {
				return err
			}
			return update(ctx, now, before)
		}, false, options)
	if err != nil {
		return nil, false, err
	}
	scale, err := r.scaled(obj).scale()
	return scale, false, err
}

// scaleInfo makes of the update of a Scale one of the whole object.
type scaleInfo struct {
	rest.UpdatedObjectInfo
	name string
	r    *scaleREST
}

// UpdatedObject returns the object with the replicas of the new Scale.
func (i *scaleInfo) UpdatedObject(ctx context.Context, old runtime.Object) (runtime.Object, error) {
	out := old.DeepCopyObject()
	obj := i.r.scaled(out)
	resource := i.r.store.DefaultQualifiedResource
	if obj.meta.ResourceVersion == "" {
		return nil, apierrors.NewNotFound(resource, i.name)
	}
	owners := managedfields.NewScaleHandler(obj.meta.ManagedFields, appsv1.SchemeGroupVersion,
		managedfields.ResourcePathMappings{apiVersion: fieldpath.MakePathOrDie("spec", "replicas")})
	before, err := obj.scale()
	if err != nil {
		return nil, err
	}
	if before.ManagedFields, err = owners.ToSubresource(); err != nil {
		return nil, err
	}
	changed, err := i.UpdatedObjectInfo.UpdatedObject(ctx, before)
	if err != nil {
		return nil, err
	}
	scale, ok := changed.(*autoscalingv1.Scale)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("expected input object type to be Scale, but %T", changed))
	}
	errs := validation.ValidateObjectMeta(&scale.ObjectMeta, true, validation.NameIsDNSSubdomain, field.NewPath("metadata"))
	if errs = append(errs, nonnegative(int64(scale.Spec.Replicas), field.NewPath("spec", "replicas"))...); len(errs) > 0 {
		return nil, apierrors.NewInvalid(autoscalingv1.SchemeGroupVersion.WithKind("Scale").GroupKind(), i.name, errs)
	}
	if scale.UID != "" && scale.UID != obj.meta.UID {
		//nolint:staticcheck // in the words of kube-apiserver
		return nil, apierrors.NewConflict(resource, i.name,
			fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", scale.UID, obj.meta.UID))
	}
	n := scale.Spec.Replicas
	*obj.replicas = &n
	obj.meta.ResourceVersion = scale.ResourceVersion
	obj.meta.ManagedFields, err = owners.ToParent(scale.ManagedFields)
	return out, err
}
