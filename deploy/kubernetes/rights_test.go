package kubernetes

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/fairlead/fairlead/internal/testbed"
)

// right is what a request needs and a role gives. An empty name or namespace of a role stands for all.
type right struct{ verb, resource, name, namespace string }

func (r right) String() string {
	out := r.verb + " " + r.resource
	if r.name != "" {
		out += " " + r.name
	}
	return out
}

// covers reports whether a role that gives the right allows what a request needs.
func (r right) covers(need right) bool {
	return r.verb == need.verb && r.resource == need.resource && (r.name == "" || r.name == need.name) &&
		(r.namespace == "" || r.namespace == need.namespace)
}

// requests are what the service accounts of kube-system have asked the API server for, by account.
type requests struct {
	mu   sync.Mutex
	made map[string]map[right]bool
}

// note remembers what a request needs, and whose token it has.
func (r *requests) note(req *http.Request) {
	info, err := (&request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}).
		NewRequestInfo(req)
	if err != nil || !info.IsResourceRequest {
		return // discovery, which everybody may ask for
	}
	var claims struct{ Sub string }
	_, payload, _ := strings.Cut(strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer "), ".")
	payload, _, _ = strings.Cut(payload, ".")
	if text, err := base64.RawURLEncoding.DecodeString(payload); err != nil || json.Unmarshal(text, &claims) != nil {
		return
	}
	account, ok := strings.CutPrefix(claims.Sub, "system:serviceaccount:kube-system:")
	if !ok {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.made == nil {
		r.made = map[string]map[right]bool{}
	}
	if r.made[account] == nil {
		r.made[account] = map[right]bool{}
	}
	resource := qualified(info.APIGroup, strings.Trim(info.Resource+"/"+info.Subresource, "/"))
	r.made[account][right{info.Verb, resource, info.Name, info.Namespace}] = true
}

// qualified is a resource with its group.
func qualified(group, resource string) string { return strings.Trim(resource+"."+group, ".") }

// checkUnused is checkUnusedBut for the rights of unasked.
func (r *rig) checkUnused(account string) { r.checkUnusedBut(account, unasked[account]) }

// checkUnusedBut waits until the requests of an account have needed each of its rights, but for the ones of but, which it must have: some
// requests come a moment after what a test does.
func (r *rig) checkUnusedBut(account string, but map[string][]string) {
	r.Helper()
	has := r.rights(account)
	if len(has) == 0 {
		r.Fatalf("%s has no rights", account)
	}
	all := slices.Concat(slices.Collect(maps.Values(but))...)
	testbed.Until(r.T, "the use of the rights of "+account, func() error { return r.unused(account, has, all) })
}

// unused returns which of the rights that an account has none of its requests has needed yet, and which rights of but it lacks.
func (r *rig) unused(account string, has []right, but []string) error {
	r.requests.mu.Lock()
	made := slices.Collect(maps.Keys(r.requests.made[account]))
	r.requests.mu.Unlock()
	may, wrong := map[string]bool{}, map[string]bool{}
	for _, one := range has {
		may[one.String()] = true
		if !slices.Contains(but, one.String()) && !slices.ContainsFunc(made, one.covers) {
			wrong["does not need to "+one.String()] = true
		}
	}
	for _, one := range but {
		if !may[one] {
			wrong["no role gives it, but the test expects it: "+one] = true
		}
	}
	if len(wrong) > 0 {
		return errors.New(strings.Join(slices.Sorted(maps.Keys(wrong)), "; "))
	}
	return nil
}

// rights are all that the roles of an account of kube-system give.
func (r *rig) rights(account string) (out []right) {
	r.Helper()
	ctx, rbac := context.WithoutCancel(r.Context()), r.client.RbacV1()
	whole, err1 := rbac.ClusterRoleBindings().List(ctx, metav1.ListOptions{})
	within, err2 := rbac.RoleBindings("").List(ctx, metav1.ListOptions{})
	if err1 != nil || err2 != nil {
		r.Fatal(err1, err2)
	}
	has := func(s rbacv1.Subject) bool { return s.Name == account && s.Namespace == "kube-system" }
	for _, b := range whole.Items {
		if slices.ContainsFunc(b.Subjects, has) {
			role, err := rbac.ClusterRoles().Get(ctx, b.RoleRef.Name, metav1.GetOptions{})
			if err != nil {
				r.Fatal(err)
			}
			out = append(out, expand(role.Rules, "")...)
		}
	}
	for _, b := range within.Items {
		if slices.ContainsFunc(b.Subjects, has) {
			role, err := rbac.Roles(b.Namespace).Get(ctx, b.RoleRef.Name, metav1.GetOptions{})
			if err != nil {
				r.Fatal(err)
			}
			out = append(out, expand(role.Rules, b.Namespace)...)
		}
	}
	return out
}

// expand returns the single rights of rules.
func expand(rules []rbacv1.PolicyRule, namespace string) (out []right) {
	for _, rule := range rules {
		names := rule.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}
		for _, verb := range rule.Verbs {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, name := range names {
						out = append(out, right{verb, qualified(group, resource), name, namespace})
					}
				}
			}
		}
	}
	return out
}

// unasked are rights that these tests do not need, by account and by what needs them.
var unasked = map[string]map[string][]string{
	"fairlead-controllers": {
		"a server without streaming lists": {
			"list endpoints", "list endpointslices.discovery.k8s.io", "list nodes", "list pods", "list services",
		},
		"another writer, after a conflict": {"get endpoints", "get endpointslices.discovery.k8s.io"},
		// It deletes the Endpoints of a deleted Service, too; one of the two is first.
		"an API server that fails there":     {"delete endpoints"},
		"a selector that selects nothing":    {"create events", "patch events"},
		"clusters that check owners' rights": {"update endpoints/finalizers", "update services/finalizers"},
	},
	"fairlead-dns":            {"a Corefile with 'pods verified'": {"list pods", "watch pods"}},
	"fairlead-node-local-dns": {"--pod-records verified": {"list pods", "watch pods"}},
	"fairlead-drain": {
		"a server without streaming lists": {
			"list endpointslices.discovery.k8s.io", "list leases.coordination.k8s.io", "list nodes", "list pods", "list services",
		},
	},
	"fairlead-hubble-relay": {"flows whose node does not know the Pod": {"get pods"}},
	// internal/cli/kubeproxy has a test of these.
	"fairlead-proxy": {
		"a Lease that others have changed":         {"get leases.coordination.k8s.io"},
		"a machine that is not called as its Node": {"get nodes"},
		"what the proxy cannot do":                 {"create events", "patch events"},
	},
	"fairlead-lb": {
		"--lb-pool": {
			"create ipaddresspools.fairlead.dev", "update ipaddresspools.fairlead.dev", "delete ipaddresspools.fairlead.dev",
		},
		"nodes that come and go": {
			"delete speakers.fairlead.dev", "update configmaps fairlead-lb-voters", "get nodes",
			"list leases.coordination.k8s.io fairlead-lb-witness",
			"watch leases.coordination.k8s.io fairlead-lb-witness", "get leases.coordination.k8s.io fairlead-lb-witness",
			"update leases.coordination.k8s.io fairlead-lb-witness",
		},
		"an address that changes hands": {"get ipaddresses.networking.k8s.io", "update ipaddresses.networking.k8s.io"},
		"passwords of BGP":              {"list secrets fairlead-lb", "watch secrets fairlead-lb"},
		"an Event that comes again":     {"patch events"},
		"clusters that check owners' rights": {
			"update backendtlspolicies/finalizers.gateway.networking.k8s.io", "update gateways/finalizers.gateway.networking.k8s.io",
			"update listenersets/finalizers.gateway.networking.k8s.io", "update referencegrants/finalizers.gateway.networking.k8s.io",
		},
		"definitions of an older version": olderDefinitions(),
	},
}

// olderDefinitions are rights to replace the definitions of the Gateway API.
func olderDefinitions() (out []string) {
	for _, kind := range []string{
		"backendtlspolicies", "gatewayclasses", "gateways", "grpcroutes", "httproutes", "listenersets", "referencegrants", "tcproutes",
		"tlsroutes", "udproutes",
	} {
		out = append(out, "update customresourcedefinitions.apiextensions.k8s.io "+kind+".gateway.networking.k8s.io")
	}
	return out
}
