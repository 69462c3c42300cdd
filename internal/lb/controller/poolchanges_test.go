package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

func TestExhaustedPool(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withPools("192.0.2.0/31")
	r.service("one")
	r.service("two")
	r.wants("one", "192.0.2.0")
	r.wants("two", "192.0.2.1")
	r.service("z-older")
	r.wantEvent("z-older", "AddressPoolExhausted", "no IPv4 address is free in pool a (0 free of 2)")
	// A creation timestamp has seconds.
	older := r.get("z-older").CreationTimestamp.Time
	r.eventually("a second passes", func() error {
		if time.Now().Before(older.Add(1100 * time.Millisecond)) {
			return context.DeadlineExceeded
		}
		return nil
	})
	r.service("a-newer")
	r.wantEvent("a-newer", "AddressPoolExhausted", "no IPv4 address is free")
	r.delete("one")
	r.wants("z-older", "192.0.2.0")
	r.wants("a-newer", "")
	// A larger pool serves the others.
	r.makePool("b", v1.IPAddressPoolSpec{Addresses: []string{"198.51.100.0/30"}})
	r.wants("a-newer", "198.51.100.0")
}

func TestPoolsChange(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	stop := r.withPools("192.0.2.0/31")
	r.service("one")
	r.wants("one", "192.0.2.0")
	stop()
	stop = r.withPools("198.51.100.0/31")
	r.wantEvent("one", "AddressOutsidePools", "192.0.2.0 is in no pool any more")
	r.wants("one", "192.0.2.0")
	r.service("two")
	r.wants("two", "198.51.100.0")
	r.change("one", annotate(dialect.LBPool, "a"))
	r.wants("one", "198.51.100.1")
	// The pool of a flag is put back; without the flag it goes when it is not used.
	r.eventually("change the pool", func() error {
		p, err := r.lb.Pools.Get(context.Background(), "a", metav1.GetOptions{})
		if err == nil {
			p.Spec.Addresses = []string{"203.0.113.0/24"}
			_, err = r.lb.Pools.Update(context.Background(), p, metav1.UpdateOptions{})
		}
		return err
	})
	r.wantPool("a", func(p *v1.IPAddressPool) bool { return p.Spec.Addresses[0] == "198.51.100.0-198.51.100.1" })
	stop()
	r.withPools()
	r.wantPool("a", func(p *v1.IPAddressPool) bool { return !p.Spec.IsAutoAssign() })
	r.delete("one")
	r.delete("two")
	r.eventually("the pool goes", func() error {
		_, err := r.lb.Pools.Get(context.Background(), "a", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
}

func TestWrongPools(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx := context.Background()
	node, err := r.client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"},
		Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.3.0/24"}}}, metav1.CreateOptions{})
	r.must(err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.51.100.0"}}
	_, err = r.client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	r.must(err)
	r.withPools("192.0.2.0/30")
	r.wantPool("a", func(*v1.IPAddressPool) bool { return true })
	for name, addresses := range map[string]string{"later": "192.0.2.2-192.0.2.5", "services": "10.96.0.0/16", "pods": "10.244.0.0/16",
		"nodes": "198.51.100.0/30", "loopback": "127.0.0.0/8"} {
		r.makePool(name, v1.IPAddressPoolSpec{Addresses: []string{addresses}})
	}
	condition := func(kind, status, reason, message string) func(*v1.IPAddressPool) bool {
		return func(p *v1.IPAddressPool) bool {
			return slices.ContainsFunc(p.Status.Conditions, func(c metav1.Condition) bool {
				return c.Type == kind && string(c.Status) == status && c.Reason == reason && strings.Contains(c.Message, message)
			})
		}
	}
	r.wantPool("later", condition(v1.PoolOverlap, "True", "OverlapsPool", "pool a"))
	r.wantPool("later", func(p *v1.IPAddressPool) bool { return p.Status.Total == 2 })
	r.wantPool("nodes", condition(v1.PoolOverlap, "True", "HasNodeAddresses", "198.51.100.0"))
	r.wantPool("nodes", func(p *v1.IPAddressPool) bool { return p.Status.Total == 4 && p.Status.Free == 3 })
	r.wantPool("services", condition(v1.PoolReady, "False", "OverlapsClusterRange", "of Services"))
	r.wantPool("pods", condition(v1.PoolReady, "False", "OverlapsClusterRange", "of Pods"))
	r.wantPool("loopback", condition(v1.PoolReady, "False", "InvalidAddresses", "loopback"))
	r.wantPool("a", condition(v1.PoolReady, "True", "Ready", ""))
	r.wantEvent("later", "OverlapsPool", "is older")
	r.service("one", annotate(dialect.LBPool, "nodes"))
	r.wants("one", "198.51.100.1")
	r.service("two", annotate(dialect.LBPool, "services"))
	r.wantEvent("two", "AddressPoolNotAllowed", "it cannot be used: 10.96.0.0/16 overlaps the range")
	// Another client's claim is respected, and when it goes the address is found free by the
	// next term.
	_, err = r.client.NetworkingV1().IPAddresses().Create(ctx, &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: "198.51.100.2"},
		Spec:       networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "machines", Name: "printer"}},
	}, metav1.CreateOptions{})
	r.must(err)
	r.service("three", annotate(dialect.LBAddresses, "198.51.100.2"))
	r.wantEvent("three", "AddressTaken", "198.51.100.2 is used by machines printer")
	r.service("four", annotate(dialect.LBPool, "nodes"))
	r.wants("four", "198.51.100.3")
}

func TestSelectionOfPools(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx := context.Background()
	r.makeNamespace(ctx, "shop", map[string]string{"team": "shop"})
	r.withPools()
	labels := func(k, v string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{k: v}}
	}
	for name, spec := range map[string]v1.IPAddressPoolSpec{
		"byname":   {Addresses: []string{"192.0.2.0/28"}, Namespaces: []string{"default"}, ServiceSelector: labels("tier", "web"), Priority: 5},
		"bylabel":  {Addresses: []string{"192.0.3.0/28"}, NamespaceSelector: labels("team", "shop")},
		"internal": {Addresses: []string{"192.0.4.0/28"}, Internal: true},
		"manual":   {Addresses: []string{"192.0.5.0/28"}, AutoAssign: new(false)},
		"low": {Addresses: []string{"192.0.6.1-192.0.6.9", "192.0.7.0/24"}, Priority: -1, AvoidBuggyIPs: true,
			Namespaces: []string{"default"}},
	} {
		r.makePool(name, spec)
		r.wantPool(name, func(p *v1.IPAddressPool) bool { return len(p.Status.Conditions) > 0 })
	}
	r.service("plain")
	r.wants("plain", "192.0.6.1")
	r.service("web", func(s *corev1.Service) { s.Labels = map[string]string{"tier": "web"} })
	r.wants("web", "192.0.2.0")
	r.service("inside", annotate("service.beta.kubernetes.io/azure-load-balancer-internal", "true"))
	r.wants("inside", "192.0.4.0")
	r.mistypedInternal()
	r.service("named", annotate(dialect.LBPool, "manual"))
	r.wants("named", "192.0.5.0")
	r.service("asks", annotate(dialect.LBAddresses, "192.0.5.9"))
	r.wants("asks", "192.0.5.9")
	r.service("buggy", annotate(dialect.LBAddresses, "192.0.7.255"))
	r.wantEvent("buggy", "AddressNotInPool", "192.0.7.255 is in no pool")
	r.service("notmine", annotate(dialect.LBAddresses, "192.0.3.1"))
	r.wantEvent("notmine", "AddressPoolNotAllowed", "192.0.3.1 is of pool bylabel, which is not for this Service")
	r.service("cart", func(s *corev1.Service) { s.Namespace = "shop" })
	r.eventually("an address in another namespace", func() error {
		s, err := r.client.CoreV1().Services("shop").Get(ctx, "cart", metav1.GetOptions{})
		if err == nil && published(s) != "192.0.3.0" {
			err = fmt.Errorf("%q", published(s))
		}
		return err
	})
}

func (r *rig) makeNamespace(ctx context.Context, name string, labels map[string]string) {
	r.Helper()
	_, err := r.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}},
		metav1.CreateOptions{})
	r.must(err)
}

// mistypedInternal expects that a Service whose annotation for an internal load balancer is mistyped gets no address until it
// is right, and that one that has an address keeps it.
func (r *rig) mistypedInternal() {
	r.Helper()
	const azure = "service.beta.kubernetes.io/azure-load-balancer-internal"
	internal := func(key, value string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Annotations = map[string]string{key: value} }
	}
	r.service("value", internal(azure, "Inernal"))
	r.service("key", internal("service.beta.kubernetes.io/azure-load-balancer-interna", "true"))
	r.wantEvent("value", string(invalidRequest), azure+`: "Inernal" is not one of true, false`)
	r.wantEvent("key", string(invalidRequest), "azure-load-balancer-interna is unknown; is "+azure+" (true, false) meant?")
	for _, name := range []string{"value", "key"} {
		r.wants(name, "")
	}
	r.change("value", internal(azure, "true"))
	r.wants("value", "192.0.4.1")
	r.change("value", internal(azure, "privat"))
	r.wantEvent("value", string(invalidRequest), `"privat" is not one of`)
	r.wants("value", "192.0.4.1")
	r.change("key", internal(azure, "false"))
	r.wants("key", "192.0.6.2")
}
