// Package logship uploads the access logs of load balancers to buckets of S3. The files in a node's directory are the
// spool: one is removed when it is stored, and not before, so that nothing is lost when the process ends, or while the
// endpoint is away.
package logship
