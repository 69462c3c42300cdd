package kit

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/svc"
)

// OnlyUID restricts a delete to the object with uid, in case another object has taken its name.
func OnlyUID(uid types.UID) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
}

// IgnoreReplaced returns err, or nil if the object of a write no longer exists or another object has
// taken its name (a conflict of UIDs).
func IgnoreReplaced(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// IgnoreNotFound returns err, or nil if the object of a write no longer exists.
func IgnoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// PatchPodCondition sets one condition of a Pod as of now.
func (k *Kit) PatchPodCondition(ctx context.Context, pod *corev1.Pod, condition corev1.PodCondition) error {
	condition.LastTransitionTime = metav1.NewTime(time.Now())
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status":   map[string]any{"conditions": []corev1.PodCondition{condition}},
	})
	if err != nil {
		return err
	}
	_, err = k.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err := IgnoreReplaced(err); err != nil {
		return fmt.Errorf("status of pod %s: %w", svc.NameOf(pod), err)
	}
	return nil
}
