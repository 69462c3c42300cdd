// Package endpoint is the storage of core/v1 Endpoints and discovery.k8s.io/v1
// EndpointSlice.
package endpoint
