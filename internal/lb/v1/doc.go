// Package v1 has the API types of group fairlead.dev/v1, with which addresses for
// LoadBalancers are configured and shown: IPAddressPool, BGPPeer and Speaker. All are
// cluster-scoped. Their CustomResourceDefinitions are in crds/, with the rules that the
// API server checks. Beside them are predicates of Services that all parts share.
package v1
