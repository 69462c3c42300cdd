package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/dialect"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

func class(name string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.LoadBalancerClass = &name }
}

func families(policy corev1.IPFamilyPolicy, list ...corev1.IPFamily) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = &policy, list }
}

// noLoadBalancer changes a Service to another type.
func noLoadBalancer(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }

// The classes of others are none of ours, whatever their status shows; without a
// class it depends on the default.
func TestClasses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, stop := r.run(func(o *Options) { o.Default, o.Pools = false, r.flagPools("192.0.2.0/28") })
	r.service("theirs", class("example.com/lb"))
	r.setStatus("theirs", `[{"ip":"192.0.2.0","ipMode":"VIP"}]`)
	r.service("ours", class(svc.LoadBalancerClass))
	r.service("none")
	r.wants("ours", "192.0.2.0")
	untouched := func(name, want string) {
		t.Helper()
		if s := r.get(name); published(s) != want || len(s.Finalizers) > 0 {
			t.Errorf("%s: %q with finalizers %q", name, published(s), s.Finalizers)
		}
	}
	untouched("theirs", "192.0.2.0")
	untouched("none", "")
	stop()
	r.withPools("192.0.2.0/28")
	r.wants("none", "192.0.2.1")
	untouched("theirs", "192.0.2.0")
	// What another one has published and no pool has is left alone.
	r.service("foreign", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP })
	r.change("foreign", func(s *corev1.Service) { s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeLoadBalancer, nil })
	r.wants("foreign", "192.0.2.2")
}

// The finalizer has the name that clouds use: theirs is left to them, when the Service is
// deleted and when it becomes one of another type.
func TestFinalizerOfACloud(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, name := range []string{"deleted", "changed"} {
		r.service(name, func(s *corev1.Service) { s.Finalizers = []string{finalizer} })
		r.setStatus(name, `[{"hostname":"lb.example.com"}]`)
	}
	r.withPools("192.0.2.0/28")
	for _, name := range []string{"deleted", "changed"} {
		r.wantEvent(name, "AddressOutsidePools", "lb.example.com")
	}
	r.delete("deleted")
	r.change("changed", noLoadBalancer)
	r.service("later") // is handled after the others
	r.wants("later", "192.0.2.0")
	for _, name := range []string{"deleted", "changed"} {
		if s := r.get(name); !slices.Contains(s.Finalizers, finalizer) {
			t.Errorf("%s has finalizers %q", name, s.Finalizers)
		}
	}
}

// Addresses that are asked for, in any of the spellings, and what is said when they
// cannot be had (behaviour 99).
func TestAskedAddresses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withPools("192.0.2.0/28,2001:db8::/64", "198.51.100.0/29")
	r.service("field", func(s *corev1.Service) { s.Spec.LoadBalancerIP = "192.0.2.9" })
	r.wants("field", "192.0.2.9")
	r.service("two", annotate(dialect.LBAddresses, "2001:db8::7,192.0.2.7"),
		families(corev1.IPFamilyPolicyRequireDualStack, corev1.IPv4Protocol, corev1.IPv6Protocol))
	r.wants("two", "192.0.2.7 2001:db8::7")
	r.service("metallb", annotate("metallb.universe.tf/loadBalancerIPs", "192.0.2.8"))
	r.wants("metallb", "192.0.2.8")
	r.service("pool", annotate("metallb.io/address-pool", "b"))
	r.wants("pool", "198.51.100.0")
	r.service("taken", annotate(dialect.LBAddresses, "192.0.2.9"))
	r.wantEvent("taken", "AddressTaken", "192.0.2.9 is used by Service default/field")
	r.service("outside", annotate(dialect.LBAddresses, "203.0.113.1"))
	r.wantEvent("outside", "AddressNotInPool", "203.0.113.1 is in no pool; the pools of IPv4 addresses are a, b")
	r.service("nopool", annotate(dialect.LBPool, "c"))
	r.wantEvent("nopool", "AddressPoolNotAllowed", `the Service names the pool "c": there is no such pool`)
	r.service("wrong", annotate(dialect.LBAddresses, "web"))
	r.wantEvent("wrong", "InvalidLoadBalancerRequest", `"web" is not an IP address`)
	r.service("family", annotate(dialect.LBAddresses, "2001:db8::1"))
	r.wantEvent("family", "InvalidLoadBalancerRequest", "has no IPv6 among its spec.ipFamilies")
	for _, name := range []string{"taken", "outside", "nopool", "wrong", "family"} {
		r.wants(name, "")
	}
	// An address that becomes free is given at once, and one that is asked for later is
	// moved to; what cannot be had changes nothing.
	r.delete("field")
	r.wants("taken", "192.0.2.9")
	r.change("taken", annotate(dialect.LBAddresses, "192.0.2.7"))
	r.wantEvent("taken", "AddressTaken", "192.0.2.7 is used by Service default/two")
	r.wants("taken", "192.0.2.9")
	r.change("taken", annotate(dialect.LBAddresses, "192.0.2.3"))
	r.wants("taken", "192.0.2.3")
	r.change("pool", annotate("metallb.io/address-pool", "a"))
	r.wants("pool", "192.0.2.0")
	r.change("wrong", annotate(dialect.LBAddresses, ""))
	r.wants("wrong", "192.0.2.1")
}

// Who waits is served as soon as an address is free, the oldest first.
// Services that share an address (with a key, different ports, and the same nodes).
func TestSharedAddress(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withPools("192.0.2.0/28")
	port := func(n int32, protocol corev1.Protocol) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.Ports = []corev1.ServicePort{{Port: n, Protocol: protocol}} }
	}
	key := annotate(dialect.LBSharingKey, "dns")
	r.service("udp", key, port(53, corev1.ProtocolUDP))
	r.wants("udp", "192.0.2.0")
	r.service("tcp", annotate("metallb.io/allow-shared-ip", "dns"), port(53, corev1.ProtocolTCP))
	r.wants("tcp", "192.0.2.0")
	r.wantClaims(map[string]string{"192.0.2.0": "default/udp,default/tcp"})
	r.service("same", key, port(53, corev1.ProtocolTCP))
	r.wants("same", "192.0.2.1")
	r.delete("udp")
	r.wantClaims(map[string]string{"192.0.2.0": "default/tcp", "192.0.2.1": "default/same"})
	r.service("web", key, port(80, corev1.ProtocolTCP))
	r.wants("web", "192.0.2.0")
	// Who takes another one's port has to leave.
	r.change("web", func(s *corev1.Service) { s.Spec.Ports[0].Port = 53 })
	r.wants("web", "192.0.2.2")
	r.wants("tcp", "192.0.2.0")
}

// Both families, one of them, or none (behaviours 82 to 84 for load balancers).
func TestFamilies(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withPools("192.0.2.0/30")
	four, six := corev1.IPv4Protocol, corev1.IPv6Protocol
	r.service("prefer", families(corev1.IPFamilyPolicyPreferDualStack, six, four))
	r.wants("prefer", "192.0.2.0")
	r.service("require", families(corev1.IPFamilyPolicyRequireDualStack, four, six))
	r.wantEvent("require", "NoAddressPool", "no pool gives IPv6 addresses to this Service; there is no pool of IPv6 addresses")
	r.wants("require", "")
	r.makePool("six", v1.IPAddressPoolSpec{Addresses: []string{"2001:db8::/64"}})
	r.eventually("both", func() error {
		if got := published(r.get("require")); got != "192.0.2.1 2001:db8::" && got != "192.0.2.1 2001:db8::1" {
			return fmt.Errorf("%q", got)
		}
		if got := published(r.get("prefer")); !strings.HasPrefix(got, "2001:db8::") || !strings.HasSuffix(got, " 192.0.2.0") {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	// A family that the Service loses is released.
	r.change("require", families(corev1.IPFamilyPolicySingleStack, four))
	r.wants("require", "192.0.2.1")
}

// Addresses stay the same through restarts and changes of pools; what happened while
// no controller ran is made up for.
func TestRestart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	stop := r.withPools("192.0.2.0/28")
	for i, name := range []string{"stays", "deleted", "changed", "lost"} {
		r.service(name)
		r.wants(name, fmt.Sprintf("192.0.2.%d", i))
	}
	stop()
	r.delete("deleted")
	r.change("changed", noLoadBalancer)
	ctx := context.Background()
	r.must(r.client.NetworkingV1().IPAddresses().Delete(ctx, "192.0.2.3", metav1.DeleteOptions{}))
	_, err := r.client.NetworkingV1().IPAddresses().Create(ctx, &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: "192.0.2.9", Labels: map[string]string{networkingv1.LabelManagedBy: svc.AddressManager},
			Annotations: map[string]string{svc.ClaimServicesAnnotation: "default/never"}},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: "default", Name: "never"}},
	}, metav1.CreateOptions{})
	r.must(err)
	r.service("new")
	r.service("adopted")
	r.setStatus("adopted", `[{"ip":"192.0.2.7"}]`)
	r.service("copied")
	r.setStatus("copied", `[{"ip":"192.0.2.0"}]`) // another one has it
	r.service("elsewhere")
	r.setStatus("elsewhere", `[{"ip":"203.0.113.9"}]`)
	r.withPools("192.0.2.0/28")
	r.wants("stays", "192.0.2.0")
	r.wants("lost", "192.0.2.3")
	r.wants("adopted", "192.0.2.7")
	r.eventually("deleted goes", func() error {
		_, err := r.client.CoreV1().Services("default").Get(ctx, "deleted", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
	r.wants("changed", "")
	r.eventually("the finalizer of changed goes", func() error {
		if f := r.get("changed").Finalizers; len(f) > 0 {
			return fmt.Errorf("%q", f)
		}
		return nil
	})
	r.wantEvent("elsewhere", "AddressOutsidePools", "status.loadBalancer has 203.0.113.9")
	if got := published(r.get("elsewhere")); got != "203.0.113.9" {
		t.Errorf("another controller's status became %q", got)
	}
	r.eventually("claims", func() error {
		claims := r.claims()
		if len(claims) != 5 || claims["192.0.2.9"] != "" && strings.Contains(claims["192.0.2.9"], "never") {
			return fmt.Errorf("%v", claims)
		}
		return nil
	})
	if a, b := published(r.get("copied")), published(r.get("new")); a == b || a == "192.0.2.0" || a == "" {
		t.Errorf("copied has %q and new %q", a, b)
	}
}

// An address that pools have no more stays until it is moved.
// Pools that cannot be used as they are say so, and give out what they can.
// Which pools a Service may have addresses of.
// Two controllers that both believe to be the leader never give one address to two
// Services, at no time, and agree in the end.
func TestTwoControllersAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for range 2 {
		r.run(func(o *Options) { o.Pools = r.flagPools("192.0.2.0-192.0.2.39") })
	}
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() {
		for ctx.Err() == nil {
			list, err := r.client.CoreV1().Services("default").List(ctx, metav1.ListOptions{})
			if err != nil {
				continue
			}
			has := map[string]string{}
			for i := range list.Items {
				for _, ing := range list.Items[i].Status.LoadBalancer.Ingress {
					if other := has[ing.IP]; other != "" {
						t.Errorf("%s is of %s and of %s", ing.IP, other, list.Items[i].Name)
					}
					has[ing.IP] = list.Items[i].Name
				}
			}
		}
	})
	var making sync.WaitGroup
	for i := range 4 {
		making.Go(func() {
			for j := range 10 {
				name := fmt.Sprintf("s%d-%d", i, j)
				s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}}
				s.Spec.Type, s.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: 80}}
				api := r.client.CoreV1().Services("default")
				if _, err := api.Create(ctx, s, metav1.CreateOptions{}); err != nil {
					t.Errorf("create: %v", err)
				}
				if j%3 == 2 {
					if err := api.Delete(ctx, fmt.Sprintf("s%d-%d", i, j-1), metav1.DeleteOptions{}); err != nil {
						t.Errorf("delete: %v", err)
					}
				}
			}
		})
	}
	making.Wait()
	r.eventually("agreement", func() error {
		list, err := r.client.CoreV1().Services("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		claims, published := r.claims(), 0
		for i := range list.Items {
			s := &list.Items[i]
			if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
				continue
			}
			published++
			if n := len(s.Status.LoadBalancer.Ingress); n != 1 || s.DeletionTimestamp != nil {
				return fmt.Errorf("%s has %d addresses", s.Name, n)
			}
			if ip := s.Status.LoadBalancer.Ingress[0].IP; claims[ip] != "default/"+s.Name {
				return fmt.Errorf("%s has %s, which is claimed for %q", s.Name, ip, claims[ip])
			}
		}
		if published != 28 || len(claims) != 28 {
			return fmt.Errorf("%d Services, %d claims", published, len(claims))
		}
		return nil
	})
}

// Who deletes a Service and makes it again under its name gets an address like any
// other, and its finalizer is of the new one.
func TestRecreated(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withPools("192.0.2.0/31")
	for range 5 {
		r.service("one")
		r.eventually("an address", func() error {
			if published(r.get("one")) == "" {
				return context.DeadlineExceeded
			}
			return nil
		})
		r.delete("one")
		r.eventually("it goes", func() error {
			_, err := r.client.CoreV1().Services("default").Get(context.Background(), "one", metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("%v", err)
			}
			return nil
		})
	}
	r.wantClaims(map[string]string{})
	// A status that another client empties is written again.
	r.service("two")
	r.eventually("an address", func() error {
		if published(r.get("two")) == "" {
			return context.DeadlineExceeded
		}
		return nil
	})
	had := published(r.get("two"))
	_, err := r.client.CoreV1().Services("default").Patch(context.Background(), "two", types.MergePatchType,
		[]byte(`{"status":{"loadBalancer":{"ingress":null}}}`), metav1.PatchOptions{}, "status")
	r.must(err)
	r.wants("two", had)
}
