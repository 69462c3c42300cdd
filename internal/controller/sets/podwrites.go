package sets

import (
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/controller/kit"
)

// podWriter creates and deletes the Pods of owners, and records that as Events of them.
type podWriter struct {
	*kit.Kit
	pods *dependents[*corev1.Pod]
}

// create creates n Pods, first one, then more at a time for as long as it succeeds: where
// a quota or a policy rejects them there are few useless requests.
func (w *podWriter) create(ctx context.Context, owner runtime.Object, n int, pod func(i int) *corev1.Pod) error {
	done := 0
	for batch := 1; done < n; batch *= 2 {
		size := min(batch, n-done)
		errs := w.parallel(size, func(i int) error { return w.createOne(ctx, owner, pod(done+i)) })
		if errs != nil {
			return errs
		}
		done += size
	}
	return nil
}

// parallel calls f for 0 to n-1 at the same time and returns the first error.
func (w *podWriter) parallel(n int, f func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err // they are alike
		}
	}
	return nil
}

func (w *podWriter) createOne(ctx context.Context, owner runtime.Object, pod *corev1.Pod) error {
	made, err := w.Client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil // nothing can be created there any more
	case err != nil:
		if !apierrors.IsTimeout(err) && !errors.Is(err, context.Canceled) {
			w.Events.Event(owner, corev1.EventTypeWarning, "FailedCreate", fmt.Sprintf("Error creating: %v", err))
		}
		return err
	}
	w.pods.Assume(kit.SlimPod(made))
	w.Events.Event(owner, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: "+made.Name)
	return nil
}

// delete deletes Pods, all at the same time.
func (w *podWriter) delete(ctx context.Context, owner runtime.Object, list []*corev1.Pod) error {
	return w.parallel(len(list), func(i int) error {
		pod := list[i]
		w.pods.deleting(pod.UID, true)
		err := w.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, kit.OnlyUID(pod.UID))
		if err != nil {
			w.pods.deleting(pod.UID, false)
		}
		switch err := kit.IgnoreReplaced(err); {
		case err != nil:
			w.Events.Event(owner, corev1.EventTypeWarning, "FailedDelete", fmt.Sprintf("Error deleting: %v", err))
			return err
		default:
			w.Events.Event(owner, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: "+pod.Name)
			return nil
		}
	})
}

// patch changes a Pod and returns what controllers keep of it.
func (w *podWriter) patch(ctx context.Context, pod *corev1.Pod, patch []byte) (*corev1.Pod, error) {
	now, err := w.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return nil, err
	}
	return kit.SlimPod(now), nil
}
