package flows

import (
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

const (
	clusterIP  = table.ClusterIP
	externalIP = table.ExternalIP
	lbIP       = table.LoadBalancerIP
	nodePorts  = table.NodePort
)

// notFromLoopback excuses mode ipvs.
var notFromLoopback = map[string]string{
	"ipvs": "the kernel's IPVS drops what comes from 127.0.0.0/8 and would leave by another interface than lo (dataplane/ipvs/README.md)",
}

// bridge is where packets of the node's pods come from.
var bridge = []table.Interface{{Name: "pods"}}

// one is a Service with one frontend.
func one(k table.FrontendKind, to string) []Service {
	return []Service{{Name: "web", Fronts: []Front{{Kind: k, To: to}}}}
}

// with is a Service with the given frontends.
func with(fronts ...Front) []Service { return []Service{{Name: "web", Fronts: fronts}} }

// masqueraded is a Service with one frontend whose clients are masqueraded.
func masqueraded(k table.FrontendKind, to string) []Service {
	return with(Front{Kind: k, To: to, Masquerade: true})
}

// affine is a Service with ClientIP affinity and one frontend.
func affine(f Front) []Service {
	return []Service{{Name: "web", Affinity: time.Hour, Fronts: []Front{f}}}
}

// twoPorts is a Service with a port 80 and a port 81.
var twoPorts = []Service{
	{Name: "web", Fronts: []Front{{Kind: clusterIP, To: "a"}}},
	{Name: "web2", Port: 81, Fronts: []Front{{Kind: clusterIP, To: "b:9377"}}},
}

// bothOn has one port number for TCP, with endpoint a, and for UDP, with b.
// The row asks by the protocol of the first.
func bothOn(k table.FrontendKind, masquerade bool, first, second svc.Protocol) []Service {
	of := func(p svc.Protocol) Service {
		to := map[svc.Protocol]string{svc.TCP: "a", svc.UDP: "b"}[p]
		return Service{Name: "web", Protocol: p, Fronts: []Front{{Kind: k, To: to, Masquerade: masquerade}}}
	}
	return []Service{of(first), of(second)}
}

// Rows is the table. It is not changed.
var Rows = []Row{
	// ClusterIP: behaviours 45, 46, 50, 51.
	{Name: "ClusterIP from the node", Behaviour: "45, 46",
		Protocols: everything, Services: one(clusterIP, "a b d"),
		From: "node", To: "cluster", Want: Want{Reach: "a b d", Client: "kept"}},
	{Name: "ClusterIP from a pod of the node", Behaviour: "45, 50",
		Protocols: everything, Services: one(clusterIP, "a b d"),
		From: "c", To: "cluster", Want: Want{Reach: "a b d", Client: "kept"}},
	{Name: "ClusterIP from an endpoint to the others", Behaviour: "50",
		Protocols: tcpUDP, Services: one(clusterIP, "b d"),
		From: "a", To: "cluster", Want: Want{Reach: "b d", Client: "kept"}},
	{Name: "hairpin", Behaviour: "45, 207",
		Protocols: everything, Services: one(clusterIP, "a"),
		From: "a", To: "cluster", Want: Want{Reach: "a", Client: "masqueraded"}},
	{Name: "hairpin among others", Behaviour: "45, 46",
		Protocols: tcpUDP, Services: one(clusterIP, "a b"),
		From: "a", To: "cluster", Want: Want{Reach: "a b"}},
	{Name: "one endpoint, on the other node", Behaviour: "51",
		Services: one(clusterIP, "d"),
		From:     "node", To: "cluster", Want: Want{Reach: "d"}},
	{Name: "endpoint in the node's own network", Behaviour: "51, 208",
		Protocols: tcpUDP, Services: one(clusterIP, "node"),
		From: "c", To: "cluster", Want: Want{Reach: "node", Client: "kept"}},
	{Name: "node to an endpoint of its own network", Behaviour: "51",
		Protocols: tcpUDP, Services: one(clusterIP, "node"),
		From: "node", To: "cluster", Want: Want{Reach: "node"}},
	{Name: "node to itself with pod ranges known", Behaviour: "51",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: one(clusterIP, "node"),
		From: "node", To: "cluster", Want: Want{Reach: "node"}},
	{Name: "endpoint in the other node's network", Behaviour: "51",
		Protocols: tcpUDP, Services: one(clusterIP, "other"),
		From: "c", To: "cluster", Want: Want{Reach: "other", Client: "kept"}},
	{Name: "ClusterIP from outside", Behaviour: "16",
		Services: one(clusterIP, "a"),
		From:     "client", To: "cluster", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "ClusterIP from outside, pod ranges known", Behaviour: "197",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: one(clusterIP, "a d"),
		From: "client", To: "cluster", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "ClusterIP from a pod, pod ranges known", Behaviour: "50, 54",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: one(clusterIP, "b d"),
		From: "c", To: "cluster", Want: Want{Reach: "b d", Client: "kept"}},
	{Name: "ClusterIP from a pod, known by its bridge", Behaviour: "50, 54",
		PodInterfaces: bridge, Services: one(clusterIP, "b d"),
		From: "c", To: "cluster", Want: Want{Reach: "b d", Client: "kept"}},
	{Name: "ClusterIP from outside, pods known by their bridge", Behaviour: "197",
		PodInterfaces: bridge, Services: one(clusterIP, "a d"),
		From: "client", To: "cluster", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "masquerade all", Behaviour: "198",
		Protocols: tcpUDP, MasqueradeAll: true, Services: one(clusterIP, "b d"),
		From: "c", To: "cluster", Want: Want{Reach: "b d", Client: "masqueraded"}},

	// Ports and protocols: behaviours 10 to 13, 170 to 174.
	{Name: "another port of the endpoint", Behaviour: "10, 12",
		Services: one(clusterIP, "a:9377 b"),
		From:     "c", To: "cluster", Want: Want{Reach: "a:9377 b"}},
	{Name: "two ports of a Service, the first", Behaviour: "13",
		Services: twoPorts,
		From:     "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "two ports of a Service, the second", Behaviour: "13",
		Services: twoPorts,
		From:     "c", To: "cluster:81", Want: Want{Reach: "b:9377"}},
	{Name: "same port number, TCP", Behaviour: "13",
		Services: bothOn(clusterIP, false, svc.TCP, svc.UDP),
		From:     "c", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "same port number, UDP", Behaviour: "13",
		Services: bothOn(clusterIP, false, svc.UDP, svc.TCP),
		From:     "node", To: "cluster", Want: Want{Reach: "b"}},
	{Name: "same node port number, UDP", Behaviour: "13, 92",
		Services: bothOn(nodePorts, true, svc.UDP, svc.TCP),
		From:     "client", To: "node", Want: Want{Reach: "b"}},

	// No endpoints.
	{Name: "no endpoints, from the node", Behaviour: "45, 190",
		Protocols: tcpUDP, Services: one(clusterIP, ""),
		From: "node", To: "cluster", Want: Want{Refused: true}},
	{Name: "no endpoints, from a pod", Behaviour: "190",
		Protocols: everything, Services: one(clusterIP, ""),
		From: "c", To: "cluster", Want: Want{Refused: true}},
	{Name: "no endpoints, from outside", Behaviour: "190",
		Protocols: tcpUDP, Services: one(clusterIP, ""),
		From: "client", To: "cluster", Want: Want{Refused: true}},
	{Name: "no endpoints, node port from outside", Behaviour: "190",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, ""),
		From: "client", To: "node", Want: Want{Refused: true}},
	{Name: "no endpoints, node port from a pod", Behaviour: "190",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, ""),
		From: "c", To: "node", Want: Want{Refused: true}},
	{Name: "no endpoints, node port from the node", Behaviour: "190",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, ""),
		From: "node", To: "node", Want: Want{Refused: true}},
	{Name: "no endpoints, external IP", Behaviour: "156",
		Protocols: tcpUDP, Services: masqueraded(externalIP, ""),
		From: "client", To: "external", Want: Want{Refused: true}},
	{Name: "no endpoints, load balancer IP", Behaviour: "190",
		Protocols: tcpUDP, Services: masqueraded(lbIP, ""),
		From: "client", To: "lb", Want: Want{Refused: true}},
	{Name: "no local endpoints drop, ClusterIP", Behaviour: "191",
		Services: with(Front{Kind: clusterIP, Drop: true}),
		From:     "c", To: "cluster", Want: Want{Dropped: true}},
	{Name: "no local endpoints drop, node port", Behaviour: "102, 103",
		Protocols: tcpUDP, Services: with(Front{Kind: nodePorts, Drop: true, Inside: "d"}),
		From: "client", To: "node", Want: Want{Dropped: true}},
	{Name: "no local endpoints drop, load balancer", Behaviour: "102, 103",
		Services: with(Front{Kind: lbIP, Drop: true, Inside: "d"}),
		From:     "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "another port of a ClusterIP", Behaviour: "192",
		Protocols: tcpUDP, Services: one(clusterIP, "a"),
		From: "c", To: "cluster:81", Want: Want{Refused: true}},
	{Name: "another port of a ClusterIP from the node", Behaviour: "192",
		Protocols: tcpUDP, Services: one(clusterIP, "a"),
		From: "node", To: "cluster:81", Want: Want{Refused: true}},
	{Name: "a service IP without a Service", Behaviour: "193",
		Services: one(clusterIP, "a"),
		From:     "c", To: "unused", Want: Want{Dropped: true}},
	{Name: "a node port without a Service", Behaviour: "92",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "a"),
		From: "client", To: "node:30081", Want: Want{Refused: true}},

	// Node ports: behaviours 52, 54, 92 to 95.
	{Name: "node port from outside", Behaviour: "52, 95",
		Protocols: everything, Services: masqueraded(nodePorts, "a b d"),
		From: "client", To: "node", Want: Want{Reach: "a b d", Client: "masqueraded"}},
	{Name: "node port from the node", Behaviour: "95",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "a d"),
		From: "node", To: "node", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "node port from a pod of the node", Behaviour: "95",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "a d"),
		From: "c", To: "node", Want: Want{Reach: "a d"}},
	{Name: "node port from a pod of the other node", Behaviour: "95",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "a d"),
		From: "e", To: "node", Want: Want{Reach: "a d"}},
	{Name: "node port from its endpoint", Behaviour: "95",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "a"),
		From: "a", To: "node", Want: Want{Reach: "a", Client: "masqueraded"}},
	{Name: "node port from an endpoint elsewhere to itself", Behaviour: "52, D13",
		Services: masqueraded(nodePorts, "d"),
		From:     "d", To: "node", Want: Want{Reach: "d", Client: "masqueraded"}},
	{Name: "node port from the other node", Behaviour: "95",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "a d"),
		From: "other", To: "node", Want: Want{Reach: "a d"}},
	{Name: "node port to the node's own network", Behaviour: "95a",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "node"),
		From: "client", To: "node", Want: Want{Reach: "node"}},
	{Name: "node port on an address that does not count", Behaviour: "93",
		Protocols: tcpUDP, Services: masqueraded(nodePorts, "a"),
		From: "c", To: "node-pods", Want: Want{Refused: true}},
	{Name: "node port on 127.0.0.1", Behaviour: "93, 196",
		Protocols: tcpUDP, Families: ipv4, Loopback: true, Services: masqueraded(nodePorts, "a d node"),
		From: "node", To: "loopback", Want: Want{Reach: "a d node"}, Lacks: notFromLoopback},
	{Name: "node port on 127.0.0.1, policy Local", Behaviour: "93, 102",
		Families: ipv4, Loopback: true, Services: with(Front{Kind: nodePorts, To: "a"}),
		From: "node", To: "loopback", Want: Want{Reach: "a"}, Lacks: notFromLoopback},
	{Name: "no node port on 127.0.0.1 unless asked for", Behaviour: "93",
		Families: ipv4, Services: masqueraded(nodePorts, "a"),
		From: "node", To: "loopback", Want: Want{Refused: true}},

	// External and load balancer IPs: behaviours 97, 156.
	{Name: "external IP from outside", Behaviour: "156",
		Protocols: everything, Services: masqueraded(externalIP, "a d"),
		From: "client", To: "external", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "external IP from a pod", Behaviour: "156",
		Protocols: tcpUDP, Services: masqueraded(externalIP, "a d"),
		From: "c", To: "external", Want: Want{Reach: "a d"}},
	{Name: "external IP from the node", Behaviour: "156",
		Protocols: tcpUDP, Services: masqueraded(externalIP, "a d"),
		From: "node", To: "external", Want: Want{Reach: "a d"}},
	{Name: "external IP from its endpoint", Behaviour: "156",
		Services: masqueraded(externalIP, "a"),
		From:     "a", To: "external", Want: Want{Reach: "a"}},
	{Name: "load balancer IP from outside", Behaviour: "97, 98",
		Protocols: everything, Services: masqueraded(lbIP, "a d"),
		From: "client", To: "lb", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "load balancer IP from a pod", Behaviour: "97",
		Protocols: tcpUDP, Services: masqueraded(lbIP, "a d"),
		From: "c", To: "lb", Want: Want{Reach: "a d"}},
	{Name: "load balancer IP from the node", Behaviour: "97",
		Services: masqueraded(lbIP, "a d"),
		From:     "node", To: "lb", Want: Want{Reach: "a d"}},
	{Name: "another port of a load balancer IP", Behaviour: "97",
		Services: masqueraded(lbIP, "a"),
		From:     "c", To: "lb:81", Want: Want{Dropped: true}},
	{Name: "two Services want one external IP", Behaviour: "194",
		Services: []Service{
			{Name: "zoo", Fronts: []Front{{Kind: externalIP, To: "b", Masquerade: true}}},
			{Name: "ant", Fronts: []Front{{Kind: externalIP, To: "a", Masquerade: true}}},
		},
		From: "client", To: "external", Want: Want{Reach: "a"}},

	// externalTrafficPolicy Local: behaviour 102.
	{Name: "Local: node port from outside", Behaviour: "102",
		Protocols: tcpUDP, Services: with(Front{Kind: nodePorts, To: "a b", Inside: "a b d"}),
		From: "client", To: "node", Want: Want{Reach: "a b", Client: "kept"}},
	{Name: "Local: node port from the node", Behaviour: "195",
		Protocols: tcpUDP, Services: with(Front{Kind: nodePorts, To: "a", Inside: "a d"}),
		From: "node", To: "node", Want: Want{Reach: "a d"}},
	{Name: "Local: node port from a pod", Behaviour: "195",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: with(Front{Kind: nodePorts, To: "a", Inside: "a d"}),
		From: "c", To: "node", Want: Want{Reach: "a d", Client: "kept"}},
	{Name: "Local: node port from a pod, known by the beginning of its interface", Behaviour: "195",
		PodInterfaces: []table.Interface{{Name: "pod", Prefix: true}}, Services: with(Front{Kind: nodePorts, To: "a", Inside: "a d"}),
		From: "c", To: "node", Want: Want{Reach: "a d", Client: "kept"}},
	{Name: "Local: load balancer from outside", Behaviour: "102",
		Protocols: tcpUDP, Services: with(Front{Kind: lbIP, To: "a", Inside: "a d"}),
		From: "client", To: "lb", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "Local: load balancer from a pod", Behaviour: "195",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: with(Front{Kind: lbIP, To: "a", Inside: "a d"}),
		From: "c", To: "lb", Want: Want{Reach: "a d", Client: "kept"}},
	{Name: "Local: load balancer from the node", Behaviour: "195",
		ClusterCIDRs: true, Services: with(Front{Kind: lbIP, To: "a", Inside: "a d"}),
		From: "node", To: "lb", Want: Want{Reach: "a d"}},
	{Name: "Local: none here, from a pod", Behaviour: "195",
		ClusterCIDRs: true, Services: with(Front{Kind: lbIP, Drop: true, Inside: "d"}),
		From: "c", To: "lb", Want: Want{Reach: "d"}},
	{Name: "Local: none here, from the node", Behaviour: "195",
		Services: with(Front{Kind: nodePorts, Drop: true, Inside: "d"}),
		From:     "node", To: "node", Want: Want{Reach: "d"}},
	{Name: "Local: none here, from a pod of another node", Behaviour: "102",
		Protocols: tcpUDP, Services: with(Front{Kind: nodePorts, Drop: true, Inside: "a d"}),
		From: "d", To: "node", Want: Want{Dropped: true}},
	{Name: "Local: none here, from a pod of another node, pod ranges known", Behaviour: "102, 195",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: with(Front{Kind: nodePorts, Drop: true, Inside: "a d"}),
		From: "e", To: "node", Want: Want{Dropped: true}},
	{Name: "Local: load balancer, none here, from a pod of another node", Behaviour: "102, 195",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: with(Front{Kind: lbIP, Drop: true, Inside: "d"}),
		From: "e", To: "lb", Want: Want{Dropped: true}},
	{Name: "Local: load balancer from a pod of another node", Behaviour: "102, 195",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: with(Front{Kind: lbIP, To: "a", Inside: "a d"}),
		From: "e", To: "lb", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "Local: none anywhere, from a pod", Behaviour: "190",
		Protocols: tcpUDP, ClusterCIDRs: true, Services: with(Front{Kind: lbIP, Inside: "-"}),
		From: "c", To: "lb", Want: Want{Refused: true}},
	{Name: "Local: none anywhere, from outside", Behaviour: "190",
		Protocols: tcpUDP, Services: with(Front{Kind: lbIP, Inside: "-"}),
		From: "client", To: "lb", Want: Want{Refused: true}},
	{Name: "Local: external IP from outside", Behaviour: "102, 156",
		Services: with(Front{Kind: externalIP, To: "b", Inside: "b d"}),
		From:     "client", To: "external", Want: Want{Reach: "b", Client: "kept"}},
	{Name: "Local: hairpin", Behaviour: "102",
		ClusterCIDRs: true, Services: with(Front{Kind: lbIP, To: "a", Inside: "a"}),
		From: "a", To: "lb", Want: Want{Reach: "a"}},

	// Source ranges: behaviour 101.
	{Name: "source range lets in", Behaviour: "101",
		Protocols: tcpUDP, Services: with(Front{Kind: lbIP, To: "a d", Masquerade: true, Ranges: []string{"client"}}),
		From: "client", To: "lb", Want: Want{Reach: "a d"}},
	{Name: "source range keeps out", Behaviour: "101",
		Protocols: tcpUDP, Services: with(Front{Kind: lbIP, To: "a", Masquerade: true, Ranges: []string{"d"}}),
		From: "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "source ranges by prefix", Behaviour: "101",
		Services: with(Front{Kind: lbIP, To: "a", Masquerade: true, Ranges: []string{"192.168.0.0/17", "fd00:77::/63", "198.51.100.0/24"}}),
		From:     "client", To: "lb", Want: Want{Reach: "a"}},
	{Name: "source ranges just missed", Behaviour: "101",
		Services: with(Front{Kind: lbIP, To: "a", Masquerade: true, Ranges: []string{"192.168.128.0/17", "fd00:78::/32", "198.51.100.0/24"}}),
		From:     "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "all source ranges", Behaviour: "101",
		Services: with(Front{Kind: lbIP, To: "a", Masquerade: true, Ranges: []string{"0.0.0.0/0", "::/0"}}),
		From:     "client", To: "lb", Want: Want{Reach: "a"}},
	{Name: "no source ranges of this family", Behaviour: "101",
		Services: with(Front{Kind: lbIP, To: "a", Masquerade: true, Ranges: []string{}}),
		From:     "client", To: "lb", Want: Want{Dropped: true}},
	{Name: "source ranges leave the node port alone", Behaviour: "101",
		Services: with(
			Front{Kind: nodePorts, To: "a", Masquerade: true},
			Front{Kind: lbIP, To: "a", Masquerade: true, Ranges: []string{"d"}}),
		From: "client", To: "node", Want: Want{Reach: "a"}},
	{Name: "source range and policy Local", Behaviour: "101, 102",
		Services: with(Front{Kind: lbIP, To: "a", Inside: "a d", Ranges: []string{"client"}}),
		From:     "client", To: "lb", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "source range keeps pods out too", Behaviour: "101",
		ClusterCIDRs: true, Services: with(Front{Kind: lbIP, To: "a", Inside: "a d", Ranges: []string{"client"}}),
		From: "c", To: "lb", Want: Want{Dropped: true}},

	// Affinity: behaviours 61, 62.
	{Name: "affinity to a ClusterIP", Behaviour: "61",
		Protocols: everything, Services: affine(Front{Kind: clusterIP, To: "a b d e"}),
		From: "c", To: "cluster", Want: Want{Reach: "a b d e", Same: true, Client: "kept"}},
	{Name: "affinity from the node", Behaviour: "61",
		Services: affine(Front{Kind: clusterIP, To: "a b d e"}),
		From:     "node", To: "cluster", Want: Want{Reach: "a b d e", Same: true}},
	{Name: "affinity to a node port", Behaviour: "61",
		Protocols: tcpUDP, Services: affine(Front{Kind: nodePorts, To: "a b d e", Masquerade: true}),
		From: "client", To: "node", Want: Want{Reach: "a b d e", Same: true, Client: "masqueraded"}},
	{Name: "affinity with policy Local, from outside", Behaviour: "61, 102",
		Services: affine(Front{Kind: lbIP, To: "a b", Inside: "a b d e"}),
		From:     "client", To: "lb", Want: Want{Reach: "a b", Same: true, Client: "kept"}},
	{Name: "affinity with policy Local, from a pod", Behaviour: "61, 102",
		ClusterCIDRs: true, Services: affine(Front{Kind: nodePorts, To: "a", Inside: "a b d e"}),
		From: "c", To: "node", Want: Want{Reach: "a b d e", Same: true}},
	{Name: "affinity of a hairpin", Behaviour: "61",
		Services: affine(Front{Kind: clusterIP, To: "a"}),
		From:     "a", To: "cluster", Want: Want{Reach: "a"}},
	{Name: "affinity without endpoints", Behaviour: "61",
		Services: affine(Front{Kind: clusterIP}),
		From:     "c", To: "cluster", Want: Want{Refused: true}},

	// All at once.
	{Name: "all kinds at once, ClusterIP", Behaviour: "91",
		Services: nested,
		From:     "c", To: "cluster", Want: Want{Reach: "a d", Client: "kept"}},
	{Name: "all kinds at once, node port", Behaviour: "91",
		Services: nested,
		From:     "client", To: "node", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "all kinds at once, load balancer", Behaviour: "91",
		Services: nested,
		From:     "client", To: "lb", Want: Want{Reach: "a d", Client: "masqueraded"}},
	{Name: "all kinds at once, external IP", Behaviour: "91",
		Services: nested,
		From:     "client", To: "external", Want: Want{Reach: "a d", Client: "masqueraded"}},
}

// nested is a LoadBalancer Service, which is a NodePort one and a ClusterIP one
// too (behaviour 91).
var nested = with(
	Front{Kind: clusterIP, To: "a d"}, Front{Kind: externalIP, To: "a d", Masquerade: true},
	Front{Kind: lbIP, To: "a d", Masquerade: true}, Front{Kind: nodePorts, To: "a d", Masquerade: true},
)
