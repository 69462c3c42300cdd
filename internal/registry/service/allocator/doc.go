// Package allocator gives cluster IPs and node ports to Services.
//
// Whoever creates an object of a certain name first owns it; allocation is
// built only on that. A cluster IP is claimed by creating the IPAddress named
// after it, a node port by creating an unexposed object named after it. What is
// taken is also known in memory, fed by watches, but only to choose candidates:
// any number of servers may run on one etcd.
//
// A write of a Service goes through three steps:
//
//	PlanCreate or PlanUpdate ─► Begin ─► etcd ─► Commit, Revert or Abandon
//
// The plan is a pure function of the Service. Begin claims what the plan
// requests and fills it into the Service. A claim comes before the Service that
// needs it, so that a crash in between leaves a claim without a Service, which
// the repair loop frees, and never a Service without a claim. For the same
// reason nothing is released while the result of a write is unknown.
package allocator
