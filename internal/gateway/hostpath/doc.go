// Package hostpath has the one form of hosts and paths by which requests are compared with rules, and finds what belongs to the
// most specific pattern for a host. It is pure.
package hostpath
