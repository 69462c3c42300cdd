package lb

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// listed returns the text of ServicesAnnotation.
func listed(names []svc.Name) string {
	var out []string
	for _, n := range names {
		out = append(out, n.String())
	}
	return strings.Join(out, ",")
}

// claimFor returns the claim of addr for the Services that hold it.
func (c *controller) claimFor(addr netip.Addr) *networkingv1.IPAddress {
	names := c.alloc.Holders(addr)
	return &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{
			Name: addr.String(),
			Labels: map[string]string{
				networkingv1.LabelManagedBy:       ManagedBy,
				networkingv1.LabelIPAddressFamily: svc.FamilyOf(addr).String(),
			},
			Annotations: map[string]string{ServicesAnnotation: listed(names), PoolAnnotation: c.alloc.PoolOf(addr)},
		},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{
			Resource: "services", Namespace: names[0].Namespace, Name: names[0].Name}},
	}
}

// ensureClaim makes the claim of addr list a Service that holds it. ok is false if
// another controller was faster, which is recorded then.
func (c *controller) ensureClaim(ctx context.Context, addr netip.Addr, name svc.Name) (ok bool, err error) {
	c.mu.Lock()
	if !slices.Contains(c.alloc.Holders(addr), name) {
		c.mu.Unlock()
		return false, nil
	}
	have, want := c.claims[addr], c.claimFor(addr)
	c.mu.Unlock()
	api := c.client.NetworkingV1().IPAddresses()
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
		return false, c.learn(ctx, addr, name)
	case err != nil:
		return false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keepClaim(addr, written)
	return true, nil
}

// keepClaim remembers what we have written.
func (c *controller) keepClaim(addr netip.Addr, claim *networkingv1.IPAddress) {
	if have := c.claims[addr]; have == nil || have.UID != claim.UID || isNewer(claim, have) {
		c.claims[addr] = slimClaim(claim)
	}
}

// learn finds out who has an address that name could not claim, or whose claim has changed.
func (c *controller) learn(ctx context.Context, addr netip.Addr, name svc.Name) error {
	claim, err := c.client.NetworkingV1().IPAddresses().Get(ctx, addr.String(), metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil { // it is free by now
		if have := c.claims[addr]; have != nil {
			c.dropClaim(have)
		}
		return nil
	}
	if claim.Labels[networkingv1.LabelManagedBy] != ManagedBy {
		c.alloc.Release(addr, name)
		c.foreign[addr] = true
		c.alloc.Block(addr, "used by "+parentOf(claim))
		return nil
	}
	if !slices.Contains(servicesOf(claim), name) {
		c.alloc.Release(addr, name) // those that the claim lists were first
	}
	c.setClaim(claim)
	return nil
}

// parentOf returns what a claim is for, in words.
func parentOf(claim *networkingv1.IPAddress) string {
	ref := claim.Spec.ParentRef
	if ref == nil {
		return "the IPAddress object of that name"
	}
	return strings.TrimSpace(fmt.Sprintf("%s %s", ref.Resource, strings.Trim(ref.Namespace+"/"+ref.Name, "/")))
}

// releaseClaim ends that a Service has an address. ok is false if the claim has changed
// meanwhile.
func (c *controller) releaseClaim(ctx context.Context, addr netip.Addr, name svc.Name) (ok bool, err error) {
	c.mu.Lock()
	have := c.claims[addr]
	c.mu.Unlock()
	api := c.client.NetworkingV1().IPAddresses()
	var left []svc.Name
	var written *networkingv1.IPAddress
	if have != nil {
		left = slices.DeleteFunc(servicesOf(have), func(n svc.Name) bool { return n == name })
	}
	switch {
	case have == nil || len(left) == len(servicesOf(have)): // it was never written
	case len(left) > 0:
		change := have.DeepCopy()
		change.Annotations[ServicesAnnotation] = listed(left)
		written, err = api.Update(ctx, change, metav1.UpdateOptions{})
	default:
		err = api.Delete(ctx, have.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &have.UID, ResourceVersion: &have.ResourceVersion}})
	}
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err) && written != nil:
		return false, c.learn(ctx, addr, name)
	case err != nil && !apierrors.IsNotFound(err):
		return false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case written != nil && err == nil:
		c.keepClaim(addr, written)
	case len(left) == 0 && c.claims[addr] == have:
		delete(c.claims, addr)
	}
	c.alloc.Release(addr, name)
	c.freed = true
	signal(c.wake)
	signal(c.tidy)
	return true, nil
}
