// Package acme orders the certificates of load balancers from an authority that speaks ACME (RFC 8555), and renews them when the
// authority suggests (RFC 9773). One process of the cluster does that. It keeps a certificate, and while it is ordered what
// answers its challenges (TLS-ALPN-01, RFC 8737, and HTTP-01), in the TLS Secret that the Service, Gateway or Ingress names: nodes read it
// anyway, and whichever one has the address answers the authority. Records of DNS-01 it sets itself.
package acme
