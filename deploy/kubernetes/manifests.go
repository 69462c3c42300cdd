// Package kubernetes holds manifests of fairlead's components for a real Kubernetes, and tests them.
package kubernetes

import _ "embed" // the manifests are files

// Proxy is proxy.yaml, which 'fairlead migrate' applies.
//
//go:embed proxy.yaml
var Proxy []byte
