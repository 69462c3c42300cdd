package controller

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// writer writes claims, and the status and finalizers of Services.
type writer struct {
	*state
	client kubernetes.Interface
}

// ensureClaim makes the claim of addr list a Service that holds it. ok is false if
// another controller was faster; who has the address is then recorded.
func (w *writer) ensureClaim(ctx context.Context, addr netip.Addr, name svc.Name) (ok bool, err error) {
	w.mu.Lock()
	if !slices.Contains(w.alloc.Holders(addr), name) {
		w.mu.Unlock()
		return false, nil
	}
	have, want := w.claims[addr], claim.Claim{Addr: addr, Pool: w.alloc.PoolOf(addr), Services: w.alloc.Holders(addr)}.Object()
	w.mu.Unlock()
	api := w.client.NetworkingV1().IPAddresses()
	var written *networkingv1.IPAddress
	switch {
	case have == nil:
		written, err = api.Create(ctx, want, metav1.CreateOptions{})
	case slices.Contains(servicesOf(have), name):
		return true, nil
	default:
		change := have.DeepCopy()
		change.Annotations = want.Annotations
		written, err = api.Update(ctx, change, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return false, w.learn(ctx, addr, name)
	case err != nil:
		return false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.keepClaim(addr, written)
	return true, nil
}

// keepClaim remembers a claim that this process has written. The caller holds mu.
func (w *writer) keepClaim(addr netip.Addr, o *networkingv1.IPAddress) {
	if have := w.claims[addr]; have == nil || have.UID != o.UID || reflector.IsNewer(o, have) {
		w.claims[addr] = slimClaim(o)
	}
}

// learn reads who has an address that name could not claim, or whose claim has changed.
func (w *writer) learn(ctx context.Context, addr netip.Addr, name svc.Name) error {
	o, err := w.client.NetworkingV1().IPAddresses().Get(ctx, addr.String(), metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil { // it is free by now
		if have := w.claims[addr]; have != nil {
			w.dropClaim(have)
		}
		return nil
	}
	if o.Labels[networkingv1.LabelManagedBy] != svc.AddressManager {
		w.alloc.Release(addr, name)
		w.foreign[addr] = true
		w.alloc.Block(addr, "used by "+parentOf(o))
		return nil
	}
	if !slices.Contains(servicesOf(o), name) {
		w.alloc.Release(addr, name) // the Services that the claim lists were first
	}
	w.setClaim(o)
	return nil
}

// parentOf returns what a claim is for, in words.
func parentOf(o *networkingv1.IPAddress) string {
	ref := o.Spec.ParentRef
	if ref == nil {
		return "the IPAddress object of that name"
	}
	return strings.TrimSpace(fmt.Sprintf("%s %s", ref.Resource, strings.Trim(ref.Namespace+"/"+ref.Name, "/")))
}

// releaseClaim takes an address from a Service. ok is false if the claim has changed since
// it was read.
func (w *writer) releaseClaim(ctx context.Context, addr netip.Addr, name svc.Name) (ok bool, err error) {
	w.mu.Lock()
	have := w.claims[addr]
	w.mu.Unlock()
	api := w.client.NetworkingV1().IPAddresses()
	var left []svc.Name
	var written *networkingv1.IPAddress
	if have != nil {
		left = slices.DeleteFunc(servicesOf(have), func(n svc.Name) bool { return n == name })
	}
	switch {
	case have == nil || len(left) == len(servicesOf(have)): // it was never written
	case len(left) > 0:
		change := have.DeepCopy()
		change.Annotations[svc.ClaimServicesAnnotation] = claim.Join(left)
		written, err = api.Update(ctx, change, metav1.UpdateOptions{})
	default:
		err = api.Delete(ctx, have.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &have.UID, ResourceVersion: &have.ResourceVersion}})
	}
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err) && written != nil:
		return false, w.learn(ctx, addr, name)
	case err != nil && !apierrors.IsNotFound(err):
		return false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case written != nil && err == nil:
		w.keepClaim(addr, written)
	case len(left) == 0 && w.claims[addr] == have:
		delete(w.claims, addr)
	}
	w.alloc.Release(addr, name)
	w.addressFreed()
	return true, nil
}
