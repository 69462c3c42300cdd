// Package zone holds the names of a cluster and answers questions about them
// as the Kubernetes DNS specification 1.1.0 says.
//
// Answers are made when an object changes, not when a question comes: a name
// is a node of a lock-free index and holds its records in the form in which
// they stand in a packet. Answering is one look-up and one copy. A change of
// one Service or EndpointSlice rewrites the names of that Service and no other.
//
// The package is pure: no sockets, no clock, no goroutines. Package dns reads
// packets, calls Answer and forwards names outside the cluster.
//
// What the specification leaves open is done as CoreDNS does it, since that is
// what programs in clusters rely on:
//
//   - SRV questions for the name of a Service itself list all its ports;
//   - endpoints of a Service with a cluster IP have names and PTR records too;
//   - a headless Service without a ready endpoint does not exist (NXDOMAIN);
//   - weights of SRV records are 100 divided by the number of addresses.
//
// Where CoreDNS departs from the DNS itself this package does not: an empty
// non-terminal such as _tcp.web.prod.svc answers NODATA, _http._tcp.web has no
// A record, and an ExternalName answers every type with its CNAME.
package zone
