// Package watch follows the objects of the Gateway API and Ingresses, and keeps the fronts that package gateway builds from
// them. The controller and the nodes that serve use it. It follows what depends on a Gateway or an Ingress only once there is
// one of our class.
package watch
