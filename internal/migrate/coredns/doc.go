// Package coredns decides how a Kubernetes cluster changes from CoreDNS to fairlead dns, and back: what differs, what is refused,
// the Deployment that takes CoreDNS's place, and the steps from one phase to the next.
//
// The Service keeps its address and its selector. The Pods of fairlead get the labels that it selects when their answers are
// equal to CoreDNS's, and CoreDNS is scaled to 0 when the Service has their addresses. A server that ends answers until the
// nodes no longer send to it (health, lameduck), so no question is lost.
//
// The package is pure: objects go in, decisions and objects come out. The package walk takes the steps.
package coredns
