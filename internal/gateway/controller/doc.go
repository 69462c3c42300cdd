// Package controller makes a LoadBalancer Service of each Gateway and of all Ingresses together, and writes the statuses of the
// objects: one write of an object for each change. What the statuses are, package gateway decides.
package controller
