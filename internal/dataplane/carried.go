package dataplane

// Carried is what an Applier that carries connections itself has done.
type Carried struct {
	// Connections and UDPFlows are those open now.
	Connections, UDPFlows int64
	// FailingEndpoints are the endpoints that did not answer when they were tried last,
	// once for each port of a Service that has them.
	FailingEndpoints int64

	// What follows counts since the start of the process.

	// Accepted are connections, Retried the connections among them that went on to another
	// endpoint, Failed the connections that no endpoint answered.
	Accepted, Retried, Failed int64
	// EndpointFailures is how often an endpoint did not answer.
	EndpointFailures int64
	// Paused is how often new connections had to wait for want of open files.
	Paused int64
	// ToEndpoints and ToClients are bytes.
	ToEndpoints, ToClients int64
}

// Carrier is an Applier whose process carries the connections. Carried may be
// called at any time, beside the other methods.
type Carrier interface {
	Carried() Carried
}
