// Package gateway decides what the objects of the Gateway API and Ingresses mean: it returns the route table of each front
// and the status of each object. It has no client, clock or lock; its results do not change once they are returned.
//
// A front is an address with ports: that of one Gateway, of one Ingress, or the one that Ingresses share (package fronts). Read paths.go,
// hosts.go and table.go for the table and its lookup, then objects.go, listeners.go, routes.go and ingress.go for how it
// comes about.
package gateway
