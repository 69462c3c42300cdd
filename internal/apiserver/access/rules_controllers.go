package access

import (
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// verbsChange are the verbs of a controller on the objects it makes.
const verbsChange = "create update patch delete"

// controllerRoles returns a role for each controller of package controller.
func controllerRoles() []rbacv1.ClusterRole {
	return slices.Concat(serviceControllerRoles(), podControllerRoles(), objectControllerRoles())
}

// serviceControllerRoles are for controllers of Services, endpoints and load balancers.
func serviceControllerRoles() []rbacv1.ClusterRole {
	return []rbacv1.ClusterRole{
		role("system:controller:endpoint-controller",
			allow(verbsRead, groupCore, "services", "pods", "endpoints"),
			allow(verbsChange, groupCore, "endpoints"), allowEvents(),
		),
		role("system:controller:endpointslice-controller",
			allow(verbsRead, groupCore, "services", "pods", "nodes"),
			allow(verbsRead+" "+verbsChange, groupDiscovery, "endpointslices"), allowEvents(),
		),
		role("system:controller:endpointslicemirroring-controller",
			allow(verbsRead, groupCore, "services", "endpoints"),
			allow(verbsRead+" "+verbsChange, groupDiscovery, "endpointslices"), allowEvents(),
		),
		role("system:controller:loadbalancer",
			allow(verbsRead, groupCore, "services", "nodes", "namespaces"),
			allow("update patch", groupCore, "services", "services/status"),
			allow(verbsRead, groupNetworking, "servicecidrs"),
			allow(verbsRead+" "+verbsChange, groupNetworking, "ipaddresses"),
			allow(verbsRead+" "+verbsChange, svc.Domain, "ipaddresspools"),
			allow("update patch", svc.Domain, "ipaddresspools/status"),
			allow(verbsRead, svc.Domain, "bgppeers", svc.SpeakersResource),
			allow("delete", svc.Domain, svc.SpeakersResource),
			// Its own definitions; a request to create has no name to go by.
			allow("create", groupExtensions, "customresourcedefinitions"),
			named(allow("get patch", groupExtensions, "customresourcedefinitions"),
				"ipaddresspools."+svc.Domain, "bgppeers."+svc.Domain, svc.SpeakersResource+"."+svc.Domain),
			allowEvents(),
		),
		role("system:controller:gateway",
			allow(verbsRead, groupCore, "services", "namespaces", "secrets", "configmaps"),
			allow("create patch delete", groupCore, "services"),
			allow(verbsRead+" create", groupNetworking, "ingressclasses"),
			allow(verbsRead, groupNetworking, "ingresses"),
			allow("update", groupNetworking, "ingresses/status"),
			allow(verbsRead, groupGateway, "backendtlspolicies", "gatewayclasses", "gateways", "grpcroutes", "httproutes", "referencegrants",
				"listenersets", "tcproutes", "tlsroutes", "udproutes"),
			allow("create", groupGateway, "gatewayclasses"),
			allow("update", groupGateway, "backendtlspolicies/status", "gatewayclasses/status", "gateways/status", "grpcroutes/status",
				"httproutes/status", "listenersets/status", "tcproutes/status", "tlsroutes/status", "udproutes/status"),
			// The definitions of the Gateway API; a request to create has no name to go by.
			allow("create get update", groupExtensions, "customresourcedefinitions"),
			allowEvents(),
		),
		role("system:controller:programmed-controller",
			allow(verbsRead, groupCore, "services", "pods", "nodes"),
			allow(verbsRead, groupDiscovery, "endpointslices"),
			allow(verbsRead, groupCoordination, "leases"),
			allow("update patch", groupCore, "pods/status", "services/status"),
		),
		role("system:controller:endpoint-check-controller",
			allow(verbsRead, groupCore, "nodes"),
			allow(verbsRead+" update", groupDiscovery, "endpointslices"),
			allow(verbsRead, groupCoordination, "leases"), allowEvents(),
		),
		role("system:controller:service-controller",
			allow(verbsRead, groupCore, "services", "nodes"),
			allow("update patch", groupCore, "services", "services/status"), allowEvents(),
		),
	}
}

// podControllerRoles are for the scheduler and the controllers of sets of Pods.
func podControllerRoles() []rbacv1.ClusterRole {
	return []rbacv1.ClusterRole{
		role("system:controller:replicaset-controller",
			allow(verbsRead+" update", groupApps, "replicasets"),
			allow("update", groupApps, "replicasets/status", "replicasets/finalizers"),
			allow(verbsRead+" create patch delete", groupCore, "pods"), allowEvents(),
		),
		role("system:controller:deployment-controller",
			allow(verbsRead+" update", groupApps, "deployments"),
			allow("update", groupApps, "deployments/status", "deployments/finalizers"),
			allow(verbsRead+" create update patch delete", groupApps, "replicasets"),
			allow(verbsRead, groupCore, "pods"), allowEvents(),
		),
		role("system:controller:daemon-set-controller",
			allow(verbsRead, groupApps, "daemonsets"),
			allow("update", groupApps, "daemonsets/status", "daemonsets/finalizers"),
			allow(verbsRead, groupCore, "nodes"),
			allow(verbsRead+" create patch delete", groupCore, "pods"),
			allow("create", groupCore, "pods/binding"),
			allow(verbsRead+" create update patch delete", groupApps, "controllerrevisions"), allowEvents(),
		),
		role("system:controller:disruption-controller",
			allow(verbsRead, groupApps, "deployments", "replicasets"),
			allow(verbsRead, groupPolicy, "poddisruptionbudgets"),
			allow("update", groupPolicy, "poddisruptionbudgets/status"),
			allow(verbsRead, groupCore, "pods"), allowEvents(),
		),
		role("system:kube-scheduler",
			allow(verbsRead, groupCore, "nodes", "pods", "services", "namespaces"),
			allow(verbsRead, groupApps, "replicasets"),
			allow("create", groupCore, "pods/binding", "bindings"),
			allow("patch update", groupCore, "pods/status"), allowEvents(),
		),
	}
}

// objectControllerRoles are for controllers of nodes, and of objects of every kind.
func objectControllerRoles() []rbacv1.ClusterRole {
	return []rbacv1.ClusterRole{
		role("system:controller:node-controller",
			allow(verbsRead+" update patch", groupCore, "nodes"),
			allow("update patch", groupCore, "nodes/status", "pods/status"),
			allow(verbsRead+" delete", groupCore, "pods"),
			allow(verbsRead+" update patch delete", groupDiscovery, "endpointslices"),
			allow(verbsRead, groupCoordination, "leases"), allowEvents(),
		),
		role("system:controller:namespace-controller",
			allow(verbsRead+" delete", groupCore, "namespaces"),
			allow("update patch", groupCore, "namespaces/finalize", "namespaces/status"),
			// Emptying a namespace removes objects of every kind.
			allow("list delete deletecollection", "*", "*"),
		),
		role("system:controller:generic-garbage-collector",
			// Owners and dependents are of every kind.
			allow(verbsRead+" update patch delete", "*", "*"), allowEvents(),
		),
	}
}
