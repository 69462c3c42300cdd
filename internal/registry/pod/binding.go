package pod

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storageerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"

	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

// bindingREST gives a Pod its node, once.
type bindingREST struct {
	pods *genericregistry.Store
}

var _ rest.NamedCreater = (*bindingREST)(nil)

func (*bindingREST) New() runtime.Object { return &corev1.Binding{} }

func (*bindingREST) Destroy() {}

// Create binds the Pod called name as the Binding obj says.
func (r *bindingREST) Create(ctx context.Context, name string, obj runtime.Object, v rest.ValidateObjectFunc,
	o *metav1.CreateOptions) (runtime.Object, error) {
	b, ok := obj.(*corev1.Binding)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a Binding object: %T", obj))
	}
	if name != b.Name {
		return nil, apierrors.NewBadRequest("name in URL does not match name in Binding object")
	}
	if errs := validateBinding(b); len(errs) > 0 {
		return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Binding").GroupKind(), b.Name, errs)
	}
	if v != nil {
		if err := v(ctx, b.DeepCopy()); err != nil {
			return nil, err
		}
	}
	if err := r.bind(ctx, b, dryrun.IsDryRun(o.DryRun)); err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

func validateBinding(b *corev1.Binding) (errs field.ErrorList) {
	target := field.NewPath("target")
	if b.Target.Kind != "" && b.Target.Kind != "Node" {
		errs = append(errs, field.NotSupported(target.Child("kind"), b.Target.Kind, []string{"Node", "<empty>"}))
	}
	if b.Target.Name == "" {
		errs = append(errs, field.Required(target.Child("name"), ""))
	} else {
		errs = append(errs, store.Invalids(target.Child("name"), b.Target.Name, validation.NameIsDNSSubdomain(b.Target.Name, false))...)
	}
	return errs
}

func (r *bindingREST) bind(ctx context.Context, b *corev1.Binding, dryRun bool) error {
	key, err := r.pods.KeyFunc(ctx, b.Name)
	if err != nil {
		return err
	}
	var pre *storage.Preconditions
	if b.UID != "" || b.ResourceVersion != "" {
		pre = &storage.Preconditions{}
		if b.UID != "" {
			pre.UID = &b.UID
		}
		if b.ResourceVersion != "" {
			pre.ResourceVersion = &b.ResourceVersion
		}
	}
	err = r.pods.Storage.GuaranteedUpdate(ctx, key, &corev1.Pod{}, false, pre,
		storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
			p, ok := obj.(*corev1.Pod)
			if !ok {
				return nil, fmt.Errorf("unexpected object: %#v", obj)
			}
			if p.DeletionTimestamp != nil {
				return nil, fmt.Errorf("pod %s is being deleted, cannot be assigned to a host", p.Name)
			}
			if p.Spec.NodeName != "" {
				return nil, fmt.Errorf("pod %v is already assigned to node %q", p.Name, p.Spec.NodeName)
			}
			assign(p, b)
			return p, nil
		}), dryRun, nil)
	if err == nil {
		return nil
	}
	if err = storageerr.InterpretGetError(err, corev1.Resource("pods"), b.Name); apierrors.IsNotFound(err) {
		return err
	}
	if err = storageerr.InterpretUpdateError(err, corev1.Resource("pods"), b.Name); apierrors.IsConflict(err) {
		return err
	}
	if status := (*apierrors.StatusError)(nil); errors.As(err, &status) {
		return err
	}
	return apierrors.NewConflict(corev1.Resource("pods/binding"), b.Name, err)
}

func assign(p *corev1.Pod, b *corev1.Binding) {
	p.Spec.NodeName = b.Target.Name
	if len(b.Annotations) > 0 && p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	for k, v := range b.Annotations {
		if k != svc.PodSecurityAnnotation {
			p.Annotations[k] = v
		}
	}
	if len(b.Labels) > 0 && p.Labels == nil {
		p.Labels = map[string]string{}
	}
	maps.Copy(p.Labels, b.Labels)
	for i := range p.Status.Conditions {
		c := &p.Status.Conditions[i]
		if c.Type == corev1.PodScheduled {
			if c.Status != corev1.ConditionTrue {
				c.LastTransitionTime = metav1.Now()
			}
			c.Status, c.Reason, c.Message = corev1.ConditionTrue, "", ""
			return
		}
	}
	p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{
		Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now(),
	})
}

// legacyBindingREST is the old path /bindings, where only the object has
// the Pod's name.
type legacyBindingREST struct{ *bindingREST }

var (
	_ rest.Scoper               = (*legacyBindingREST)(nil)
	_ rest.SingularNameProvider = (*legacyBindingREST)(nil)
)

func (*legacyBindingREST) NamespaceScoped() bool { return true }

func (*legacyBindingREST) GetSingularName() string { return "binding" }

// Create binds the Pod that the Binding is named after.
func (r *legacyBindingREST) Create(ctx context.Context, obj runtime.Object, v rest.ValidateObjectFunc,
	o *metav1.CreateOptions) (runtime.Object, error) {
	b, ok := obj.(*corev1.Binding)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a Binding object: %T", obj))
	}
	return r.bindingREST.Create(ctx, b.Name, obj, v, o)
}
