package registration

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/svc"
)

// maxWrites bounds how often Write begins again because another client was faster.
const maxWrites = 5

// Write makes want, a Pod of a Spec, the registration in the API. A Pod cannot be changed,
// so one that differs is replaced. changed is false where it was the same already.
func Write(ctx context.Context, client kubernetes.Interface, want *corev1.Pod) (changed bool, err error) {
	pods := client.CoreV1().Pods(want.Namespace)
	for range maxWrites {
		_, err = pods.Create(ctx, want, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return err == nil, err
		}
		have, getErr := pods.Get(ctx, want.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(getErr):
			continue
		case getErr != nil:
			return false, getErr
		case Same(have, want):
			return false, nil
		case !Is(have):
			return false, fmt.Errorf("the Pod %s already exists and is not a registration: choose another name", want.Name)
		case have.Annotations[svc.ServicesFileAnnotation] != want.Annotations[svc.ServicesFileAnnotation]:
			return false, fmt.Errorf("it is registered already, %s: remove that first", origin(have))
		}
		now := metav1.DeleteOptions{GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &have.UID}}
		if err := pods.Delete(ctx, have.Name, now); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return false, err
		}
	}
	return false, err
}

func origin(p *corev1.Pod) string {
	if file := p.Annotations[svc.ServicesFileAnnotation]; file != "" {
		return "by the file " + file + " of node " + p.Spec.NodeName
	}
	return "by 'fairlead register'"
}
