// Package v1 has the API types of group fairlead.dev/v1, with which addresses for
// LoadBalancers are configured and shown: IPAddressPool, BGPPeer and Speaker. All are
// cluster-scoped. Their CustomResourceDefinitions are in crds/, with the rules that the
// API server checks. Beside them is what a Service says of load balancers to all parts.
package v1
