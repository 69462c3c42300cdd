package controller

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// A Service gets an address, has an Event of it, and gives it back (behaviours 87, 97, 177).
func TestLifeOfALoadBalancer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.withPools("192.0.2.0/30,2001:db8::/64")
	r.service("one")
	r.wants("one", "192.0.2.0")
	r.wantEvent("one", "EnsuringLoadBalancer", "Ensuring load balancer")
	r.wantEvent("one", "EnsuredLoadBalancer", "Ensured load balancer: 192.0.2.0 of pool a")
	r.service("two", func(s *corev1.Service) { s.Spec.AllocateLoadBalancerNodePorts = new(false) })
	r.wants("two", "192.0.2.1")
	if s := r.get("two"); s.Spec.Ports[0].NodePort != 0 {
		t.Errorf("node port %d", s.Spec.Ports[0].NodePort)
	}
	r.wantPool("a", func(p *v1.IPAddressPool) bool {
		return p.Status.IPv4 != nil && *p.Status.IPv4 == v1.PoolUsage{Total: 4, Free: 2, Used: 2} &&
			p.Status.IPv6.Free == v1.MaxCount && p.Status.Total == v1.MaxCount && p.Status.Used == 2
	})
	r.delete("one")
	r.wantClaims(map[string]string{"192.0.2.1": "default/two"})
	r.wantEvent("one", "DeletedLoadBalancer", "Deleted load balancer")
	r.eventually("one goes", func() error {
		_, err := r.client.CoreV1().Services("default").Get(context.Background(), "one", metav1.GetOptions{})
		if err == nil {
			return context.DeadlineExceeded
		}
		return nil
	})
}
