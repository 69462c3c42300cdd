// Package relay carries connections and datagrams between clients and
// endpoints in user space. A fixed number of threads, each with an epoll of its
// own, does all of it: a connection costs no goroutine, and no buffer while it
// has nothing under way. Few bytes are copied through one buffer of the
// thread; many go by splice(2) through pipes that connections borrow.
//
// Which endpoint a connection goes to is the business of a Target; a Gate decides
// about each connection by itself, as a load balancer needs.
package relay
