package policy

import (
	"context"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/util/retry"

	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/svc"
)

// returning returns the Pod that takes the place of a registered program's when a drain evicts it; nil for every
// other eviction. A drain deregistered such a program for good: the node has not started it, so no controller makes
// its Pod again. The node keeps the new Pod out of Services until it is uncordoned. Programs of a file are
// registered again by their node.
func (r *evictionREST) returning(ctx context.Context, pod *corev1.Pod) (*corev1.Pod, error) {
	if !registration.Is(pod) || pod.DeletionTimestamp != nil || pod.Annotations[svc.ServicesFileAnnotation] != "" {
		return nil, nil
	}
	obj, err := r.nodes.Get(ctx, pod.Spec.NodeName, &metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && !obj.(*corev1.Node).Spec.Unschedulable {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	again := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Namespace: pod.Namespace, Labels: maps.Clone(pod.Labels), Annotations: maps.Clone(pod.Annotations),
			OwnerReferences: pod.OwnerReferences, Finalizers: pod.Finalizers,
		},
		Spec: *pod.Spec.DeepCopy(),
	}
	metav1.SetMetaDataAnnotation(&again.ObjectMeta, svc.EvictedAnnotation, time.Now().UTC().Format(time.RFC3339))
	return again, nil
}

// returnTime is how long a registration may take to be deleted and made again, whether the client still waits or not: one that leaves
// in between must not take it with it.
const returnTime = 15 * time.Second

// registering is how often, and after which waits, the Pod that returning has made is tried to be created.
//
//nolint:gochecknoglobals // constant
var registering = wait.Backoff{Steps: 3, Duration: 100 * time.Millisecond, Factor: 5}

// register creates the Pod that returning has made. One that exists already is left: its finalizers keep the evicted
// Pod, or another client was faster.
func (r *evictionREST) register(ctx context.Context, again *corev1.Pod) error {
	passing := func(err error) bool {
		return !apierrors.IsAlreadyExists(err) && !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) && ctx.Err() == nil
	}
	err := retry.OnError(registering, passing, func() error {
		_, err := r.pods.Create(ctx, again.DeepCopy(), rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
		return err
	})
	if err == nil || apierrors.IsAlreadyExists(err) {
		return nil
	}
	return apierrors.NewInternalError(fmt.Errorf("the Pod is evicted, and its program cannot be registered again: %w", err))
}
