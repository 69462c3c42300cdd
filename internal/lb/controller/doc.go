// Package controller gives addresses to Services of type LoadBalancer. One controller works in a cluster: it hands out
// the addresses of IPAddressPools, records them as claims, publishes them, keeps the list of the speakers that vote, and
// reports what no node can announce.
package controller
