package access

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/fairlead/fairlead/internal/registry/rbac"
	"github.com/fairlead/fairlead/internal/svc"
)

// The default roles and bindings. A role with a name of Kubernetes grants what
// Kubernetes grants, as far as fairlead serves the kinds; fairlead's own parts get
// what they need and no more. rules_users.go has the roles for users.

// API groups, as rules name them.
const (
	groupCore           = ""
	groupApps           = "apps"
	groupPolicy         = "policy"
	groupEvents         = "events.k8s.io"
	groupDiscovery      = "discovery.k8s.io"
	groupNetworking     = "networking.k8s.io"
	groupCoordination   = "coordination.k8s.io"
	groupCertificates   = "certificates.k8s.io"
	groupAuthentication = "authentication.k8s.io"
	groupAuthorization  = "authorization.k8s.io"
	groupExtensions     = "apiextensions.k8s.io"
	groupGateway        = "gateway.networking.k8s.io"
)

// Verbs that go together.
const (
	verbsRead      = "get list watch"
	verbsFollow    = "list watch"
	verbsWrite     = "create delete deletecollection patch update"
	verbsReadWrite = verbsRead + " " + verbsWrite
)

// defaultPolicy returns what the server reconciles at every start; see
// rbac.Reconcile.
func defaultPolicy() rbac.Policy {
	p := rbac.Policy{ClusterRoles: userRoles(), ClusterRoleBindings: userBindings()}
	p.ClusterRoles = append(p.ClusterRoles, nodeRoles()...)
	p.ClusterRoles = append(p.ClusterRoles, controllerRoles()...)
	p.ClusterRoleBindings = append(p.ClusterRoleBindings, nodeBindings()...)
	for _, r := range controllerRoles() {
		p.ClusterRoleBindings = append(p.ClusterRoleBindings, bind(r.Name, userSubject(svc.ControllersUser)))
	}
	lock := "system::leader-locking-fairlead-controllers"
	p.Roles = []rbacv1.Role{{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: lock},
		Rules: []rbacv1.PolicyRule{
			allow("create", groupCoordination, "leases"),
			named(allow("get update delete", groupCoordination, "leases"), svc.Controllers, svc.LoadBalancer),
			named(allow("get patch", groupCoordination, "leases"), svc.ProgrammedLease),
			// What the speakers of load balancers work with.
			allow("create", groupCore, "secrets", "configmaps"),
			named(allow("get", groupCore, "secrets"), svc.SpeakerKeySecret, svc.ACMEAccountSecret),
			named(allow("get update", groupCore, "configmaps"), svc.VotersConfigMap),
		},
	}}
	p.RoleBindings = []rbacv1.RoleBinding{{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: lock},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: lock},
		Subjects:   []rbacv1.Subject{userSubject(svc.ControllersUser)},
	}}
	for i := range p.ClusterRoles {
		mark(&p.ClusterRoles[i].ObjectMeta)
	}
	for i := range p.ClusterRoleBindings {
		mark(&p.ClusterRoleBindings[i].ObjectMeta)
	}
	mark(&p.Roles[0].ObjectMeta)
	mark(&p.RoleBindings[0].ObjectMeta)
	return p
}

// mark marks an object as a default that is reconciled at every start.
func mark(m *metav1.ObjectMeta) {
	if m.Labels == nil {
		m.Labels = map[string]string{}
	}
	m.Labels["kubernetes.io/bootstrapping"] = "rbac-defaults"
	m.Annotations = map[string]string{rbacv1.AutoUpdateAnnotationKey: "true"}
}

// nodeRules are the permissions of all nodes. Those on a node's own objects are in
// nodes.go and noderestriction.go.
func nodeRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		// Proxy and DNS follow these; Pods get the Services as variables.
		allow(verbsRead, groupCore, "services", "endpoints", "namespaces", "nodes"),
		allow(verbsRead, groupDiscovery, "endpointslices"),
		allow(verbsRead, groupNetworking, "servicecidrs"),
		allowEvents(),
		allow("create get", groupCertificates, "certificatesigningrequests"),
		// What a speaker announces, and how.
		allow(verbsRead, svc.Domain, "ipaddresspools", "bgppeers"),
		allow(verbsRead, groupNetworking, "ipaddresses"),
		// The routes of the fronts that a speaker serves.
		allow(verbsRead, groupGateway, "backendtlspolicies", "gatewayclasses", "gateways", "grpcroutes", "httproutes", "referencegrants",
			"listenersets", "tcproutes", "tlsroutes", "udproutes"),
		allow(verbsRead, groupNetworking, "ingresses", "ingressclasses"),
	}
}

// nodeRoles are for nodes, and for a proxy or a DNS server that runs on its own.
func nodeRoles() []rbacv1.ClusterRole {
	return []rbacv1.ClusterRole{
		role("system:node-proxier",
			allow(verbsFollow, groupCore, "services", "endpoints"),
			allow(verbsRead, groupCore, "nodes"),
			allow(verbsFollow, groupNetworking, "servicecidrs"),
			allow(verbsFollow, groupDiscovery, "endpointslices"),
			allowEvents(),
		),
		// For a binding in a namespace: nodes may register the programs of their directory of
		// services there. What else these verbs allow, nodeRestriction forbids to nodes.
		role(svc.NodeRegistrarRole, allow("create", groupCore, "pods"), allow(VerbUse, groupCore, "pods/"+PrivilegedResource)),
		role("system:kube-dns", allow(verbsFollow, groupCore, "endpoints", "services")),
		// CoreDNS brings a role of this name with it; fairlead dns needs the same.
		role("system:coredns",
			allow(verbsFollow, groupCore, "endpoints", "services", "pods", "namespaces"),
			allow(verbsFollow, groupDiscovery, "endpointslices"),
		),
		role("system:node-bootstrapper", allow("create get list watch", groupCertificates, "certificatesigningrequests")),
		role("system:certificates.k8s.io:certificatesigningrequests:nodeclient",
			allow("create", groupCertificates, "certificatesigningrequests/nodeclient")),
		role("system:certificates.k8s.io:certificatesigningrequests:selfnodeclient",
			allow("create", groupCertificates, "certificatesigningrequests/selfnodeclient")),
		role("system:certificates.k8s.io:kube-apiserver-client-approver",
			named(allow("approve", groupCertificates, "signers"), "kubernetes.io/kube-apiserver-client")),
		role("system:certificates.k8s.io:kube-apiserver-client-kubelet-approver",
			named(allow("approve", groupCertificates, "signers"), "kubernetes.io/kube-apiserver-client-kubelet")),
	}
}

func nodeBindings() []rbacv1.ClusterRoleBinding {
	return []rbacv1.ClusterRoleBinding{
		bind("system:node-proxier", userSubject(user.KubeProxy)),
		bind("system:kube-dns", accountSubject(metav1.NamespaceSystem, "kube-dns")),
		bind("system:coredns", accountSubject(metav1.NamespaceSystem, "coredns")),
		bind("system:node-bootstrapper", groupSubject(GroupBootstrappers)),
		bind("system:certificates.k8s.io:certificatesigningrequests:nodeclient", groupSubject(GroupBootstrappers)),
		bind("system:certificates.k8s.io:certificatesigningrequests:selfnodeclient", groupSubject(user.NodesGroup)),
	}
}

// allow returns a rule for verbs and groups separated by spaces; the core group is
// the empty word at the beginning.
func allow(verbs, groups string, resources ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: strings.Fields(verbs), APIGroups: strings.Split(groups, " "), Resources: resources}
}

// allowEvents lets a component write Events.
func allowEvents() rbacv1.PolicyRule {
	return allow("create update patch", groupCore+" "+groupEvents, "events")
}

func allowPaths(paths ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: []string{"get"}, NonResourceURLs: paths}
}

// named limits a rule to objects of the given names.
func named(r rbacv1.PolicyRule, names ...string) rbacv1.PolicyRule {
	r.ResourceNames = names
	return r
}

func role(name string, rules ...rbacv1.PolicyRule) rbacv1.ClusterRole {
	return rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}
}

// bind binds the ClusterRole name to subjects, by a binding of the same name.
func bind(name string, subjects ...rbacv1.Subject) rbacv1.ClusterRoleBinding {
	return rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   subjects,
	}
}

func userSubject(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}
}

func groupSubject(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: name}
}

func accountSubject(namespace, name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}
}

// accountGroup is the group of all ServiceAccounts.
const accountGroup = serviceaccount.AllServiceAccountsGroup

// leaseNamespace is where nodes keep their Leases.
const leaseNamespace = corev1.NamespaceNodeLease
