// Package controller reconciles the API: Endpoints and EndpointSlices of
// Services, Pods on Nodes, unreachable Nodes, pod ranges of Nodes, namespaces
// being deleted, objects without owners. A controller is a queue, one pure
// decision and a write; the decisions about endpoints are package epslice's.
//
// Run starts any set of them by name on one connection and one set of
// informers. Several processes may run the same controllers: a Lease elects
// the one that works. Should two work at a time, they still converge, because
// every write carries the version it was decided on and the names of new objects
// follow from what they are for.
package controller
