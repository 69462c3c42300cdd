package apiserver

import (
	"context"
	"slices"
	"strings"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// rule allows verbs on resources, or on URL paths. Empty Namespaces means all
// of them. "*" stands for any verb, group or resource; a path may end in "*".
type rule struct {
	Verbs      []string
	Groups     []string
	Resources  []string // "pods" or "pods/status"
	Namespaces []string
	Paths      []string
}

// policy is what each group of users may do. It is plain data, evaluated like
// roles of RBAC; whoever is in system:masters may do everything.
type policy map[string][]rule

// defaultPolicy gives the parts of the system what they need and no more.
func defaultPolicy() policy {
	read, write := []string{"get", "list", "watch"}, []string{"create", "update", "patch"}
	writeDelete := []string{"create", "update", "patch", "delete"}
	events := rule{Verbs: write, Groups: []string{"", "events.k8s.io"}, Resources: []string{"events"}}
	core, discovery, networking, leases := []string{""}, []string{"discovery.k8s.io"}, []string{"networking.k8s.io"}, []string{"coordination.k8s.io"}
	return policy{
		user.AllAuthenticated: {
			{Verbs: []string{"get"}, Paths: []string{
				"/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*", "/version", "/version/",
				"/healthz", "/healthz/*", "/livez", "/livez/*", "/readyz", "/readyz/*",
			}},
		},
		GroupNodes: {
			{Verbs: read, Groups: core, Resources: []string{"services", "endpoints", "pods", "nodes", "namespaces"}},
			{Verbs: []string{"get"}, Groups: core, Resources: []string{"configmaps"}},
			{Verbs: read, Groups: discovery, Resources: []string{"endpointslices"}},
			{Verbs: read, Groups: networking, Resources: []string{"servicecidrs"}},
			{Verbs: write, Groups: core, Resources: []string{"nodes", "nodes/status"}},
			{Verbs: []string{"update", "patch"}, Groups: core, Resources: []string{"pods/status"}},
			// The agent removes a Pod when its processes have ended.
			{Verbs: []string{"delete"}, Groups: core, Resources: []string{"pods"}},
			{Verbs: []string{"get", "create", "update", "patch", "delete"}, Groups: leases, Resources: []string{"leases"}, Namespaces: []string{"kube-node-lease"}},
			// Each node's DNS server is an endpoint of kube-system/kube-dns.
			{Verbs: writeDelete, Groups: discovery, Resources: []string{"endpointslices"}, Namespaces: []string{"kube-system"}},
			events,
		},
		GroupControllers: {
			{Verbs: read, Groups: core, Resources: []string{"services", "endpoints", "pods", "nodes", "namespaces", "events"}},
			{Verbs: read, Groups: []string{"discovery.k8s.io", "networking.k8s.io", "coordination.k8s.io"}, Resources: []string{"*"}},
			{Verbs: writeDelete, Groups: core, Resources: []string{"endpoints"}},
			{Verbs: writeDelete, Groups: discovery, Resources: []string{"endpointslices"}},
			{Verbs: writeDelete, Groups: networking, Resources: []string{"ipaddresses", "servicecidrs", "servicecidrs/status"}},
			{Verbs: writeDelete, Groups: leases, Resources: []string{"leases"}},
			{Verbs: []string{"update", "patch"}, Groups: core, Resources: []string{"services", "services/status", "nodes", "nodes/status", "pods/status"}},
			{Verbs: []string{"create"}, Groups: core, Resources: []string{"pods/binding", "bindings"}},
			{Verbs: []string{"delete"}, Groups: core, Resources: []string{"pods", "nodes"}},
			// Emptying a namespace removes what is in it, whatever its kind.
			{Verbs: []string{"list", "delete", "deletecollection"}, Groups: []string{"*"}, Resources: []string{"*"}},
			{Verbs: []string{"update", "patch"}, Groups: core, Resources: []string{"namespaces/finalize", "namespaces/status"}},
			events,
		},
	}
}

// newAuthorizer decides by p; system:masters may do everything.
func newAuthorizer(p policy) authorizer.Authorizer {
	return authorizer.AuthorizerFunc(func(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
		groups := a.GetUser().GetGroups()
		if slices.Contains(groups, user.SystemPrivilegedGroup) {
			return authorizer.DecisionAllow, "", nil
		}
		for _, g := range groups {
			for _, r := range p[g] {
				if r.allows(a) {
					return authorizer.DecisionAllow, "", nil
				}
			}
		}
		return authorizer.DecisionNoOpinion, "no rule of its groups allows it", nil
	})
}

func (r rule) allows(a authorizer.Attributes) bool {
	if !has(r.Verbs, a.GetVerb()) {
		return false
	}
	if !a.IsResourceRequest() {
		return slices.ContainsFunc(r.Paths, func(p string) bool { return matchPath(p, a.GetPath()) })
	}
	resource := a.GetResource()
	if sub := a.GetSubresource(); sub != "" {
		resource += "/" + sub
	}
	return has(r.Groups, a.GetAPIGroup()) && has(r.Resources, resource) &&
		(len(r.Namespaces) == 0 || slices.Contains(r.Namespaces, a.GetNamespace()))
}

func has(list []string, s string) bool { return slices.Contains(list, "*") || slices.Contains(list, s) }

func matchPath(pattern, path string) bool {
	if p, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(path, p)
	}
	return pattern == path
}
