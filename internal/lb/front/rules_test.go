package front

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A Service of type nlb has the rules of a Network Load Balancer on each node, in both ways, for the addresses that are its own:
// an address of its status that was not claimed for it has none. A wrong value keeps the last ones (behaviour 141).
func TestRulesOfServices(t *testing.T) {
	const nlb, proxy = "service.beta.kubernetes.io/aws-load-balancer-type", "fairlead.dev/lb-proxy-protocol"
	f := New(Options{NodeName: "n1"})
	name := svc.Name{Namespace: "default", Name: "web"}
	f.nodes.known = map[string]*node{
		"n1": {addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, pods: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")}},
		"n2": {addrs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}},
	}
	for _, a := range []string{"192.0.2.1", "192.0.2.3"} {
		f.SetClaim(netip.MustParseAddr(a), []svc.Name{name})
	}
	for _, c := range []struct {
		what        string
		annotations map[string]string
		ranges      []string
		mode        corev1.LoadBalancerIPMode
		class       string
		local       bool
		want        string
	}{
		{what: "none", want: "[]"},
		{what: "direct", annotations: map[string]string{nlb: "nlb"}, ranges: []string{"203.0.113.0/24"},
			want: "[{default/web [203.0.113.0/24] [{TCP 192.0.2.1:80}] [192.0.2.1] [{TCP 30080}] []}]"},
		{what: "a wrong value", annotations: map[string]string{nlb: "alb"}, local: true,
			want: "[{default/web [203.0.113.0/24] [{TCP 192.0.2.1:80}] [192.0.2.1] [{TCP 30080}] [30999]}]"},
		{what: "another class", annotations: map[string]string{nlb: "nlb"}, class: "example.com/lb", want: "[]"},
		{what: "proxied", annotations: map[string]string{nlb: "nlb", proxy: "v2"}, mode: corev1.LoadBalancerIPModeProxy,
			want: "[{default/web [] [{TCP 192.0.2.1:80}] [192.0.2.1] [{TCP 30080}] []}]"},
		{what: "classic", annotations: map[string]string{proxy: "v2"}, mode: corev1.LoadBalancerIPModeProxy, want: "[]"},
	} {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: c.annotations}}
		o.Spec.Type, o.Spec.LoadBalancerSourceRanges, o.Spec.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, c.ranges, 30999
		o.Spec.Ports = []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}}
		if c.local {
			o.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}
		if c.class != "" {
			o.Spec.LoadBalancerClass = &c.class
		}
		mode := c.mode
		if mode == "" {
			mode = corev1.LoadBalancerIPModeVIP
		}
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1", IPMode: &mode}, {IP: "192.0.2.2", IPMode: &mode}}
		f.SetService(o)
		if got := fmt.Sprint(f.rules.groupsLocked(f.claims)); got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
	}
	if got := fmt.Sprint(f.nodes.networks()); got != "[10.0.0.1/32 10.1.0.0/24 10.0.0.2/32]" {
		t.Errorf("Nodes and Pods: %s", got)
	}
	f.SetClaim(netip.MustParseAddr("192.0.2.1"), nil)
	f.SetService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: map[string]string{nlb: "nlb"}}})
	if got := f.rules.groupsLocked(f.claims); len(got) != 0 {
		t.Errorf("without an address: %v", got)
	}
	f.DropService(name)
	if len(f.rules.services) != 0 {
		t.Error("it stays when its Service is gone")
	}
}

// Clients of a Service without rules that shares an address keep path MTU discovery, which is not of a port.
func TestRulesOfSharedAddress(t *testing.T) {
	f := New(Options{})
	a := netip.MustParseAddr("192.0.2.1")
	web, plain := svc.Name{Namespace: "default", Name: "web"}, svc.Name{Namespace: "default", Name: "plain"}
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	o.Spec.Ports = []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}}
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: a.String()}}
	f.rules.services[web] = &ruledService{object: o}
	for _, c := range []struct {
		claims []svc.Name
		limits int
	}{{[]svc.Name{web}, 1}, {[]svc.Name{web, plain}, 0}} {
		f.SetClaim(a, c.claims)
		if got := f.rules.groupsLocked(f.claims); len(got) != 1 || len(got[0].Listeners) != 1 || len(got[0].PathMTU) != c.limits {
			t.Errorf("claimed for %v: %v", c.claims, got)
		}
	}
}

// After a restart the rules of the process before stay until everything has been listed, and are not looked at when nothing has
// changed.
func TestRulesWaitForLists(t *testing.T) {
	n := testbed.NewNetwork(t)
	host := n.Host("node")
	listed := false
	f := New(Options{Listed: func() bool { return listed }})
	host.Do(func() {
		earlier := filter.NewGroups(func() {})
		if err := errors.Join(earlier.Set(nil, []filter.Group{{Name: "default/web"}}), earlier.Close()); err != nil {
			t.Fatal(err)
		}
		for _, want := range []bool{true, false} {
			f.applyRules()
			out, err := host.Command(t.Context(), "nft", "list", "tables").CombinedOutput()
			if err != nil || strings.Contains(string(out), "fairlead-lb-rules") != want || f.rules.dirty.Load() != want {
				t.Errorf("listed %t: %v %s", listed, err, out)
			}
			listed = true
		}
	})
}
