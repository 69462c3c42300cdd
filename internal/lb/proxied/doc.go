// Package proxied is the proxied way of a load balancer: it accepts connections at the addresses
// of Services, ends TLS, speaks the PROXY protocol, and carries bytes to Pods that it chooses
// and checks. It knows no API: it is given the whole wanted state by Server.Set.
package proxied
