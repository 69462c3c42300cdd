// Package acme orders the certificates of load balancers from an authority that speaks ACME (RFC 8555). One process of the
// cluster does that. It keeps a certificate, and while it is ordered the certificates of its challenges (TLS-ALPN-01, RFC
// 8737), in the TLS Secret that the Service names: nodes read that Secret anyway, and whichever one has the address answers
// the authority.
package acme
