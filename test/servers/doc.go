// Package servers tests several API servers on one etcd cluster: processes that
// are killed at random while many clients create and delete Services, and a
// checker of everything the store went through.
package servers
