package controller

import (
	"context"
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/svc"
)

// publish writes status.loadBalancer. It fails with a conflict if the Service has changed
// since it was seen: another controller may have given the addresses away.
func (w *writer) publish(ctx context.Context, s *corev1.Service, ingress []corev1.LoadBalancerIngress) (*corev1.Service, error) {
	body := map[string]any{
		"metadata": map[string]any{"uid": s.UID, "resourceVersion": s.ResourceVersion},
		"status":   map[string]any{"loadBalancer": map[string]any{"ingress": ingress}},
	}
	return w.patch(ctx, s, types.MergePatchType, body, "status")
}

// ensureFinalizer returns the Service with the finalizer, nil if it is gone.
func (w *writer) ensureFinalizer(ctx context.Context, s *corev1.Service) (*corev1.Service, error) {
	if slices.Contains(s.Finalizers, finalizer) {
		return s, nil
	}
	w.mu.Lock()
	if record := w.services[svc.NameOf(s)]; record != nil && record.object.UID == s.UID {
		record.finalizer = ownFinalizer
	}
	w.mu.Unlock()
	return w.patch(ctx, s, types.StrategicMergePatchType, map[string]any{
		"metadata": map[string]any{"uid": s.UID, "finalizers": []string{finalizer}},
	})
}

// removeFinalizer returns the Service without the finalizer, nil if it is gone.
func (w *writer) removeFinalizer(ctx context.Context, s *corev1.Service) (*corev1.Service, error) {
	if !slices.Contains(s.Finalizers, finalizer) {
		return s, nil
	}
	return w.patch(ctx, s, types.StrategicMergePatchType, map[string]any{
		"metadata": map[string]any{"uid": s.UID, "$deleteFromPrimitiveList/finalizers": []string{finalizer}},
	})
}

// patch changes a Service, and remembers what came out. It returns nil if there is no
// such Service any more.
func (w *writer) patch(
	ctx context.Context, s *corev1.Service, kind types.PatchType, body map[string]any, subresources ...string,
) (*corev1.Service, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	out, err := w.client.CoreV1().Services(s.Namespace).Patch(ctx, s.Name, kind, text, metav1.PatchOptions{}, subresources...)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if have := w.object(svc.NameOf(s)); have != nil && have.UID == out.UID {
		w.keepService(out)
	}
	return out, nil
}
