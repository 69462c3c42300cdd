// Package proxied is the proxied way of a load balancer: it accepts connections at the addresses
// of Services, ends TLS, speaks the PROXY protocol, and carries bytes to Pods that it chooses
// and checks. It does not read the API: Server.Set gives it the whole desired state.
package proxied
