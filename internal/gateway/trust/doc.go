// Package trust decides by which certificates backends and clients of a Gateway are verified: which BackendTLSPolicy counts for a
// port of a Service, and which ConfigMaps and Secrets with authorities can be used. It is pure.
package trust
