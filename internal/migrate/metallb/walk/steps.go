package walk

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate/act"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// install copies the passwords of BGP, applies fairlead's objects and waits until its Pods are ready.
func (w *Walk) install(ctx context.Context) error {
	ours := w.plan.Ours(w.base, w.Image)
	if err := w.act.Within(ctx, nodes{w}.copyPasswords); err != nil { // before fairlead lb may read Secrets of that name
		return err
	}
	if err := w.act.Apply(ctx, append(w.rest[:len(w.rest):len(w.rest)], runtime.Object(ours))); err != nil {
		return err
	}
	return w.act.Within(ctx, func(ctx context.Context) error { return w.daemonsReady(ctx, ours.Namespace, ours.Name) })
}

// daemonsReady returns an error for a DaemonSet that has not all Pods updated and ready, or has none.
func (w *Walk) daemonsReady(ctx context.Context, namespace, name string) error {
	d, err := w.Client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	s := &d.Status
	if s.ObservedGeneration < d.Generation {
		return fmt.Errorf("the controller of DaemonSets has not seen the change of %s", name)
	}
	if n := min(s.UpdatedNumberScheduled, s.NumberReady); n < s.DesiredNumberScheduled || n == 0 {
		return fmt.Errorf("the DaemonSet %s has %d of %d Pods updated and ready%s", name, n, s.DesiredNumberScheduled,
			w.why(ctx, namespace, d.Spec.Selector))
	}
	return nil
}

// pods returns the Pods that a selector selects.
func (w *Walk) pods(ctx context.Context, namespace string, of *metav1.LabelSelector) ([]corev1.Pod, error) {
	selector, err := metav1.LabelSelectorAsSelector(of)
	if err != nil {
		return nil, err
	}
	list, err := w.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// why is what a Pod that is not ready waits for.
func (w *Walk) why(ctx context.Context, namespace string, of *metav1.LabelSelector) string {
	pods, err := w.pods(ctx, namespace, of)
	if err != nil {
		return ""
	}
	for i := range pods {
		if report := act.Report(&pods[i]); report != "" && !workloads.IsReady(&pods[i]) {
			return fmt.Sprintf("; the Pod %s: %s %s", pods[i].Name, pods[i].Status.Phase, report)
		}
	}
	return ""
}

// gone returns an error for a Pod that a selector selects.
func (w *Walk) gone(ctx context.Context, namespace string, of *metav1.LabelSelector) error {
	pods, err := w.pods(ctx, namespace, of)
	if err == nil && len(pods) > 0 {
		err = fmt.Errorf("the Pod %s still runs", pods[0].Name)
	}
	return err
}

// scaleController gives MetalLB's controller a number of Pods. With 0 it waits until they have ended.
func (w *Walk) scaleController(ctx context.Context, replicas int32) error {
	c := w.plan.Controller()
	api := w.Client.AppsV1().Deployments(c.Namespace)
	err := w.act.Within(ctx, func(ctx context.Context) error { // a conflict is tried again
		d, err := api.Get(ctx, c.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		d.Spec.Replicas = &replicas
		_, err = api.Update(ctx, d, metav1.UpdateOptions{FieldManager: act.Manager})
		return err
	})
	if err != nil || replicas > 0 {
		return err
	}
	return w.act.Within(ctx, func(ctx context.Context) error { return w.gone(ctx, c.Namespace, c.Spec.Selector) })
}

func (w *Walk) noSpeakers(ctx context.Context) error {
	s := w.plan.Speaker()
	return w.gone(ctx, s.Namespace, s.Spec.Selector)
}

// metalLBReady returns an error unless MetalLB's speakers, and its controller where it is not ended, are ready.
func (w *Walk) metalLBReady(ctx context.Context) error {
	s, c := w.plan.Speaker(), w.plan.Controller()
	if err := w.daemonsReady(ctx, s.Namespace, s.Name); err != nil {
		return err
	}
	d, err := w.Client.AppsV1().Deployments(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	want := int32(1)
	if d.Spec.Replicas != nil {
		want = *d.Spec.Replicas
	}
	if d.Status.ObservedGeneration < d.Generation || d.Status.ReadyReplicas < want {
		return fmt.Errorf("the Deployment %s has %d of %d Pods ready%s", d.Name, d.Status.ReadyReplicas, want,
			w.why(ctx, d.Namespace, d.Spec.Selector))
	}
	return nil
}

// applyPools makes the pools. A pool of the same name that is not of a migration is an error.
func (w *Walk) applyPools(ctx context.Context) error {
	for _, want := range w.plan.Pools() {
		have, err := w.LB.Pools.Get(ctx, want.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			_, err = w.LB.Pools.Create(ctx, want, metav1.CreateOptions{FieldManager: act.Manager})
		case err != nil:
		case have.Labels[metallb.PoolLabel] == "":
			err = fmt.Errorf("the IPAddressPool %s of fairlead.dev has the name of a pool of MetalLB: delete it first", want.Name)
		case !equality.Semantic.DeepEqual(have.Spec, want.Spec):
			have.Spec = want.Spec
			_, err = w.LB.Pools.Update(ctx, have, metav1.UpdateOptions{FieldManager: act.Manager})
		}
		if err != nil {
			return fmt.Errorf("IPAddressPool %s: %w", want.Name, err)
		}
	}
	return nil
}

// poolList returns the pools, none where the cluster does not know the kind.
func (w *Walk) poolList(ctx context.Context) ([]v1.IPAddressPool, error) {
	list, err := w.LB.Pools.List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

func (w *Walk) holdPools(ctx context.Context) error {
	pools, err := w.poolList(ctx)
	if err != nil {
		return err
	}
	for i := range pools {
		if !pools[i].Spec.IsAutoAssign() {
			continue
		}
		pools[i].Spec.AutoAssign = new(false)
		if _, err := w.LB.Pools.Update(ctx, &pools[i], metav1.UpdateOptions{FieldManager: act.Manager}); err != nil {
			return fmt.Errorf("IPAddressPool %s: %w", pools[i].Name, err)
		}
	}
	return nil
}

// announced returns an error for an address that fairlead lb does not announce.
func (w *Walk) announced(ctx context.Context) error {
	services, err := w.Client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	speakers, err := w.LB.Speakers.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var present []*corev1.Service
	for i := range services.Items {
		present = append(present, &services.Items[i])
	}
	var announcing []*v1.Speaker
	for i := range speakers.Items {
		announcing = append(announcing, &speakers.Items[i])
	}
	var lost error
	err = metallb.Unannounced(w.plan.Given(), present, announcing, func(n svc.Name) bool {
		served, err := w.served(ctx, n)
		lost = err
		return served
	})
	if lost != nil {
		return lost
	}
	return err
}

// served reports whether a Service has a ready endpoint.
func (w *Walk) served(ctx context.Context, n svc.Name) (bool, error) {
	list, err := w.Client.DiscoveryV1().EndpointSlices(n.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + n.Name,
	})
	if err != nil {
		return false, err
	}
	for i := range list.Items {
		for _, e := range list.Items[i].Endpoints {
			if e.NodeName != nil && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
				return true, nil
			}
		}
	}
	return false, nil
}

// patchService changes the metadata of a Service. One that is gone is no error.
func (w *Walk) patchService(ctx context.Context, n svc.Name, metadata map[string]any) error {
	text, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return err
	}
	_, err = w.Client.CoreV1().Services(n.Namespace).Patch(ctx, n.Name, types.StrategicMergePatchType, text,
		metav1.PatchOptions{FieldManager: act.Manager})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
