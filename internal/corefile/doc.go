// Package corefile reads CoreDNS's configuration file, the Corefile, into a plan:
// for each server block its zones, its addresses, and the chain of its plugins in
// the order in which CoreDNS runs them, which is not that of the file (plugin.cfg).
//
// Load reads the file and the files that it imports, and nothing else: the package
// opens no sockets and starts nothing. What the DNS server cannot do is refused
// here, with file and line and a remedy, so that a server that starts does what
// the file asks for.
//
// Syntax and defaults are CoreDNS's (v1.15, https://coredns.io/manual/configuration/).
package corefile
