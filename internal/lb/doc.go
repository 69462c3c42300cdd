// Package lb gives addresses to Services of type LoadBalancer and announces them: a
// controller, of which one works in a cluster, and a speaker on each node. Pools,
// votes and the protocols are in packages of their own; docs/design/007 has the whole.
package lb
