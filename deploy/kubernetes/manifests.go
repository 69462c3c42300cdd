// Package kubernetes holds manifests of fairlead's components for a real Kubernetes, and tests them.
package kubernetes

import _ "embed" // the manifests are files

// Proxy is proxy.yaml, which 'fairlead migrate' applies.
//
//go:embed proxy.yaml
var Proxy []byte

// DNS is dns.yaml, from which 'fairlead migrate --component dns' makes what it applies.
//
//go:embed dns.yaml
var DNS []byte

// LB is lb.yaml, from which 'fairlead migrate --component lb' makes what it applies.
//
//go:embed lb.yaml
var LB []byte
