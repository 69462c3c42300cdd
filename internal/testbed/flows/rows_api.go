package flows

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// The changes that rows make to a Service.

type change = func(*corev1.Service)

// all makes several changes.
func all(changes ...change) change {
	return func(s *corev1.Service) {
		for _, c := range changes {
			c(s)
		}
	}
}

func familyOf(s *corev1.Service) svc.Family {
	if strings.Contains(s.Spec.ClusterIP, ":") {
		return svc.IPv6
	}
	return svc.IPv4
}

func withNodePort(s *corev1.Service) {
	s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, nodePort
}

func withLB(s *corev1.Service) {
	s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeLoadBalancer, nodePort
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip(familyOf(s), table.LoadBalancerIP).String()}}
}

func withExternal(s *corev1.Service) {
	s.Spec.ExternalIPs = []string{vip(familyOf(s), table.ExternalIP).String()}
}

func externalLocal(s *corev1.Service) {
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

func internalLocal(s *corev1.Service) {
	local := corev1.ServiceInternalTrafficPolicyLocal
	s.Spec.InternalTrafficPolicy = &local
}

func sticky(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP }

func stickyFor(seconds int32) change {
	return func(s *corev1.Service) {
		sticky(s)
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
}

func ipMode(m corev1.LoadBalancerIPMode) change {
	return func(s *corev1.Service) { s.Status.LoadBalancer.Ingress[0].IPMode = &m }
}

func sourceRanges(r ...string) change {
	return func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = r }
}

func annotatedRanges(r string) change {
	return func(s *corev1.Service) {
		s.Annotations = map[string]string{corev1.AnnotationLoadBalancerSourceRangesKey: r}
	}
}

func label(key string) change {
	return func(s *corev1.Service) { s.Labels = map[string]string{key: "some"} }
}

func clusterIPOf(v4, v6 string) change {
	return func(s *corev1.Service) {
		ip := pick(familyOf(s), v4, v6).String()
		s.Spec.ClusterIP, s.Spec.ClusterIPs = ip, []string{ip}
		s.Spec.ExternalIPs, s.Status.LoadBalancer.Ingress, s.Spec.Ports[0].NodePort = nil, nil, 0
		s.Spec.Type = corev1.ServiceTypeClusterIP
	}
}

// The parts of a load balancer that rows change.

func externalLB(s *corev1.Service) {
	s.Spec.ExternalIPs = []string{s.Status.LoadBalancer.Ingress[0].IP}
}

func lbByName(s *corev1.Service) {
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example.com"}}
}

func withoutNodePort(s *corev1.Service) { s.Spec.Ports[0].NodePort = 0 }

func headless(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }

func externalName(s *corev1.Service) {
	s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.com"
}

func notSticky(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityNone }

func namespaced(namespace, name string) change {
	return func(s *corev1.Service) { s.Namespace, s.Name = namespace, name }
}

// wantsClusterIP is an older Service whose external IP is this one's ClusterIP.
func wantsClusterIP(s *corev1.Service) {
	taken := s.Spec.ClusterIP
	clusterIPOf("10.96.0.80", "fd00:10:96::80")(s)
	s.CreationTimestamp = metav1.NewTime(time.Unix(1, 0))
	s.Spec.ExternalIPs = []string{taken}
}

// younger makes a Service that wants what an older one has.
func younger(s *corev1.Service) { s.CreationTimestamp = metav1.NewTime(time.Unix(2000, 0)) }

// bothProtocols is one port number for TCP and UDP.
func bothProtocols(s *corev1.Service) {
	s.Spec.Ports[0].Name = "first"
	second := s.Spec.Ports[0]
	second.Name, second.Protocol = "second", corev1.ProtocolUDP
	if s.Spec.Ports[0].Protocol == corev1.ProtocolUDP {
		second.Protocol = corev1.ProtocolTCP
	}
	s.Spec.Ports = append(s.Spec.Ports, second)
}

// portNamed gives the Service's port a name.
func portNamed(name string) change {
	return func(s *corev1.Service) { s.Spec.Ports[0].Name = name }
}

// morePort is a second port, named more.
func morePort(s *corev1.Service) {
	s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "more", Port: 8443, Protocol: s.Spec.Ports[0].Protocol})
}

// named gives the slices' port a name.
func named(name string) func(*discoveryv1.EndpointSlice) {
	return func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name = &name }
}

func ofSCTP(s *discoveryv1.EndpointSlice) {
	other := corev1.ProtocolSCTP
	s.Ports[0].Protocol = &other
}

// api makes a row's question from a Service and the slices of its endpoints.
func api(c change, slices ...string) *API { return &API{Service: c, Slices: slices} }

// sliced changes the slices.
func (a *API) sliced(c func(*discoveryv1.EndpointSlice)) *API {
	a.Slice = c
	return a
}

// beside adds another Service.
func (a *API) beside(c change) *API {
	a.Others = append(a.Others, c)
	return a
}

// APIRows are the rows that are asked of objects of the Kubernetes API. They
// are not changed.
var APIRows = []Row{
	// Which endpoints count: behaviour 19, KEP-1669.
	{Name: "not ready is left out", Behaviour: "19",
		Protocols: tcpUDP, API: api(nil, "a! b d"),
		From: "c", To: "cluster", Want: Want{Reach: "b d"}},
	{Name: "none is ready", Behaviour: "19, 45",
		Protocols: tcpUDP, API: api(nil, "a! d!"),
		From: "c", To: "cluster", Want: Want{Refused: true}},
	{Name: "terminating is left out while others are ready", Behaviour: "199",
		API:  api(nil, "a~ b"),
		From: "c", To: "cluster", Want: Want{Reach: "b"}},
	{Name: "all terminate and serve",
		Behaviour: "199",
		Protocols: tcpUDP, API: api(nil, "a~ d~"),
		From: "c", To: "cluster", Want: Want{Reach: "a d"}},
	{Name: "terminating without serving", Behaviour: "199",
		API:  api(nil, "a% d%"),
		From: "c", To: "cluster", Want: Want{Refused: true}},
	{Name: "terminating goes before not ready", Behaviour: "199",
		API:  api(nil, "a! b~ d%"),
		From: "c", To: "cluster", Want: Want{Reach: "b"}},
	{Name: "all terminate, node port",
		Behaviour: "199",
		API:       api(withNodePort, "a~ d~"),
		From:      "client", To: "node", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "all terminate, load balancer", Behaviour: "97, 199",
		API:  api(withLB, "a~ d~"),
		From: "client", To: "lb", Want: Want{Reach: "a d"}},
	{Name: "an endpoint in two slices", Behaviour: "203",
		API:  api(nil, "a b", "b d"),
		From: "c", To: "cluster", Want: Want{Reach: "a b d"}},
	{Name: "an endpoint in two slices, once ready", Behaviour: "203",
		API:  api(nil, "a!", "a"),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "no slices at all", Behaviour: "22, 45",
		API:  api(nil),
		From: "node", To: "cluster", Want: Want{Refused: true}},
	{Name: "slices of another protocol", Behaviour: "13",
		Protocols: tcpUDP, API: api(nil, "a").sliced(ofSCTP),
		From: "c", To: "cluster", Want: Want{Refused: true}},

	// Named ports: behaviours 12, 13.
	{Name: "a named port that differs per endpoint", Behaviour: "12",
		Protocols: tcpUDP, API: api(portNamed("http"), "a", "b:9377 d").sliced(named("http")),
		From: "c", To: "cluster", Want: Want{Reach: "a b:9377 d:9377"}},
	{Name: "a named port that differs, node port", Behaviour: "12, 92",
		API:  api(all(withNodePort, portNamed("http")), "a", "d:9377").sliced(named("http")),
		From: "client", To: "node", Want: Want{Reach: "a d:9377"}},
	{Name: "a port of another name", Behaviour: "12, 13",
		API:  api(nil, "a").sliced(named("metrics")),
		From: "c", To: "cluster", Want: Want{Refused: true}},
	{Name: "one number for two protocols", Behaviour: "13",
		Protocols: tcpUDP, API: api(bothProtocols, "a d").sliced(named("first")),
		From: "c", To: "cluster", Want: Want{Reach: "a d"}},
	{Name: "one node port number for two protocols", Behaviour: "13, 92",
		Protocols: tcpUDP, API: api(all(withNodePort, bothProtocols), "a d").sliced(named("first")),
		From: "client", To: "node", Want: Want{Reach: "a d"}},
	{Name: "the second of two ports", Behaviour: "13",
		Protocols: tcpUDP, API: api(morePort, "b:9377").sliced(named("more")),
		From: "c", To: "cluster:8443", Want: Want{Reach: "b:9377"}},
	{Name: "the first of two ports, without endpoints", Behaviour: "13, 45",
		API:  api(morePort, "b").sliced(named("more")),
		From: "c", To: "cluster", Want: Want{Refused: true}},

	// internalTrafficPolicy.
	{Name: "internal Local from a pod", Behaviour: "200",
		Protocols: tcpUDP, API: api(internalLocal, "a b d"),
		From: "c", To: "cluster", Want: Want{Reach: "a b", Client: "kept"}},
	{Name: "internal Local from the node",
		Behaviour: "200, 208",
		API:       api(internalLocal, "a d"),
		From:      "node", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "internal Local to a host-network pod",
		Behaviour: "200, 208",
		API:       api(internalLocal, "node other"),
		From:      "c", To: "cluster", Want: Want{Reach: "node"}},
	{Name: "internal Local, host-network pod to host-network pod",
		Behaviour: "200, 208",
		API:       api(internalLocal, "node other"),
		From:      "node", To: "cluster", Want: Want{Reach: "node"}},
	{Name: "internal Local, none here", Behaviour: "191",
		Families: ipv4, API: api(internalLocal, "d e"),
		From: "c", To: "cluster", Want: Want{Dropped: true}},
	{Name: "internal Local, none anywhere", Behaviour: "190",
		API:  api(internalLocal, ""),
		From: "c", To: "cluster", Want: Want{Refused: true}},
	{Name: "internal Local, those here terminate",
		Behaviour: "199",
		API:       api(internalLocal, "a~ b% d"),
		From:      "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "internal Local, those here neither serve nor are ready", Behaviour: "199, 200",
		Families: ipv4, API: api(internalLocal, "a% b! d"),
		From: "c", To: "cluster", Want: Want{Dropped: true}},
	{Name: "internal Local leaves node ports alone", Behaviour: "200",
		API:  api(all(withNodePort, internalLocal), "a d"),
		From: "client", To: "node", Want: Want{Reach: "a d"}},
	{Name: "internal Local leaves external IPs alone", Behaviour: "156, 200",
		API:  api(all(withExternal, internalLocal), "a d"),
		From: "c", To: "external", Want: Want{Reach: "a d"}},
	{Name: "internal Local and hairpin", Behaviour: "45, 200",
		API:  api(internalLocal, "a d"),
		From: "a", To: "cluster", Want: Want{Reach: "a", Client: "masqueraded"}},

	// externalTrafficPolicy: behaviour 102.
	{Name: "external Local keeps the client", Behaviour: "102",
		Protocols: tcpUDP, API: api(all(withNodePort, externalLocal), "a d"),
		From: "client", To: "node", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "external Local, load balancer", Behaviour: "102",
		API:  api(all(withLB, externalLocal), "a d"),
		From: "client", To: "lb", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "external Local, external IP", Behaviour: "102, 156",
		API:  api(all(withNodePort, withExternal, externalLocal), "a d"),
		From: "client", To: "external", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "external Local, none here", Behaviour: "102, 103",
		Families: ipv4, API: api(all(withLB, externalLocal), "d"),
		From: "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "external Local, none anywhere", Behaviour: "190",
		API:  api(all(withLB, externalLocal), "d!"),
		From: "client", To: "lb", Want: Want{Refused: true}},
	{Name: "external Local, those here terminate",
		Behaviour: "199",
		API:       api(all(withNodePort, externalLocal), "a~ d"),
		From:      "client", To: "node", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "external Local leaves the ClusterIP alone", Behaviour: "102, 200",
		API:  api(all(withNodePort, externalLocal), "a d"),
		From: "c", To: "cluster", Want: Want{Reach: "a d"}},
	{Name: "external Local, a pod asks the load balancer", Behaviour: "195",
		ClusterCIDRs: true, API: api(all(withLB, externalLocal), "a d"),
		From: "c", To: "lb", Want: Want{Reach: "a d", Client: "kept"}},
	{Name: "external Local, a pod asks the load balancer, none here",
		Behaviour:    "195",
		ClusterCIDRs: true, API: api(all(withLB, externalLocal), "d"),
		From: "c", To: "lb", Want: Want{Reach: "d"}},
	{Name: "external Local, a pod of another node asks the node port, none here", Behaviour: "102, 195",
		Protocols: tcpUDP, ClusterCIDRs: true, API: api(all(withNodePort, externalLocal), "d"),
		From: "e", To: "node", Want: Want{Dropped: true}},
	{Name: "external Local, a pod of another node, those here terminate", Behaviour: "102, 199",
		Protocols: tcpUDP, ClusterCIDRs: true, API: api(all(withNodePort, externalLocal), "a~ d"),
		From: "e", To: "node", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "external Local, the node asks its node port, none here", Behaviour: "195",
		API:  api(all(withNodePort, externalLocal), "d"),
		From: "node", To: "node", Want: Want{Reach: "d"}},
	{Name: "external Local, a host-network endpoint", Behaviour: "102, 208",
		API:  api(all(withNodePort, externalLocal), "node other"),
		From: "client", To: "node", Want: Want{Reach: "node", Client: "kept"}},
	{Name: "external and internal Local", Behaviour: "102, 200",
		API:  api(all(withNodePort, externalLocal, internalLocal), "a d"),
		From: "client", To: "node", Want: Want{Reach: "a", Client: "kept"}},

	// Topology: KEP-2433, KEP-3015.
	{Name: "hints for this zone", Behaviour: "201",
		Protocols: tcpUDP, API: api(nil, "a@zone-1 b@zone-1 d@zone-2"),
		From: "c", To: "cluster", Want: Want{Reach: "a b"}},
	{Name: "hints for an endpoint elsewhere in this zone", Behaviour: "201",
		API:  api(nil, "a@zone-2 d@zone-1"),
		From: "node", To: "cluster", Want: Want{Reach: "d"}},
	{Name: "no hints for this zone", Behaviour: "201",
		API:  api(nil, "a@zone-2 d@zone-3"),
		From: "c", To: "cluster", Want: Want{Reach: "a d"}},
	{Name: "one endpoint without a hint", Behaviour: "201",
		API:  api(nil, "a@zone-1 d"),
		From: "c", To: "cluster", Want: Want{Reach: "a d"}},
	{Name: "an endpoint that is not ready needs no hint", Behaviour: "201",
		API:  api(nil, "a@zone-1 b! d@zone-2"),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "hints for this node", Behaviour: "202",
		API:  api(nil, "a#node d#other"),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "hints for other nodes, then for this zone", Behaviour: "202",
		API:  api(nil, "b#other@zone-1 d#other@zone-2"),
		From: "c", To: "cluster", Want: Want{Reach: "b"}},
	{Name: "hints for no node that is here", Behaviour: "202",
		API:  api(nil, "a#x d#y"),
		From: "c", To: "cluster", Want: Want{Reach: "a d"}},
	{Name: "hints for a node port", Behaviour: "201",
		API:  api(withNodePort, "a@zone-1 d@zone-2"),
		From: "client", To: "node", Want: Want{Reach: "a"}},
	{Name: "hints do not narrow what terminates", Behaviour: "199, 201",
		API:  api(nil, "a~@zone-2 d~@zone-1"),
		From: "c", To: "cluster", Want: Want{Reach: "a d"}},
	{Name: "hints do not narrow policy Local", Behaviour: "201",
		API:  api(all(withNodePort, externalLocal), "a@zone-2 b@zone-1 d@zone-1"),
		From: "client", To: "node", Want: Want{Reach: "a b"}},
	{Name: "hints do not narrow internal Local", Behaviour: "200, 201",
		API:  api(internalLocal, "a@zone-2 d@zone-1"),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},

	// What cannot be an endpoint: behaviours 24, 25.
	{Name: "a loopback endpoint is left out", Behaviour: "24",
		API:  api(nil, "a 127.0.0.1 ::1"),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "nothing but loopback endpoints", Behaviour: "24",
		API:  api(nil, "127.0.0.1 ::1"),
		From: "node", To: "cluster", Want: Want{Refused: true}},
	{Name: "a link-local endpoint is left out", Behaviour: "24",
		API:  api(nil, "a 169.254.1.1 fe80::1"),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "another Service's IP is left out", Behaviour: "25",
		API:  api(nil, "a 10.96.0.77 fd00:10:96::77").beside(clusterIPOf("10.96.0.77", "fd00:10:96::77")),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},

	// Which Services count: behaviours 32, 79, 88.
	{Name: "another proxy's Service", Behaviour: "205",
		Families: ipv4, API: api(label("service.kubernetes.io/service-proxy-name"), "a"),
		From: "c", To: "cluster", Want: Want{Dropped: true}},
	{Name: "a Service labelled headless", Behaviour: "206",
		Families: ipv4, API: api(label(corev1.IsHeadlessService), "a"),
		From: "c", To: "cluster", Want: Want{Dropped: true}},
	{Name: "a headless Service", Behaviour: "79",
		Families: ipv4, API: api(headless, "a"),
		From: "c", To: "cluster", Want: Want{Dropped: true}},
	{Name: "ExternalName", Behaviour: "32, 88",
		API:  api(externalName, "a"),
		From: "c", To: "cluster", Want: Want{Dropped: true}},
	{Name: "a Service of another namespace with the name", Behaviour: "9",
		API:  api(nil, "a").beside(all(clusterIPOf("10.96.0.78", "fd00:10:96::78"), namespaced("elsewhere", "web"))),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},

	// Load balancers: behaviours 97, 98, 101.
	{Name: "ipMode VIP", Behaviour: "97, 204",
		API:  api(all(withLB, ipMode(corev1.LoadBalancerIPModeVIP)), "a d"),
		From: "c", To: "lb", Want: Want{Reach: "a d"}},
	{Name: "ipMode Proxy goes out", Behaviour: "97, 204",
		Families: ipv4, API: api(all(withLB, ipMode(corev1.LoadBalancerIPModeProxy)), "a"),
		From: "c", To: "lb", Want: Want{Dropped: true}},
	{Name: "a load balancer known by name, node port", Behaviour: "97, 98",
		API:  api(all(withLB, lbByName), "a d"),
		From: "client", To: "node", Want: Want{Reach: "a d"}},
	{Name: "a load balancer without node ports", Behaviour: "91, 97",
		API:  api(all(withLB, withoutNodePort), "a d"),
		From: "client", To: "lb", Want: Want{Reach: "a d"}},
	{Name: "no node port where none was allocated", Behaviour: "91",
		API:  api(all(withLB, withoutNodePort), "a"),
		From: "client", To: "node", Want: Want{Refused: true}},
	{Name: "source ranges let in", Behaviour: "101",
		API:  api(all(withLB, sourceRanges("192.168.0.0/16", "fd00:77::/32")), "a"),
		From: "client", To: "lb", Want: Want{Reach: "a"}},
	{Name: "source ranges keep out", Behaviour: "101",
		Families: ipv4, API: api(all(withLB, sourceRanges("198.51.100.0/24", "2001:db8::/32")), "a"),
		From: "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "source ranges by annotation", Behaviour: "101",
		Families: ipv4, API: api(all(withLB, annotatedRanges(" 198.51.100.0/24 , 2001:db8::/32")), "a"),
		From: "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "source ranges of the field go before the annotation's", Behaviour: "101",
		API:  api(all(withLB, annotatedRanges("198.51.100.0/24,2001:db8::/32"), sourceRanges("192.168.0.0/16", "fd00:77::/32")), "a"),
		From: "client", To: "lb", Want: Want{Reach: "a"}},
	{Name: "source ranges that are none", Behaviour: "101",
		Families: ipv4, API: api(all(withLB, sourceRanges("everybody")), "a"),
		From: "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "source ranges leave the ClusterIP alone", Behaviour: "101",
		API:  api(all(withLB, sourceRanges("198.51.100.0/24", "2001:db8::/32")), "a"),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "source ranges protect an address that is external, too", Behaviour: "101, 156",
		Families: ipv4, API: api(all(withLB, externalLB, sourceRanges("198.51.100.0/24", "2001:db8::/32")), "a"),
		From: "client", To: "lb", Want: Want{Dropped: true}},

	// Who has a contested address.
	{Name: "the older of two Services has the external IP", Behaviour: "194",
		API:  api(withExternal, "a").beside(all(clusterIPOf("10.96.0.79", "fd00:10:96::79"), younger, withExternal)),
		From: "client", To: "external", Want: Want{Reach: "a"}},
	{Name: "no external IP takes a ClusterIP", Behaviour: "156, 194",
		API:  api(younger, "a").beside(wantsClusterIP),
		From: "c", To: "cluster", Want: Want{Reach: "a"}},

	// Affinity: behaviours 61, 62.
	{Name: "ClientIP affinity",
		Behaviour: "61",
		Protocols: tcpUDP, API: api(sticky, "a b d e"),
		From: "c", To: "cluster", Want: Want{Reach: "a b d e", Same: true}},
	{Name: "ClientIP affinity with a time", Behaviour: "62",
		API:  api(stickyFor(3600), "a b d e"),
		From: "node", To: "cluster", Want: Want{Reach: "a b d e", Same: true}},
	{Name: "ClientIP affinity, node port",
		Behaviour: "61",
		API:       api(all(withNodePort, sticky), "a b d e"),
		From:      "client", To: "node", Want: Want{Reach: "a b d e", Same: true}},
	{Name: "ClientIP affinity, load balancer, policy Local",
		Behaviour: "61, 102",
		API:       api(all(withLB, externalLocal, sticky), "a b d e"),
		From:      "client", To: "lb", Want: Want{Reach: "a b", Same: true, Client: "kept"}},
	{Name: "ClientIP affinity, internal Local", Behaviour: "61, 200",
		API:  api(all(internalLocal, sticky), "a b d e"),
		From: "c", To: "cluster", Want: Want{Reach: "a b", Same: true}},
	{Name: "ClientIP affinity to what terminates", Behaviour: "61, 199",
		API:  api(sticky, "a~ b~ d!"),
		From: "c", To: "cluster", Want: Want{Reach: "a b", Same: true}},
	{Name: "no affinity",
		Behaviour: "61",
		API:       api(notSticky, "a b"),
		From:      "c", To: "cluster", Want: Want{Reach: "a b"}},

	// Masquerading: behaviours 50, 52, 54.
	{Name: "masquerade all, hairpin", Behaviour: "198",
		MasqueradeAll: true, API: api(nil, "a"),
		From: "a", To: "cluster", Want: Want{Reach: "a", Client: "masqueraded"}},
	{Name: "masquerade all, host-network pod elsewhere", Behaviour: "198",
		MasqueradeAll: true, API: api(nil, "other d"),
		From: "c", To: "cluster", Want: Want{Reach: "other d", Client: "masqueraded"}},
	{Name: "masquerade all, from outside", Behaviour: "198",
		MasqueradeAll: true, API: api(nil, "a d"),
		From: "client", To: "cluster", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "masquerade all leaves policy Local alone", Behaviour: "102, 198",
		MasqueradeAll: true, API: api(all(withNodePort, externalLocal), "a"),
		From: "client", To: "node", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "a pod of another node, pod ranges known", Behaviour: "50, 54",
		ClusterCIDRs: true, API: api(nil, "a b"),
		From: "e", To: "cluster", Want: Want{Reach: "a b", Client: "kept"}},
	{Name: "another node, pod ranges known", Behaviour: "197",
		ClusterCIDRs: true, API: api(nil, "a b"),
		From: "other", To: "cluster", Want: Want{Reach: "a b", Client: "masqueraded"}},
	{Name: "a host-network pod to a host-network pod", Behaviour: "51, 208",
		Protocols: tcpUDP, API: api(nil, "node other"),
		From: "node", To: "cluster", Want: Want{Reach: "node other"}},
	{Name: "a pod of another node to a load balancer IP", Behaviour: "97, 98",
		API:  api(withLB, "a d"),
		From: "e", To: "lb", Want: Want{Reach: "a d"}},
}
