package service

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/svc"
)

// behaviours 14, 160: a cluster IP of the range is allocated and claimed, and freed
// with the Service.
func TestClusterIPLifecycle(t *testing.T) {
	s := start(t)
	out := s.mustCreate(service("web"))
	ip := out.Spec.ClusterIP
	if a := netip.MustParseAddr(ip); !v4Range.Contains(a) || !slices.Equal(out.Spec.ClusterIPs, []string{ip}) {
		t.Errorf("cluster IPs %q %v", ip, out.Spec.ClusterIPs)
	}
	if !slices.Equal(out.Spec.IPFamilies, []corev1.IPFamily{corev1.IPv4Protocol}) || familyPolicy(out) != corev1.IPFamilyPolicySingleStack {
		t.Errorf("families %v %v", out.Spec.IPFamilies, familyPolicy(out))
	}
	s.wantClaims(ip + "=default/web")
	obj, err := s.net.IPAddress.Get(ctxIn(""), ip, &metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if l := obj.(*networkingv1.IPAddress).Labels; l["ipaddress.kubernetes.io/ip-family"] != "IPv4" ||
		l["ipaddress.kubernetes.io/managed-by"] == "" {
		t.Errorf("labels %v", l)
	}

	// behaviour 66: taken is a 422 with the field.
	_, err = s.create(service("other", func(s *corev1.Service) { s.Spec.ClusterIP = ip }))
	if want := fmt.Sprintf(`Service "other" is invalid: spec.clusterIPs: Invalid value: ["%s"]: `+
		`failed to allocate IP %s: provided IP is already allocated`, ip, ip); !apierrors.IsInvalid(err) || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	_, err = s.create(service("other", func(s *corev1.Service) { s.Spec.ClusterIP = "192.0.2.1" }))
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "The range of valid IPs is 10.96.0.0/16") {
		t.Error(err)
	}

	s.delete("web")
	s.wantClaims()
	s.mustCreate(service("other", func(s *corev1.Service) { s.Spec.ClusterIP = ip }))
	s.wantClaims(ip + "=default/other")
}

// Whatever goes wrong after the claim, nothing stays allocated.
func TestFailedAndDryRunsLeaveNothing(t *testing.T) {
	s := start(t)
	lb := service("lb", ofType(corev1.ServiceTypeLoadBalancer), func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "b", Port: 81})
		s.Spec.Ports[0].Name = "a"
	})
	SetDefaults(lb)
	dry, err := s.Service.Create(ctxIn("default"), lb.DeepCopy(), rest.ValidateAllObjectFunc, &metav1.CreateOptions{DryRun: []string{"All"}})
	if err != nil {
		t.Fatal(err)
	}
	d := dry.(*corev1.Service)
	if len(d.Spec.ClusterIPs) != 2 || d.Spec.HealthCheckNodePort == 0 || d.Spec.Ports[0].NodePort == 0 ||
		d.Spec.Ports[0].NodePort == d.Spec.Ports[1].NodePort {
		t.Errorf("a dry run shows what would be allocated, got %+v", d.Spec)
	}
	s.wantClaims()

	bad := lb.DeepCopy()
	bad.Spec.SessionAffinity = "Sometimes"
	if _, err := s.Service.Create(ctxIn("default"), bad, rest.ValidateAllObjectFunc, &metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Error(err)
	}
	s.wantClaims()

	refuse := errors.New("refused by admission")
	if _, err := s.Service.Create(ctxIn("default"), lb.DeepCopy(), func(context.Context, runtime.Object) error { return refuse },
		&metav1.CreateOptions{}); !errors.Is(err, refuse) {
		t.Error(err)
	}
	s.wantClaims()

	first := s.mustCreate(lb)
	before := s.claimed()
	if len(before) != 5 {
		t.Fatalf("two addresses, two node ports and a health check port make 5 claims, got %v", before)
	}
	if _, err := s.create(lb); !apierrors.IsAlreadyExists(err) {
		t.Error(err)
	}
	s.wantClaims(before...)

	// An update that fails keeps what was there and frees what it claimed.
	_, err = s.update("lb", func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "c", Port: 82})
		s.Spec.SessionAffinity = "Sometimes"
	})
	if !apierrors.IsInvalid(err) {
		t.Error(err)
	}
	s.wantClaims(before...)

	// So does one against an old resource version.
	stale := first.DeepCopy()
	if _, err := s.update("lb", func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} }); err != nil {
		t.Fatal(err)
	}
	stale.Spec.Ports = append(stale.Spec.Ports, corev1.ServicePort{Name: "c", Port: 82})
	SetDefaults(stale)
	if _, err := s.put(stale); !apierrors.IsConflict(err) {
		t.Error(err)
	}
	s.wantClaims(before...)

	// A dry run of a deletion frees nothing, the deletion everything.
	if _, _, err := s.Service.Delete(ctxIn("default"), "lb", rest.ValidateAllObjectFunc,
		&metav1.DeleteOptions{DryRun: []string{"All"}}); err != nil {
		t.Fatal(err)
	}
	s.wantClaims(before...)
	s.delete("lb")
	s.wantClaims()
}

// behaviours 92, 94: node ports.
func TestNodePorts(t *testing.T) {
	s := start(t)
	// One number for TCP and UDP of one port.
	out := s.mustCreate(service("dns", ofType(corev1.ServiceTypeNodePort), func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{
			{Name: "udp", Port: 53, Protocol: "UDP"}, {Name: "tcp", Port: 53, Protocol: "TCP"}, {Name: "web", Port: 80, NodePort: 30007},
		}
	}))
	p := out.Spec.Ports
	if p[0].NodePort == 0 || p[0].NodePort != p[1].NodePort || p[2].NodePort != 30007 || p[0].NodePort == 30007 {
		t.Errorf("node ports %v", p)
	}
	if !allPorts.Contains(uint16(p[0].NodePort)) {
		t.Errorf("%d is out of range", p[0].NodePort)
	}
	s.wantClaims(out.Spec.ClusterIP+"=default/dns", fmt.Sprintf("%d=default/dns", p[0].NodePort), "30007=default/dns")

	_, err := s.create(service("b", ofType(corev1.ServiceTypeNodePort), func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30007 }))
	if want := `Service "b" is invalid: spec.ports[0].nodePort: Invalid value: 30007: provided port is already allocated`; err == nil ||
		err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
	_, err = s.create(service("b", ofType(corev1.ServiceTypeNodePort), func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 80 }))
	if want := `Service "b" is invalid: spec.ports[0].nodePort: Invalid value: 80: ` +
		`provided port is not in the valid range. The range of valid ports is 30000-32767`; err == nil || err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
	// The same number for two ports of one Service.
	_, err = s.create(service("b", ofType(corev1.ServiceTypeNodePort), func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 1, NodePort: 30100}, {Name: "b", Port: 2, NodePort: 30100}}
	}))
	if err == nil || !strings.Contains(err.Error(), "spec.ports[1].nodePort: Invalid value: 30100: provided port is already allocated") {
		t.Error(err)
	}

	// Applying the manifest again changes nothing.
	again := service("dns", ofType(corev1.ServiceTypeNodePort), func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{
			{Name: "udp", Port: 53, Protocol: "UDP"}, {Name: "tcp", Port: 53, Protocol: "TCP"}, {Name: "web", Port: 80},
		}
	})
	SetDefaults(again)
	got, err := s.put(again)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Spec.Ports, p) || got.Spec.ClusterIP != out.Spec.ClusterIP || got.ResourceVersion != out.ResourceVersion {
		t.Errorf("allocated fields changed: %+v", got.Spec)
	}

	// Moving a port number keeps the node port by name; dropping one frees it.
	_, err = s.update("dns", func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[2:]; s.Spec.Ports[0].Port = 81 })
	if err != nil {
		t.Fatal(err)
	}
	s.wantClaims(out.Spec.ClusterIP+"=default/dns", "30007=default/dns")

	// And changing the node port swaps the claim.
	if _, err = s.update("dns", func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30008 }); err != nil {
		t.Fatal(err)
	}
	s.wantClaims(out.Spec.ClusterIP+"=default/dns", "30008=default/dns")
}

// behaviour 66: exhaustion is a 500 with the range.
func TestExhaustion(t *testing.T) {
	s := start(t, func(o *Options) {
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/30")}
		o.NodePorts = svc.PortRange{First: 30000, Last: 30000}
	})
	s.mustCreate(service("a", ofType(corev1.ServiceTypeNodePort)))
	_, err := s.create(service("b", ofType(corev1.ServiceTypeNodePort)))
	if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "failed to allocate a nodePort: range is full: 30000-30000") {
		t.Error(err)
	}
	if n := len(s.claimed()); n != 2 {
		t.Errorf("%d claims after a failure, want 2", n)
	}
	s.mustCreate(service("b"))
	_, err = s.create(service("c"))
	if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "failed to allocate a serviceIP: range is full: 10.0.0.0/30") {
		t.Error(err)
	}
	s.delete("a")
	eventually(t, func() string {
		if _, err := s.create(service("c")); err != nil {
			return err.Error()
		}
		return ""
	})
}

// The transitions between the types and what each keeps, frees and refuses.
func TestTransitions(t *testing.T) {
	s := start(t)
	ip := s.mustCreate(service("x")).Spec.ClusterIP
	step := func(what string, f func(*corev1.Service), check func(*corev1.Service) bool, claims ...string) {
		t.Helper()
		got, err := s.update("x", f)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if !check(got) {
			t.Errorf("%s: got %+v", what, got.Spec)
		}
		for i := range claims {
			if claims[i] == "nodeport" {
				claims[i] = fmt.Sprint(got.Spec.Ports[0].NodePort)
			} else if claims[i] == "health" {
				claims[i] = fmt.Sprint(got.Spec.HealthCheckNodePort)
			}
			claims[i] += "=default/x"
		}
		s.wantClaims(claims...)
	}
	step("to NodePort", ofType(corev1.ServiceTypeNodePort), func(s *corev1.Service) bool {
		return s.Spec.ClusterIP == ip && s.Spec.Ports[0].NodePort != 0 && s.Spec.ExternalTrafficPolicy == "Cluster"
	}, ip, "nodeport")
	np := s.get("x").Spec.Ports[0].NodePort
	step("to LoadBalancer", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, "Local"
	}, func(s *corev1.Service) bool {
		return s.Spec.ClusterIP == ip && s.Spec.Ports[0].NodePort == np && s.Spec.HealthCheckNodePort != 0 &&
			*s.Spec.AllocateLoadBalancerNodePorts
	}, ip, "nodeport", "health")
	if _, err := s.update("x", func(s *corev1.Service) { s.Spec.HealthCheckNodePort++ }); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "spec.healthCheckNodePort: Forbidden: field is immutable") {
		t.Error(err)
	}
	step("back to ClusterIP", ofType(corev1.ServiceTypeClusterIP), func(s *corev1.Service) bool {
		return s.Spec.ClusterIP == ip && s.Spec.Ports[0].NodePort == 0 && s.Spec.HealthCheckNodePort == 0 &&
			s.Spec.ExternalTrafficPolicy == "" && s.Spec.AllocateLoadBalancerNodePorts == nil
	}, ip)
	if _, err := s.update("x", func(s *corev1.Service) { s.Spec.ClusterIP = "10.96.9.9"; s.Spec.ClusterIPs = nil }); !apierrors.IsInvalid(
		err) || !strings.Contains(err.Error(), "may not change once set") {
		t.Error(err)
	}
	s.wantClaims(ip + "=default/x")
	step("to ExternalName", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "db.example.com"
	}, func(s *corev1.Service) bool {
		return s.Spec.ClusterIP == "" && s.Spec.ClusterIPs == nil && s.Spec.IPFamilies == nil && s.Spec.IPFamilyPolicy == nil
	})
	step("to headless", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName, s.Spec.ClusterIP = corev1.ServiceTypeClusterIP, "", "None"
	}, func(s *corev1.Service) bool { return allocator.IsHeadless(s) && len(s.Spec.IPFamilies) == 1 })
	if _, err := s.update("x", ofType(corev1.ServiceTypeNodePort)); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "may not be set to 'None' for NodePort services") {
		t.Error(err)
	}
	s.wantClaims()
	step("to ExternalName from headless", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "db.example.com"
	}, func(s *corev1.Service) bool { return s.Spec.ClusterIP == "" })
	// behaviour 153: later in the cluster.
	got, err := s.update("x", ofType(corev1.ServiceTypeLoadBalancer))
	if err != nil || got.Spec.ClusterIP == "" || got.Spec.Ports[0].NodePort == 0 {
		t.Fatal(err, got)
	}
	s.wantClaims(got.Spec.ClusterIP+"=default/x", fmt.Sprintf("%d=default/x", got.Spec.Ports[0].NodePort))
}

// Dual stack: policies, upgrade and downgrade.
func TestDualStack(t *testing.T) {
	s := start(t)
	policy := func(p corev1.IPFamilyPolicy) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.IPFamilyPolicy = &p }
	}
	for _, c := range []struct {
		name string
		f    func(*corev1.Service)
		want []corev1.IPFamily
	}{
		{"single", policy("SingleStack"), []corev1.IPFamily{"IPv4"}},
		{"prefer", policy("PreferDualStack"), []corev1.IPFamily{"IPv4", "IPv6"}},
		{"require", policy("RequireDualStack"), []corev1.IPFamily{"IPv4", "IPv6"}},
		{"v6", func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{"IPv6"} }, []corev1.IPFamily{"IPv6"}},
		{"v6first", func(s *corev1.Service) {
			s.Spec.IPFamilies = []corev1.IPFamily{"IPv6"}
			policy("RequireDualStack")(s)
		}, []corev1.IPFamily{"IPv6", "IPv4"}},
		{"byip", func(s *corev1.Service) { s.Spec.ClusterIP = "fd00:10:96::1234" }, []corev1.IPFamily{"IPv6"}},
		{"headless", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.Selector = "None", nil }, []corev1.IPFamily{"IPv4", "IPv6"}},
	} {
		out := s.mustCreate(service(c.name, c.f))
		if !slices.Equal(out.Spec.IPFamilies, c.want) {
			t.Errorf("%s: families %v, want %v", c.name, out.Spec.IPFamilies, c.want)
		}
		if !allocator.IsHeadless(out) {
			for i, ip := range out.Spec.ClusterIPs {
				if familyOf(ip) != c.want[i] {
					t.Errorf("%s: cluster IPs %v", c.name, out.Spec.ClusterIPs)
				}
			}
		}
		s.delete(c.name)
	}
	s.wantClaims()
	if _, err := s.create(service("both", func(s *corev1.Service) {
		s.Spec.IPFamilies = []corev1.IPFamily{"IPv4",
			"IPv6"}
	})); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "spec.ipFamilyPolicy: Invalid value: \"SingleStack\": "+
			"must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified") {
		t.Error(err)
	}

	one := s.mustCreate(service("x"))
	up, err := s.update("x", policy("RequireDualStack"))
	if err != nil || len(up.Spec.ClusterIPs) != 2 || up.Spec.ClusterIP != one.Spec.ClusterIP {
		t.Fatal(err, up)
	}
	s.wantClaims(up.Spec.ClusterIPs[0]+"=default/x", up.Spec.ClusterIPs[1]+"=default/x")
	if _, err := s.update("x", func(s *corev1.Service) { s.Spec.ClusterIPs = s.Spec.ClusterIPs[:1] }); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "must be 'SingleStack' to release the secondary cluster IP") {
		t.Error(err)
	}
	down, err := s.update("x", policy("SingleStack"))
	if err != nil || len(down.Spec.ClusterIPs) != 1 || len(down.Spec.IPFamilies) != 1 {
		t.Fatal(err, down)
	}
	s.wantClaims(one.Spec.ClusterIP + "=default/x")
}

func TestSingleStackCluster(t *testing.T) {
	s := start(t, func(o *Options) { o.ServiceCIDRs = o.ServiceCIDRs[:1] })
	for name, c := range map[string]struct {
		f    func(*corev1.Service)
		want string
	}{
		"a": {func(s *corev1.Service) { s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack) },
			"this cluster is not configured for dual-stack services"},
		"b": {func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{"IPv6"} },
			"spec.ipFamilies[0]: Invalid value: \"IPv6\": not configured on this cluster"},
		"c": {func(s *corev1.Service) { s.Spec.ClusterIP = "fd00::1" }, "IPv6 is not configured on this cluster"},
	} {
		if _, err := s.create(service(name, c.f)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	out := s.mustCreate(service("p", func(s *corev1.Service) { s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyPreferDualStack) }))
	if len(out.Spec.ClusterIPs) != 1 {
		t.Errorf("%v", out.Spec.ClusterIPs)
	}
}

// A PUT to a name that is not there creates it, with allocation.
func TestCreateOnUpdate(t *testing.T) {
	s := start(t)
	in := service("new")
	SetDefaults(in)
	out, err := s.put(in)
	if err != nil || out.Spec.ClusterIP == "" {
		t.Fatal(err, out)
	}
	s.wantClaims(out.Spec.ClusterIP + "=default/new")
}

// A finalizer keeps the addresses; the status update that removes it frees them.
func TestFinalizerKeepsClaims(t *testing.T) {
	s := start(t)
	out := s.mustCreate(service("x", func(s *corev1.Service) { s.Finalizers = []string{"example.com/wait"} }))
	s.delete("x")
	s.wantClaims(out.Spec.ClusterIP + "=default/x")
	cur := s.get("x")
	cur.Finalizers = nil
	if _, _, err := s.Status.Update(ctxIn("default"), "x", rest.DefaultUpdatedObjectInfo(cur), rest.ValidateAllObjectFunc,
		rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.wantClaims()
}

// A write whose result is unknown keeps its claims for the repair.
func TestUnknownResultKeepsClaims(t *testing.T) {
	s := start(t)
	ctx, cancel := context.WithCancel(ctxIn("default"))
	in := service("x")
	SetDefaults(in)
	_, err := s.Service.Create(ctx, in, func(context.Context, runtime.Object) error { cancel(); return nil }, &metav1.CreateOptions{})
	if err == nil {
		t.Fatal("a cancelled write succeeded")
	}
	if n := len(s.claimed()); n != 1 {
		t.Fatalf("%d claims, want the one that may be in use", n)
	}
	eventually(t, func() string { // the cache of claims may be behind
		found, err := s.Repair(context.Background(), 0)
		if err != nil || len(found) != 1 || found[0].Reason != "ClaimWithoutService" {
			return fmt.Sprint(found, err)
		}
		return ""
	})
	s.wantClaims()
}
