// Package rbac stores the roles and bindings of rbac.authorization.k8s.io and
// answers by them who may do what.
//
// Storage keeps the objects, with the rule that a user grants no more than he
// has (escalate.go). Resolver reads them from informers, found by subject, so
// that a decision costs by the bindings of its user (resolve.go). Reconcile
// brings the roles that are always there (reconcile.go),
// and Aggregator keeps the ClusterRoles that are made of others (aggregate.go).
package rbac
