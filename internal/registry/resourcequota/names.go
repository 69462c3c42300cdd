package resourcequota

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

const (
	// Bytes is the resource that limits the size of all objects of a namespace together,
	// in bytes as they are stored.
	Bytes corev1.ResourceName = "fairlead.dev/bytes"
	// CountPods is the number of all Pods. corev1.ResourcePods leaves out Pods that have ended.
	CountPods corev1.ResourceName = countPrefix + "pods"
)

const (
	// countPrefix begins the names that limit the number of objects of a kind:
	// count/RESOURCE or count/RESOURCE.GROUP.
	countPrefix = "count/"
	// storageClassInfix is part of the names that limit the claims of one storage class:
	// CLASS.storageclass.storage.k8s.io/RESOURCE.
	storageClassInfix = ".storageclass.storage.k8s.io/"
)

// CountOf returns the resource and group, as in RESOURCE.GROUP, whose objects name limits by number. It is empty for
// other names, and for services.nodeports and services.loadbalancers, which need more than the number of objects.
func CountOf(name corev1.ResourceName) string {
	switch name {
	case corev1.ResourceServices, corev1.ResourceConfigMaps, corev1.ResourceSecrets, corev1.ResourceQuotas:
		return string(name)
	}
	of, ok := strings.CutPrefix(string(name), countPrefix)
	if !ok {
		return ""
	}
	return of
}

// OfServices reports whether name limits what Services take of the cluster.
func OfServices(name corev1.ResourceName) bool {
	return name == corev1.ResourceServicesNodePorts || name == corev1.ResourceServicesLoadBalancers
}

// OfPods reports whether name limits the number of Pods, or what they ask of the nodes.
func OfPods(name corev1.ResourceName) bool {
	switch name {
	case CountPods, corev1.ResourcePods:
		return true
	}
	of, limits := strings.CutPrefix(string(name), "limits.")
	requests := false
	if !limits {
		of, requests = strings.CutPrefix(of, corev1.DefaultResourceRequestsPrefix)
	}
	switch corev1.ResourceName(of) {
	case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		return true
	}
	hugePages := strings.HasPrefix(of, corev1.ResourceHugePagesPrefix)
	extended := requests && strings.Contains(of, "/") && !strings.Contains(of, corev1.ResourceDefaultNamespacePrefix)
	return !limits && (hugePages || extended)
}

// unserved reports whether name limits objects of kinds that the API server does not serve. Their number is always 0.
func unserved(name corev1.ResourceName) bool {
	switch name {
	case corev1.ResourceReplicationControllers, corev1.ResourcePersistentVolumeClaims, corev1.ResourceRequestsStorage:
		return true
	}
	return strings.Contains(string(name), storageClassInfix)
}

// Counted reports whether a limit of name is enforced.
func Counted(name corev1.ResourceName) bool {
	return name == Bytes || CountOf(name) != "" || OfServices(name) || OfPods(name) || unserved(name)
}

// isInteger reports whether amounts of name are whole numbers.
func isInteger(name corev1.ResourceName) bool {
	switch name {
	case Bytes, corev1.ResourcePods, corev1.ResourceReplicationControllers, corev1.ResourcePersistentVolumeClaims:
		return true
	}
	return CountOf(name) != "" || OfServices(name)
}

// standard reports whether name is one that Kubernetes knows without a domain.
func standard(name corev1.ResourceName) bool {
	return !strings.Contains(string(name), "/") && Counted(name)
}
