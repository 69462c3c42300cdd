// Package service is the storage of core/v1 Service: defaults, validation and
// the rules between its fields. Package allocator gives it cluster IPs and node
// ports.
//
// The order of one write:
//
//	defaults ─► begin: families, claims ─► prepare, validation, admission ─► etcd ─► settle: commit, revert or abandon
package service
