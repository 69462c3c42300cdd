package explain

// remedies are what to do about each cause.
var remedies = map[Cause]string{
	NoService:       "check the name, namespace, address and port that the client uses against 'kubectl get services -A'",
	NoEndpoint:      "give the Pods the labels of spec.selector, or change the selector; without a selector, write an EndpointSlice",
	Unready:         "look at the Pod: 'kubectl describe pod' shows its readiness probe and Events, 'kubectl logs' what it prints",
	Terminating:     "wait for new Pods, or scale the workload up: all that are left are about to end",
	WrongTargetPort: "set targetPort to the port, or the name of a port, on which the Pods listen; they must listen on more than 127.0.0.1",
	PolicyLocal:     "run a Pod of the Service on that node, connect to a node that has one, or set the traffic policy to Cluster",
	SourceRange:     "add the client to spec.loadBalancerSourceRanges, as the address with which its packets arrive",
	WeightZero:      "give a Pod a fairlead.dev/weight above 0, or remove the annotation",
	AffinityDead:    "restart or remove the endpoint that does not answer; other clients are served",
	Rejected:        "look at the log of the node's agent, and for another program that writes rules there",
	NameUnknown:     "check the spelling of the name and its namespace, and the search path of the client",
	NoRoute:         "check the route from the node to the endpoint, and firewalls and NetworkPolicies between them",
}

// Remedy is what to do about a cause, in one line; empty for no cause.
func (c Cause) Remedy() string { return remedies[c] }
