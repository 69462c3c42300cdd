package flows

// HostPortRows are questions of Pods with hostPort: behaviour 209.
var HostPortRows = []Row{
	{Name: "host port from outside", Behaviour: "209",
		Protocols: everything, API: hostPort("a", ""),
		From: "client", To: "node", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "host port from a pod of the node", Behaviour: "209",
		Protocols: tcpUDP, API: hostPort("a", ""),
		From: "c", To: "node", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "host port from a pod of another node", Behaviour: "209",
		API:  hostPort("a", ""),
		From: "e", To: "node", Want: Want{Reach: "a"}},
	{Name: "host port from the pod itself", Behaviour: "207, 209",
		API:  hostPort("a", ""),
		From: "a", To: "node", Want: Want{Reach: "a", Client: "masqueraded"}},
	{Name: "host port from the node itself", Behaviour: "209",
		Protocols: tcpUDP, API: hostPort("a", ""),
		From: "node", To: "node", Want: Want{Reach: "a"}},
	{Name: "host port on 127.0.0.1", Behaviour: "209",
		Protocols: tcpUDP, Families: ipv4, API: hostPort("a", ""),
		From: "node", To: "loopback", Want: Want{Reach: "a"}, Lacks: notFromLoopback},
	{Name: "host port on the node's address alone", Behaviour: "209",
		Protocols: tcpUDP, API: hostPort("a", "node"),
		From: "client", To: "node", Want: Want{Reach: "a", Client: "kept"}},
	{Name: "host port on 127.0.0.1 alone, from there", Behaviour: "209",
		Families: ipv4, API: hostPort("a", "loopback"),
		From: "node", To: "loopback", Want: Want{Reach: "a"}, Lacks: notFromLoopback},
	{Name: "host port on 127.0.0.1 alone, from outside", Behaviour: "209",
		Families: ipv4, API: hostPort("a", "loopback"),
		From: "client", To: "node", Want: Want{Refused: true}},
	{Name: "host port of a node port", Behaviour: "86, 209",
		API:  &API{Service: withNodePort, Slices: []string{"d"}, Pod: "a"},
		From: "client", To: "node", Want: Want{Reach: "d"}},
}

func hostPort(pod, hostIP string) *API { return &API{Pod: pod, HostIP: hostIP} }
