package svc

// The labels and annotations that one component of the system writes and
// another reads.
const (
	// NodeLabel on an EndpointSlice names the node that the slice's endpoints
	// live and die with. The DNS server of a node sets it; the node lifecycle
	// controller removes the slices of a node that is gone.
	NodeLabel = "fairlead.dev/node"
	// ServingCertAnnotation on a Node is the SHA-256, in hex, of the
	// certificate (DER) that the node's agent serves with. The agent sets it;
	// the API server accepts no other certificate from the agent.
	ServingCertAnnotation = "fairlead.dev/serving-cert-sha256"
)
