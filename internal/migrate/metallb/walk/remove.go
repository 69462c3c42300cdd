package walk

import (
	"context"
	"errors"
	"fmt"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
	"github.com/fairlead/fairlead/internal/svc"
)

// cleanupFinalizer is Kubernetes's (k8s.io/cloud-provider), which fairlead lb gives Services with an address. MetalLB has none:
// a Service with the finalizer would never go.
const cleanupFinalizer = "service.kubernetes.io/load-balancer-cleanup"

// removable returns an error if more than MetalLB's Services depend on fairlead lb.
func (w *Walk) removable(ctx context.Context) error {
	pools, err := w.poolList(ctx)
	if err != nil {
		return err
	}
	for i := range pools {
		if pools[i].Labels[metallb.PoolLabel] == "" {
			return fmt.Errorf("the IPAddressPool %s of fairlead.dev is not MetalLB's: its Services would lose their addresses. Make it "+
				"one of metallb.io, or delete it, first", pools[i].Name)
		}
	}
	peers, err := w.LB.Peers.List(ctx, metav1.ListOptions{})
	if !fine(err) {
		return err
	}
	for i := range peers.Items {
		if peers.Items[i].Labels[metallb.PoolLabel] == "" {
			return fmt.Errorf("the BGPPeer %s of fairlead.dev is not MetalLB's: its router would lose the routes. Delete it first",
				peers.Items[i].Name)
		}
	}
	fronts, err := w.Client.CoreV1().Services("").List(ctx, metav1.ListOptions{LabelSelector: names.FrontLabel})
	if err != nil {
		return err
	}
	if len(fronts.Items) > 0 {
		return fmt.Errorf("fairlead lb serves Gateways or Ingresses (Service %s): delete them, or give them another class, first",
			svc.NameOf(&fronts.Items[0]))
	}
	return nil
}

// remove ends fairlead lb, and deletes what it and the migration have made. Its account stays until the Pods have ended, which
// announce until then. What it has made in Services goes before the pools, so that an interrupted removal is continued.
func (w *Walk) remove(ctx context.Context) error {
	if err := w.act.Remove(ctx, []runtime.Object{w.base}); err != nil {
		return err
	}
	err := w.act.Within(ctx, func(ctx context.Context) error { return w.gone(ctx, w.base.Namespace, w.base.Spec.Selector) })
	if err != nil {
		return err
	}
	if err := w.act.Within(ctx, w.releaseClaims); err != nil {
		return err
	}
	if err := w.act.Within(ctx, w.removeMade); err != nil {
		return err
	}
	return w.act.Remove(ctx, w.rest)
}

// releaseClaims takes the finalizer from the Services that have an address of fairlead lb, and deletes the claims. The Services keep
// the addresses in their status, by which MetalLB knows them.
func (w *Walk) releaseClaims(ctx context.Context) error {
	api := w.Client.NetworkingV1().IPAddresses()
	list, err := api.List(ctx, metav1.ListOptions{LabelSelector: claim.Selector})
	if err != nil {
		return err
	}
	for i := range list.Items {
		o := &list.Items[i]
		c, _ := claim.Parse(o)
		for _, n := range c.Services {
			err := w.patchService(ctx, n, map[string]any{"$deleteFromPrimitiveList/finalizers": []string{cleanupFinalizer}})
			if err != nil {
				return fmt.Errorf("finalizer of the Service %s: %w", n, err)
			}
		}
		if err := api.Delete(ctx, o.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &o.UID}}); !fine(err) {
			return fmt.Errorf("IPAddress %s: %w", o.Name, err)
		}
	}
	return nil
}

// fine reports whether a deletion has succeeded, or there was nothing to delete.
func fine(err error) bool { return err == nil || apierrors.IsNotFound(err) }

// definitionsPath is where the API has CustomResourceDefinitions, and classPath the class of Gateways that fairlead lb makes.
const (
	definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
	classPath       = "/apis/gateway.networking.k8s.io/v1/gatewayclasses/" + names.ClassName
)

// removeMade deletes what fairlead lb has made: its kinds with their objects, its own state, and its classes. The kinds of the
// Gateway API stay, since others may use them.
func (w *Walk) removeMade(ctx context.Context) error {
	definitions, err := v1.Definitions()
	if err != nil {
		return err
	}
	raw := w.Client.CoreV1().RESTClient()
	for _, d := range definitions {
		if err := raw.Delete().AbsPath(definitionsPath + d.Name).Do(ctx).Error(); !fine(err) {
			return fmt.Errorf("CustomResourceDefinition %s: %w", d.Name, err)
		}
	}
	if err := raw.Delete().AbsPath(classPath).Do(ctx).Error(); !fine(err) {
		return fmt.Errorf("GatewayClass %s: %w", names.ClassName, err)
	}
	class, err := w.Client.NetworkingV1().IngressClasses().Get(ctx, names.ClassName, metav1.GetOptions{})
	if err == nil && ours(class) {
		err = w.Client.NetworkingV1().IngressClasses().Delete(ctx, class.Name, metav1.DeleteOptions{})
	}
	if !fine(err) {
		return fmt.Errorf("IngressClass %s: %w", names.ClassName, err)
	}
	core, leases := w.Client.CoreV1(), w.Client.CoordinationV1().Leases(svc.SystemNamespace)
	var errs []error
	for _, err := range []error{
		core.ConfigMaps(svc.SystemNamespace).Delete(ctx, svc.VotersConfigMap, metav1.DeleteOptions{}),
		core.Secrets(svc.SystemNamespace).Delete(ctx, svc.SpeakerKeySecret, metav1.DeleteOptions{}),
		w.removePasswords(ctx),
		leases.Delete(ctx, svc.LoadBalancer, metav1.DeleteOptions{}),
		leases.Delete(ctx, svc.WitnessLease, metav1.DeleteOptions{}),
	} {
		if !fine(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// removePasswords deletes the Secrets that the migration has made.
func (w *Walk) removePasswords(ctx context.Context) error {
	api := w.Client.CoreV1().Secrets(svc.SystemNamespace)
	list, err := api.List(ctx, metav1.ListOptions{LabelSelector: metallb.PoolLabel})
	if err != nil {
		return err
	}
	for i := range list.Items {
		if !strings.HasPrefix(list.Items[i].Name, svc.BGPPasswordPrefix) {
			continue
		}
		if err := api.Delete(ctx, list.Items[i].Name, metav1.DeleteOptions{}); !fine(err) {
			return err
		}
	}
	return nil
}

func ours(c *networkingv1.IngressClass) bool {
	ours, _ := names.OurIngressClass(c)
	return ours
}
