// Package reliability runs three servers and five nodes as processes on machines of the
// testbed, breaks one after the other, and checks what users see of it: the requests of
// clients on nodes, in Pods and outside of the cluster, and the history of the API.
package reliability
