// Package service is the storage of core/v1 Service: defaults, validation,
// the rules between its fields, and the allocation of cluster IPs and node
// ports.
//
// Whoever creates an object of a certain name first owns it; allocation is
// built on that alone. A cluster IP is claimed by creating the IPAddress named
// after it, a node port by creating an unexposed object named after it. What is
// taken is also known in memory, fed by watches, but only to choose candidates:
// any number of servers may run on one etcd. A claim comes before the Service
// that needs it, so that a crash in between leaves a claim without a Service,
// which the repair loop frees, and never a Service without a claim.
//
// The order of one write:
//
//	defaults ─► begin: families, claims ─► prepare, validation, admission ─► etcd ─► settle: commit, revert or neither
package service
