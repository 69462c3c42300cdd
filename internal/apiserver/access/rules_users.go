package access

import (
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"github.com/fairlead/fairlead/internal/svc"
)

// aggregateTo returns the label by which a ClusterRole is aggregated into the role
// name.
func aggregateTo(name string) string { return "rbac.authorization.k8s.io/aggregate-to-" + name }

// questionsRole lets all authenticated users ask what svc.QuestionPaths answer.
const questionsRole = "system:fairlead-questions"

// userRoles returns the roles for users and their workloads.
func userRoles() []rbacv1.ClusterRole {
	health := []string{"/healthz", "/livez", "/readyz"}
	version := []string{"/version", "/version/"}
	admin, edit, view := aggregateRole("admin"), aggregateRole("edit"), aggregateRole("view")
	edit.Labels = map[string]string{aggregateTo("admin"): "true"}
	view.Labels = map[string]string{aggregateTo("edit"): "true"}
	return []rbacv1.ClusterRole{
		role("cluster-admin", allow("*", "*", "*"), rbacv1.PolicyRule{Verbs: []string{"*"}, NonResourceURLs: []string{"*"}}),
		admin, edit, view,
		part("admin",
			allow("create", groupAuthorization, "localsubjectaccessreviews"),
			allow(verbsReadWrite, rbacv1.GroupName, "roles", "rolebindings"),
		),
		part("edit",
			allow(verbsRead, groupCore, "pods/attach", "pods/proxy", "pods/exec", "pods/portforward", "secrets", "services/proxy"),
			allow("impersonate", groupCore, "serviceaccounts"),
			allow(verbsWrite, groupCore, "pods", "pods/attach", "pods/proxy", "pods/exec", "pods/portforward"),
			allow("create", groupCore, "pods/eviction", "pods/trace"),
			allow(verbsWrite, groupCore, "replicationcontrollers", "replicationcontrollers/scale", "serviceaccounts",
				"services", "services/proxy", "persistentvolumeclaims", "configmaps", "secrets"),
			allow("create", groupCore, "serviceaccounts/token"),
			allow(verbsWrite, groupCore+" "+groupEvents, "events"),
			allow(verbsWrite, groupApps, "deployments", "deployments/rollback", "deployments/scale", "daemonsets",
				"replicasets", "replicasets/scale"),
			allow(verbsWrite, groupPolicy, "poddisruptionbudgets"),
			allow(verbsWrite, groupNetworking, "networkpolicies", "ingresses"),
			allow(verbsWrite, groupGateway, "backendtlspolicies", "gateways", "grpcroutes", "httproutes", "referencegrants",
				"listenersets", "tcproutes", "tlsroutes", "udproutes"),
			allow(verbsReadWrite, groupCoordination, "leases"),
		),
		part("view",
			allow(verbsRead, groupCore, "pods", "replicationcontrollers", "replicationcontrollers/scale", "serviceaccounts",
				"services", "services/status", "endpoints", "persistentvolumeclaims", "persistentvolumeclaims/status", "configmaps"),
			allow(verbsRead, groupCore, "limitranges", "resourcequotas", "bindings", "pods/status", "resourcequotas/status",
				"namespaces/status", "replicationcontrollers/status", "pods/log"),
			// In a namespace this is the namespace itself.
			allow(verbsRead, groupCore, "namespaces"),
			allow(verbsRead, groupCore+" "+groupEvents, "events"),
			allow(verbsRead, groupDiscovery, "endpointslices"),
			allow(verbsRead, groupApps, "controllerrevisions", "deployments", "deployments/status", "deployments/scale", "daemonsets",
				"daemonsets/status", "replicasets", "replicasets/status", "replicasets/scale"),
			allow(verbsRead, groupPolicy, "poddisruptionbudgets", "poddisruptionbudgets/status"),
			allow(verbsRead, groupNetworking, "networkpolicies", "ingresses", "ingresses/status"),
			allow(verbsRead, groupGateway, "backendtlspolicies", "gateways", "grpcroutes", "httproutes", "referencegrants",
				"listenersets", "tcproutes", "tlsroutes", "udproutes"),
			allow(verbsRead, svc.Domain, "ipaddresspools", "bgppeers", svc.SpeakersResource),
			allow(verbsRead, metricsv1beta1.GroupName, "pods", "nodes"),
		),
		role("system:basic-user",
			allow("create", groupAuthorization, "selfsubjectaccessreviews", "selfsubjectrulesreviews"),
			allow("create", groupAuthentication, "selfsubjectreviews"),
		),
		role("system:discovery", allowPaths(append(append(health, version...),
			"/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*", "/healthz/*", "/livez/*", "/readyz/*")...)),
		// What they answer is what the rights of the user who asks allow.
		role(questionsRole, allowPaths(svc.QuestionPaths()...)),
		role("system:public-info-viewer", allowPaths(append(health, version...)...)),
		role("system:monitoring", allowPaths(append(health, "/metrics", "/metrics/slis", "/healthz/*", "/livez/*", "/readyz/*")...)),
		role("system:auth-delegator",
			allow("create", groupAuthentication, "tokenreviews"),
			allow("create", groupAuthorization, "subjectaccessreviews"),
		),
		role("system:service-account-issuer-discovery", allowPaths(
			"/.well-known/openid-configuration", "/.well-known/openid-configuration/", "/openid/v1/jwks", "/openid/v1/jwks/")),
	}
}

func userBindings() []rbacv1.ClusterRoleBinding {
	return []rbacv1.ClusterRoleBinding{
		bind("cluster-admin", groupSubject(user.SystemPrivilegedGroup)),
		bind("system:basic-user", groupSubject(user.AllAuthenticated)),
		bind("system:discovery", groupSubject(user.AllAuthenticated)),
		bind(questionsRole, groupSubject(user.AllAuthenticated)),
		bind("system:public-info-viewer", groupSubject(user.AllAuthenticated), groupSubject(user.AllUnauthenticated)),
		bind("system:monitoring", groupSubject(user.MonitoringGroup)),
		bind("system:service-account-issuer-discovery", groupSubject(accountGroup)),
	}
}

// aggregateRole returns the role that aggregates all roles with its label.
func aggregateRole(name string) rbacv1.ClusterRole {
	r := role(name)
	r.AggregationRule = &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{
		{MatchLabels: map[string]string{aggregateTo(name): "true"}},
	}}
	return r
}

// part returns the server's own part of the aggregated role of.
func part(of string, rules ...rbacv1.PolicyRule) rbacv1.ClusterRole {
	r := role("system:aggregate-to-"+of, rules...)
	r.Labels = map[string]string{aggregateTo(of): "true"}
	return r
}
