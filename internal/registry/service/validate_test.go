package service

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
)

type edit = func(*corev1.Service)

// complete returns a valid Service with defaults and allocated values.
func complete(f ...edit) *corev1.Service {
	s := service("web")
	s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.10", []string{"10.96.0.10"}
	s.Spec.IPFamilies = []corev1.IPFamily{"IPv4"}
	s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
	for _, g := range f {
		g(s)
	}
	SetDefaults(s)
	return s
}

func lb(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer }
func np(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort }
func external(s *corev1.Service) {
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "db.example.com"}
}
func headless(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }
func name(n string) edit         { return func(s *corev1.Service) { s.Name = n } }
func portsOf(p ...corev1.ServicePort) edit {
	return func(s *corev1.Service) { s.Spec.Ports = p }
}

// Each case is one change of a valid Service and the one error it makes, with
// path, kind of cause and text; empty means that it is valid.
func TestValidateCreate(t *testing.T) {
	for _, c := range []struct {
		what string
		f    []edit
		want string
	}{
		{"plain", nil, ""},
		{"name with a digit first (behaviour 9)", []edit{name("1web")}, ""},
		{"name with a dot (behaviour 9)", []edit{name("a.b")}, `metadata.name: Invalid value: "a.b": must not contain dots`},
		{"name of 64", []edit{name(strings.Repeat("a", 64))}, "metadata.name: Invalid value: \"" + strings.Repeat("a", 64) +
			"\": must be no more than 63"},
		{"no namespace", []edit{func(s *corev1.Service) { s.Namespace = "" }}, "metadata.namespace: Required value"},
		{"no ports", []edit{portsOf()}, "spec.ports: Required value"},
		{"headless without ports", []edit{portsOf(), headless}, ""},
		{"port 0", []edit{portsOf(corev1.ServicePort{Port: 0, TargetPort: intstr.FromInt32(1)})},
			"spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive"},
		{"port 65536", []edit{portsOf(corev1.ServicePort{Port: 65536, TargetPort: intstr.FromInt32(1)})},
			"spec.ports[0].port: Invalid value: 65536: must be between 1 and 65535, inclusive"},
		{"target name (behaviour 12)", []edit{portsOf(corev1.ServicePort{Port: 1, TargetPort: intstr.FromString("http-web")})}, ""},
		{"target name too long", []edit{portsOf(corev1.ServicePort{Port: 1, TargetPort: intstr.FromString("http-web-is-too-long")})},
			`spec.ports[0].targetPort: Invalid value: "http-web-is-too-long": must be no more than 15 characters`},
		{"target without letter", []edit{portsOf(corev1.ServicePort{Port: 1, TargetPort: intstr.FromString("80")})},
			`spec.ports[0].targetPort: Invalid value: "80": must contain at least one letter (a-z)`},
		{"target 70000", []edit{portsOf(corev1.ServicePort{Port: 1, TargetPort: intstr.FromInt32(70000)})},
			"spec.ports[0].targetPort: Invalid value: 70000: must be between"},
		{"protocol", []edit{portsOf(corev1.ServicePort{Port: 1, Protocol: "ICMP"})},
			`spec.ports[0].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"`},
		{"SCTP (behaviour 174)", []edit{portsOf(corev1.ServicePort{Port: 1, Protocol: "SCTP"})}, ""},
		{"SCTP load balancer (behaviour 105)", []edit{lb, portsOf(corev1.ServicePort{Port: 1, Protocol: "SCTP"})}, ""},
		{"mixed protocols (behaviour 96)", []edit{lb,
			portsOf(corev1.ServicePort{Name: "a", Port: 1}, corev1.ServicePort{Name: "b", Port: 1, Protocol: "UDP"})}, ""},
		{"two ports without names (behaviour 63)", []edit{portsOf(corev1.ServicePort{Name: "a", Port: 1}, corev1.ServicePort{Port: 2})},
			"spec.ports[1].name: Required value"},
		{"port name 123-abc (behaviour 64)", []edit{portsOf(corev1.ServicePort{Name: "123-abc", Port: 1})}, ""},
		{"port name 123_abc (behaviour 64)", []edit{portsOf(corev1.ServicePort{Name: "123_abc", Port: 1})},
			`spec.ports[0].name: Invalid value: "123_abc": a lowercase RFC 1123 label`},
		{"port name -web (behaviour 64)", []edit{portsOf(corev1.ServicePort{Name: "-web", Port: 1})},
			`spec.ports[0].name: Invalid value: "-web"`},
		{"port name twice", []edit{portsOf(corev1.ServicePort{Name: "a", Port: 1}, corev1.ServicePort{Name: "a", Port: 2})},
			`spec.ports[1].name: Duplicate value: "a"`},
		{"port twice", []edit{portsOf(corev1.ServicePort{Name: "a", Port: 1}, corev1.ServicePort{Name: "b", Port: 1})},
			"spec.ports[1]: Duplicate value: "},
		{"app protocol (behaviour 31)", []edit{portsOf(corev1.ServicePort{Port: 1, AppProtocol: new("kubernetes.io/h2c")})}, ""},
		{"app protocol with space", []edit{portsOf(corev1.ServicePort{Port: 1, AppProtocol: new("h 2")})},
			`spec.ports[0].appProtocol: Invalid value: "h 2": name part must consist of`},
		{"node port on ClusterIP", []edit{portsOf(corev1.ServicePort{Port: 1, NodePort: 30000})},
			"spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
		{"node port twice", []edit{np, portsOf(corev1.ServicePort{Name: "a", Port: 1, NodePort: 30000},
			corev1.ServicePort{Name: "b", Port: 2, NodePort: 30000})}, "spec.ports[1].nodePort: Duplicate value: 30000"},
		{"node port for two protocols", []edit{np,
			portsOf(corev1.ServicePort{Name: "a", Port: 1, NodePort: 30000},
				corev1.ServicePort{Name: "b", Port: 1, Protocol: "UDP", NodePort: 30000})}, ""},
		{"selector", []edit{func(s *corev1.Service) { s.Spec.Selector = map[string]string{"a b": "c"} }},
			`spec.selector: Invalid value: "a b": name part must consist of`},
		{"type", []edit{func(s *corev1.Service) { s.Spec.Type = "Magic" }},
			`spec.type: Unsupported value: "Magic": supported values: "ClusterIP", "ExternalName", "LoadBalancer", "NodePort"`},
		{"affinity", []edit{func(s *corev1.Service) { s.Spec.SessionAffinity = "Sticky" }},
			`spec.sessionAffinity: Unsupported value: "Sticky": supported values: "ClientIP", "None"`},
		{"affinity of 0 s (behaviour 62)", []edit{affinity(0)},
			"spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 0: must be greater than 0 and less than 86400"},
		{"affinity of a day (behaviour 62)", []edit{affinity(86400)}, ""},
		{"affinity of more (behaviour 62)", []edit{affinity(86401)}, "spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 86401"},
		{"bad cluster IP (behaviour 66)", []edit{clusterIPs("10.96.0")},
			`spec.clusterIPs[0]: Invalid value: "10.96.0": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)`},
		{"cluster IP with zeros", []edit{clusterIPs("10.96.0.010")},
			`spec.clusterIPs[0]: Invalid value: "10.96.0.010": must not have leading 0s`},
		{"mapped cluster IP", []edit{clusterIPs("::ffff:10.96.0.1")}, "must not be an IPv4-mapped IPv6 address"},
		{"None and an address", []edit{clusterIPs("None", "10.96.0.1")},
			"spec.clusterIPs: Invalid value: [\"None\",\"10.96.0.1\"]: 'None' must be the first and only value"},
		{"three cluster IPs", []edit{clusterIPs("10.96.0.1", "fd00::1", "fd00::2")}, "may only hold up to 2 values"},
		{"two of one family", []edit{clusterIPs("10.96.0.1", "10.96.0.2")}, "may specify no more than one IP for each IP family"},
		{"clusterIP and clusterIPs differ", []edit{func(s *corev1.Service) { s.Spec.ClusterIP = "10.96.0.9" }},
			"spec.clusterIPs: Invalid value: [\"10.96.0.10\"]: first value must match `clusterIP`"},
		{"only clusterIPs", []edit{func(s *corev1.Service) { s.Spec.ClusterIP = "" }},
			"spec.clusterIPs: Invalid value: [\"10.96.0.10\"]: must be empty when `clusterIP` is not specified"},
		{"family", []edit{func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{"IPv5"} }},
			`spec.ipFamilies[0]: Unsupported value: "IPv5": supported values: "IPv4", "IPv6"`},
		{"family and address", []edit{func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{"IPv6"} }},
			"spec.clusterIPs[0]: Invalid value: \"10.96.0.10\": expected an IPv6 value as indicated by `ipFamilies[0]`"},
		{"family policy", []edit{func(s *corev1.Service) { s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicy("Both")) }},
			`spec.ipFamilyPolicy: Unsupported value: "Both": supported values: "PreferDualStack", "RequireDualStack", "SingleStack"`},
		{"headless NodePort", []edit{np, headless}, `spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for NodePort services`},
		{"headless LoadBalancer", []edit{lb, headless}, `may not be set to 'None' for LoadBalancer services`},
		{"external IP (behaviour 156)", []edit{externalIP("80.11.12.10")}, ""},
		{"external name as external IP", []edit{externalIP("example.com")},
			`spec.externalIPs[0]: Invalid value: "example.com": must be a valid IP address`},
		{"external IP loopback (behaviour 158)", []edit{externalIP("127.0.0.1")},
			`spec.externalIPs[0]: Invalid value: "127.0.0.1": may not be in the loopback range (127.0.0.0/8, ::1/128)`},
		{"external IP unspecified", []edit{externalIP("0.0.0.0")}, "may not be unspecified (0.0.0.0)"},
		{"external IP link-local", []edit{externalIP("fe80::1")}, "may not be in the link-local range (169.254.0.0/16, fe80::/10)"},
		{"external IP multicast", []edit{externalIP("224.0.0.1")}, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"},
		{"source ranges (behaviour 101)", []edit{lb, sourceRanges("143.231.0.0/16", " 10.0.0.0/8 ")}, ""},
		{"source range", []edit{lb, sourceRanges("143.231.0.0")},
			`spec.LoadBalancerSourceRanges[0]: Invalid value: "143.231.0.0": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)`},
		{"source ranges without LB", []edit{sourceRanges("143.231.0.0/16")},
			"spec.LoadBalancerSourceRanges: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{"source ranges annotation", []edit{lb, annotation(corev1.AnnotationLoadBalancerSourceRangesKey, "10.0.0.0/8, x")},
			`metadata.annotations[service.beta.kubernetes.io/load-balancer-source-ranges]: Invalid value: "x": must be a valid CIDR`},
		{"topology annotations differ", []edit{annotation(deprecatedHints, "auto"), annotation(corev1.AnnotationTopologyMode, "Disabled")},
			"metadata.annotations[service.kubernetes.io/topology-mode]: Invalid value: \"Disabled\": must match annotations["},
		{"LB port 10250", []edit{lb, portsOf(corev1.ServicePort{Port: 10250})}, ""},
		{"LB fields", []edit{func(s *corev1.Service) { s.Spec.AllocateLoadBalancerNodePorts = new(true) }},
			"spec.allocateLoadBalancerNodePorts: Forbidden: may only be used when `type` is 'LoadBalancer'"},
		{"LB class", []edit{lb, func(s *corev1.Service) { s.Spec.LoadBalancerClass = new("x y") }},
			`spec.loadBalancerClass: Invalid value: "x y"`},
		{"LB class without LB", []edit{func(s *corev1.Service) { s.Spec.LoadBalancerClass = new("a.b/c") }},
			"spec.loadBalancerClass: Forbidden: may only be used"},
		{"external policy on ClusterIP", []edit{func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Local" }},
			`spec.externalTrafficPolicy: Invalid value: "Local": may only be set for externally-accessible services`},
		{"external policy with external IPs", []edit{externalIP("80.11.12.10"),
			func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Local" }}, ""},
		{"external policy", []edit{np, func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Near" }},
			`spec.externalTrafficPolicy: Unsupported value: "Near": supported values: "Cluster", "Local"`},
		{"health port without Local", []edit{lb, func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 30000 }},
			"spec.healthCheckNodePort: Invalid value: 30000: may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"},
		{"internal policy", []edit{func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicy("Near"))
		}}, `spec.internalTrafficPolicy: Unsupported value: "Near": supported values: "Cluster", "Local"`},
		{"distribution", []edit{func(s *corev1.Service) { s.Spec.TrafficDistribution = new("Far") }},
			`spec.trafficDistribution: Unsupported value: "Far": supported values: "PreferClose", "PreferSameZone", "PreferSameNode"`},
		{"external name (behaviour 150)", []edit{external}, ""},
		{"external name like an IP (behaviour 152)", []edit{external, func(s *corev1.Service) { s.Spec.ExternalName = "192.0.2.1" }}, ""},
		{"external name with a dot at the end", []edit{external, func(s *corev1.Service) { s.Spec.ExternalName = "db.example.com." }}, ""},
		{"no external name", []edit{external, func(s *corev1.Service) { s.Spec.ExternalName = "" }}, "spec.externalName: Required value"},
		{"external name with a slash", []edit{external, func(s *corev1.Service) { s.Spec.ExternalName = "a/b" }},
			`spec.externalName: Invalid value: "a/b"`},
		{"external name with cluster IP", []edit{external, clusterIPs("10.96.0.1")},
			"spec.clusterIPs: Forbidden: may not be set for ExternalName services"},
		{"external name with families", []edit{external, func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{"IPv4"} }},
			"spec.ipFamilies: Forbidden"},
	} {
		errs := ValidateCreate(complete(c.f...))
		switch {
		case c.want == "" && len(errs) > 0:
			t.Errorf("%s: %v, want it valid", c.what, errs)
		case c.want != "" && (len(errs) != 1 || !strings.Contains(errs[0].Error(), c.want)):
			t.Errorf("%s:\n got  %v\n want %s", c.what, errs, c.want)
		}
	}
}

func affinity(s int32) edit {
	return func(svc *corev1.Service) {
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &s}}
	}
}
func clusterIPs(ips ...string) edit {
	return func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = ips[0], ips }
}
func externalIP(ip string) edit {
	return func(s *corev1.Service) { s.Spec.ExternalIPs = []string{ip} }
}
func sourceRanges(r ...string) edit {
	return func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = r }
}
func annotation(k, v string) edit {
	return func(s *corev1.Service) { metav1.SetMetaDataAnnotation(&s.ObjectMeta, k, v) }
}

func TestValidateStatus(t *testing.T) {
	ingress := func(i ...corev1.LoadBalancerIngress) edit {
		return func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = i }
	}
	for _, c := range []struct {
		what string
		f    []edit
		want string
	}{
		{"address (behaviour 97)", []edit{lb, ingress(corev1.LoadBalancerIngress{IP: "192.0.2.127"})}, ""},
		{"name", []edit{lb, ingress(corev1.LoadBalancerIngress{Hostname: "lb.example.com"})}, ""},
		{"not a load balancer", []edit{ingress(corev1.LoadBalancerIngress{IP: "192.0.2.127"})},
			"status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is 'LoadBalancer'"},
		{"bad address", []edit{lb, ingress(corev1.LoadBalancerIngress{IP: "192.0.2"})},
			`status.loadBalancer.ingress[0].ip: Invalid value: "192.0.2"`},
		{"mode", []edit{lb, ingress(corev1.LoadBalancerIngress{IP: "192.0.2.1", IPMode: new(corev1.LoadBalancerIPMode("Tunnel"))})},
			`status.loadBalancer.ingress[0].ipMode: Unsupported value: "Tunnel": supported values: "Proxy", "VIP"`},
		{"mode without address", []edit{lb, ingress(corev1.LoadBalancerIngress{Hostname: "a.b", IPMode: new(corev1.LoadBalancerIPModeVIP)})},
			"status.loadBalancer.ingress[0].ipMode: Forbidden"},
		{"address as name", []edit{lb, ingress(corev1.LoadBalancerIngress{Hostname: "192.0.2.1"})}, "must be a DNS name, not an IP address"},
	} {
		s := complete(c.f...)
		s.ResourceVersion = "1"
		old := s.DeepCopy()
		old.Status = corev1.ServiceStatus{}
		errs := ValidateStatusUpdate(s, old)
		switch {
		case c.want == "" && len(errs) > 0:
			t.Errorf("%s: %v, want it valid", c.what, errs)
		case c.want != "" && (len(errs) != 1 || !strings.Contains(errs[0].Error(), c.want)):
			t.Errorf("%s:\n got  %v\n want %s", c.what, errs, c.want)
		}
	}
}

// An old spelling may stay, and only it.
func TestOldSpellingsStay(t *testing.T) {
	old := complete(clusterIPs("10.96.0.010"), externalIP("80.011.12.10"), func(s *corev1.Service) { s.ResourceVersion = "1" })
	if errs := ValidateUpdate(old.DeepCopy(), old); len(errs) > 0 {
		t.Error(errs)
	}
	cur := old.DeepCopy()
	cur.Spec.ExternalIPs = []string{"80.011.12.11"}
	if errs := ValidateUpdate(cur, old); len(errs) != 1 {
		t.Error(errs)
	}
}

// behaviours 10, 11, 61, 62, 84: the defaults, and that they are stable.
func TestDefaults(t *testing.T) {
	s := service("web")
	SetDefaults(s)
	p := s.Spec.Ports[0]
	if p.Protocol != "TCP" || p.TargetPort != intstr.FromInt32(80) || s.Spec.Type != "ClusterIP" || s.Spec.SessionAffinity != "None" ||
		*s.Spec.InternalTrafficPolicy != "Cluster" || s.Spec.ExternalTrafficPolicy != "" {
		t.Errorf("%+v", s.Spec)
	}
	s = service("web", lb, func(s *corev1.Service) {
		s.Spec.SessionAffinity = "ClientIP"
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	})
	SetDefaults(s)
	if *s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != 10800 || s.Spec.ExternalTrafficPolicy != "Cluster" ||
		!*s.Spec.AllocateLoadBalancerNodePorts || *s.Status.LoadBalancer.Ingress[0].IPMode != "VIP" {
		t.Errorf("%+v", s)
	}
	s = service("web", affinity(5), func(s *corev1.Service) { s.Spec.SessionAffinity = "None" })
	if SetDefaults(s); s.Spec.SessionAffinityConfig != nil {
		t.Error("a configuration without affinity must go")
	}
	s = service("web", external)
	if SetDefaults(s); s.Spec.InternalTrafficPolicy != nil {
		t.Error("ExternalName has no internal policy")
	}
	rapid.Check(t, func(t *rapid.T) {
		s := drawService(t)
		SetDefaults(s)
		once := s.DeepCopy()
		if SetDefaults(s); !reflect.DeepEqual(s, once) {
			t.Fatalf("defaults are not stable: %+v, then %+v", once.Spec, s.Spec)
		}
	})
}

func drawService(t *rapid.T) *corev1.Service {
	s := service("x")
	s.Spec.Type = rapid.SampledFrom([]corev1.ServiceType{"", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "Odd"}).Draw(t, "type")
	s.Spec.ClusterIP = rapid.SampledFrom([]string{"", "None", "10.96.0.1", "fd00::1", "x"}).Draw(t, "ip")
	s.Spec.ClusterIPs = rapid.SliceOfN(rapid.SampledFrom([]string{"", "None", "10.96.0.1", "fd00::1", "x"}), 0, 3).Draw(t, "ips")
	s.Spec.IPFamilies = rapid.SliceOfN(rapid.SampledFrom([]corev1.IPFamily{"IPv4", "IPv6", "", "x"}), 0, 3).Draw(t, "families")
	s.Spec.SessionAffinity = rapid.SampledFrom([]corev1.ServiceAffinity{"", "None", "ClientIP"}).Draw(t, "affinity")
	if p := rapid.SampledFrom([]corev1.IPFamilyPolicy{"", "SingleStack", "PreferDualStack", "RequireDualStack", "x"}).Draw(t,
		"policy"); p != "" {
		s.Spec.IPFamilyPolicy = &p
	}
	s.Spec.ExternalTrafficPolicy = rapid.SampledFrom([]corev1.ServiceExternalTrafficPolicy{"", "Cluster", "Local"}).Draw(t, "etp")
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].NodePort = rapid.Int32Range(0, 2).Draw(t, "nodePort")
	}
	return s
}

// No pair of Services, however odd, makes the rules panic or an update of a
// Service to itself fail.
func TestRulesOnOddServices(t *testing.T) {
	for _, fams := range []families{{"IPv4"}, {"IPv6"}, {"IPv4", "IPv6"}} {
		rapid.Check(t, func(t *rapid.T) {
			cur, prev := drawService(t), drawService(t)
			SetDefaults(cur)
			SetDefaults(prev)
			fresh := cur.DeepCopy()
			linkClusterIPs(fresh, nil)
			if fams.initFamilies(fresh, nil) == nil {
				allocator.PlanCreate(fresh)
				if len(ValidateCreate(fresh)) == 0 {
					warnings(fresh)
				}
			}
			fams.defaultOnRead(prev)
			keepAllocated(cur, prev)
			linkClusterIPs(cur, prev)
			if fams.initFamilies(cur, prev) == nil {
				allocator.PlanUpdate(cur, prev)
				dropForType(cur, prev)
				ValidateUpdate(cur, prev)
			}
		})
	}
}

func TestWarnings(t *testing.T) {
	for _, c := range []struct {
		f    []edit
		want string
	}{
		{nil, ""},
		{[]edit{annotation(deprecatedHints, "auto")},
			"annotation service.kubernetes.io/topology-aware-hints is deprecated, please use service.kubernetes.io/topology-mode instead"},
		{[]edit{headless, externalIP("1.2.3.4")}, "spec.externalIPs is ignored for headless services"},
		{[]edit{external, externalIP("1.2.3.4")}, `spec.externalIPs is ignored when spec.type is "ExternalName"`},
		{[]edit{func(s *corev1.Service) { s.Spec.ExternalName = "a.b" }}, `spec.externalName is ignored when spec.type is not "ExternalName"`},
		{[]edit{func(s *corev1.Service) { s.Spec.TrafficDistribution = new("PreferClose") }},
			`spec.trafficDistribution: "PreferClose" is deprecated; use "PreferSameZone"`},
		{[]edit{lb, annotation("networking.gke.io/load-balancer-type", "Inernal")},
			`annotation networking.gke.io/load-balancer-type: "Inernal" is not one of internal, external; the Service gets no address`},
		{[]edit{lb, annotation("service.beta.kubernetes.io/azure-load-balancer-internl", "true")},
			"is service.beta.kubernetes.io/azure-load-balancer-internal (true, false) meant?"},
		{[]edit{lb, annotation("service.beta.kubernetes.io/aws-load-balancer-ssl-ports", "*")}, "ports for TLS are not served in plain text"},
		{[]edit{lb, annotation("fairlead.dev/lb-tls-secrets", "kube-system/web")}, "only Secrets of the Service's own namespace count"},
		{[]edit{lb, annotation("fairlead.dev/lb-drain-tiemout", "5")}, "is fairlead.dev/lb-drain-timeout meant?"},
		{[]edit{lb, annotation("fairlead.dev/lb-internal", "yes"), func(s *corev1.Service) {
			s.Spec.LoadBalancerClass = new("example.com/lb")
		}}, ""},
		{[]edit{annotation("fairlead.dev/lb-internal", "yes")}, ""},
		{[]edit{lb, annotation("fairlead.dev/lb-internal", "true"), annotation("service.beta.kubernetes.io/aws-load-balancer-subnets", "a")}, ""},
		{[]edit{lb, sourceRanges("10.1.0.0/8")}, `spec.loadBalancerSourceRanges[0]: CIDR value "10.1.0.0/8" is ambiguous`},
	} {
		got := warnings(complete(c.f...))
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)) {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

func TestTableCells(t *testing.T) {
	s := complete(lb, portsOf(corev1.ServicePort{Port: 80, NodePort: 30007}, corev1.ServicePort{Port: 53, Protocol: "UDP"}))
	tab, err := newTable().ConvertToTable(ctxIn("default"), s, nil)
	if err != nil {
		t.Fatal(err)
	}
	cells := tab.Rows[0].Cells
	got, _ := json.Marshal(append(cells[:5:5], cells[6]))
	if want := `["web","LoadBalancer","10.96.0.10","\u003cpending\u003e","80:30007/TCP,53/UDP","app=MyApp"]`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, c := range []struct {
		f    []edit
		want string
	}{
		{nil, "<none>"}, {[]edit{external}, "db.example.com"}, {[]edit{externalIP("80.11.12.10")}, "80.11.12.10"},
		{[]edit{lb, func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.127"}}
		}}, "192.0.2.127"},
	} {
		if got := externalIPText(complete(c.f...)); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

// Decoding and checking whatever a client sends ends in an answer.
func FuzzServiceJSON(f *testing.F) {
	for _, s := range []*corev1.Service{service("web"), complete(lb), complete(external), complete(headless)} {
		b, _ := json.Marshal(s)
		f.Add(b)
	}
	f.Add([]byte(`{"spec":{"ports":[{"port":-1,"targetPort":"","nodePort":99999}],` +
		`"clusterIPs":["","None","::"],"ipFamilies":["","IPv4","IPv4"]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s corev1.Service
		if json.Unmarshal(b, &s) != nil {
			return
		}
		SetDefaults(&s)
		fams := families{"IPv4", "IPv6"}
		linkClusterIPs(&s, nil)
		if fams.initFamilies(&s, nil) != nil {
			return
		}
		allocator.PlanCreate(&s)
		if len(ValidateCreate(&s)) == 0 {
			warnings(&s)
		}
	})
}
