// Package controller holds the loops that keep the API right: endpoints and
// EndpointSlices behind Services, Pods on Nodes, Nodes that died, pod ranges of
// Nodes, namespaces being deleted. A loop is a queue, one pure decision and a
// write; the decisions about endpoints are package epslice's.
//
// Run starts any set of them by name on one connection and one set of
// informers. Several processes may run the same controllers: a Lease elects
// the one that works. Should two work by mistake, they still converge, because
// every write carries the version it was decided on and new objects have names
// that follow from what they are for.
package controller
