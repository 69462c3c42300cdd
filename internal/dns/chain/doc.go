// Package chain is the DNS server of 'fairlead dns --corefile': it puts the plugins of each
// server block of a plan together, and answers each question by the chain of the most
// specific zone of its listener, as CoreDNS does.
//
// What serves at one moment is an instance, which is never changed. A changed Corefile makes a
// new instance, which takes over sockets and the names of the cluster where they are the
// same; if it cannot be made, the old one serves on.
package chain
