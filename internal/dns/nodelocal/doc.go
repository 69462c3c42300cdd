// Package nodelocal lets a server of this node answer at an address that others
// know as a Service's, without connection tracking: the address becomes one of
// the node's own by a route, and packets to and from its port are marked
// "notrack" before any rule that translates addresses sees them.
//
// The rules ask the kernel whether a socket is bound there. When the server has
// ended, even by a crash, packets are tracked again and go to the other servers of
// the Service: the servers in Config.Others, else where the node's proxy sends
// them.
//
// All of it is in the nft table inet fairlead-dns, in the network namespace of
// the calling thread, and works beside any mode of the proxy.
package nodelocal
