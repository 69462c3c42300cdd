// Package migrate decides how the nodes of a Kubernetes cluster change from kube-proxy to fairlead proxy, and back: what differs,
// what is refused, and the steps of a node from one phase to the next. The phase of a node is a label of it, so that an
// interrupted command is continued by the next one, from any machine.
//
// The rules of both programs may be in one kernel: the first hook that has a rule for a new connection translates it, what it has
// no rule for goes on to the next, and connection tracking keeps the translation of the established ones. So a node's new rules
// are written and checked while the old ones still work, and the old ones are removed last.
//
// The package is pure: objects go in, steps and objects come out. The package walk takes the steps.
package migrate
