// Package coredns decides how a Kubernetes cluster changes from CoreDNS to fairlead dns, and back: what differs, what is refused,
// the Deployment that takes CoreDNS's place, and the steps from one phase to the next.
//
// The Service keeps its address. The Pods of fairlead get the labels that it selects when their answers are equal to CoreDNS's.
// When it leads to them, it selects no other Pods until CoreDNS has ended, and then what it selected before.
//
// A server leaves the Service while it still answers: kube-proxy forgets the UDP flows to an address that a Service has no longer,
// and a client that uses a port again would reach a server that has ended until then. What is lost is at most the question that
// is under way at that moment, which resolvers ask again.
//
// The package is pure: objects go in, decisions and objects come out. The package walk takes the steps.
package coredns
