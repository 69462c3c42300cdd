// Package kubevip converts the ConfigMap of kube-vip's cloud provider into fairlead's IPAddressPools, and shows the
// counterparts of the settings of kube-vip's container. It is pure: it reads text and returns objects, or what it refuses with the key of
// each.
//
// A Service of kube-vip gets an address from the first of these keys that is there: cidr-NAMESPACE, cidr-global,
// range-NAMESPACE, range-global. It never gets one of another key, also when that has none left. So the pools of
// fairlead exclude each other by namespace.
//
// Source: https://kube-vip.io/docs/usage/cloud-provider/ and pkg/provider of kube-vip-cloud-provider.
package kubevip
