// Package proxy is the node's control loop for Services: the API's objects become a
// table.Table, and a dataplane.Applier makes the kernel carry it out. What is the same
// for every mode lives here and only here: debounce, retry, audit, stale
// connection tracking entries, health check ports, events, metrics and status.
//
//	watches ─► feed ─► table.Builder ─► plane.Apply ─► stale conntrack entries
//	                                        └─► health check ports, metrics, status
//
// Everything from the feed on is one goroutine, so that nothing but the feed
// and the status needs a lock.
package proxy
