// Package networking is the storage of networking.k8s.io/v1 IPAddress and
// ServiceCIDR, and the loop that gives a ServiceCIDR its conditions and keeps
// one that is in use from going away.
//
// An IPAddress is the claim of one address: its name is the address, so that
// only one can exist. Package service creates one for each cluster IP; users
// may create their own to reserve an address.
package networking
