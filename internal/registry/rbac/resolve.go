package rbac

import (
	"context"
	"errors"
	"fmt"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	rbaclisters "k8s.io/client-go/listers/rbac/v1"
	"k8s.io/client-go/tools/cache"
)

// Kinds a binding may refer to.
const (
	kindRole        = "Role"
	kindClusterRole = "ClusterRole"
)

// bySubject is the index of bindings by namespace and subject.
const bySubject = "subject"

// Resolver finds the rules of a user. Its knowledge follows the informers: a
// binding counts a moment after it was written.
type Resolver struct {
	roles           rbaclisters.RoleLister
	clusterRoles    rbaclisters.ClusterRoleLister
	bindings        cache.Indexer
	clusterBindings cache.Indexer
	synced          []cache.InformerSynced
}

var (
	_ authorizer.UnconditionalAuthorizer = (*Resolver)(nil)
	_ authorizer.RuleResolver            = (*Resolver)(nil)
)

// NewResolver returns a Resolver over the informers of f, which the caller
// starts.
func NewResolver(f informers.SharedInformerFactory) (*Resolver, error) {
	v1 := f.Rbac().V1()
	for _, i := range []cache.SharedIndexInformer{v1.RoleBindings().Informer(), v1.ClusterRoleBindings().Informer()} {
		if err := i.AddIndexers(cache.Indexers{bySubject: subjectKeys}); err != nil {
			return nil, err
		}
	}
	return &Resolver{
		roles: v1.Roles().Lister(), clusterRoles: v1.ClusterRoles().Lister(),
		bindings: v1.RoleBindings().Informer().GetIndexer(), clusterBindings: v1.ClusterRoleBindings().Informer().GetIndexer(),
		synced: []cache.InformerSynced{
			v1.Roles().Informer().HasSynced, v1.ClusterRoles().Informer().HasSynced,
			v1.RoleBindings().Informer().HasSynced, v1.ClusterRoleBindings().Informer().HasSynced,
		},
	}, nil
}

// HasSynced reports whether all that was stored at the start is known.
func (r *Resolver) HasSynced() bool {
	for _, s := range r.synced {
		if !s() {
			return false
		}
	}
	return true
}

// Knows reports whether the Resolver has seen all that p names: decisions follow
// them from then on.
func (r *Resolver) Knows(p Policy) bool {
	if !r.HasSynced() {
		return false
	}
	for i := range p.ClusterRoles {
		if _, err := r.clusterRoles.Get(p.ClusterRoles[i].Name); err != nil {
			return false
		}
	}
	for i := range p.Roles {
		if _, err := r.roles.Roles(p.Roles[i].Namespace).Get(p.Roles[i].Name); err != nil {
			return false
		}
	}
	for i := range p.ClusterRoleBindings {
		if _, ok, _ := r.clusterBindings.GetByKey(p.ClusterRoleBindings[i].Name); !ok {
			return false
		}
	}
	for i := range p.RoleBindings {
		if _, ok, _ := r.bindings.GetByKey(p.RoleBindings[i].Namespace + "/" + p.RoleBindings[i].Name); !ok {
			return false
		}
	}
	return true
}

// subjectKeys are the keys by which a binding is found.
func subjectKeys(obj any) ([]string, error) {
	var namespace string
	var subjects []rbacv1.Subject
	switch b := obj.(type) {
	case *rbacv1.RoleBinding:
		namespace, subjects = b.Namespace, b.Subjects
	case *rbacv1.ClusterRoleBinding:
		subjects = b.Subjects
	}
	keys := make([]string, 0, len(subjects))
	for _, s := range subjects {
		switch s.Kind {
		case rbacv1.UserKind:
			keys = append(keys, userKey(namespace, s.Name))
		case rbacv1.GroupKind:
			keys = append(keys, groupKey(namespace, s.Name))
		case rbacv1.ServiceAccountKind:
			// In a RoleBinding an account without a namespace is of the binding's.
			of := s.Namespace
			if of == "" {
				of = namespace
			}
			if of != "" {
				keys = append(keys, userKey(namespace, serviceaccount.MakeUsername(of, s.Name)))
			}
		}
	}
	return keys, nil
}

func userKey(namespace, name string) string  { return namespace + "\x00u" + name }
func groupKey(namespace, name string) string { return namespace + "\x00g" + name }

// visit calls f with every rule that u has in namespace ("": only cluster-wide
// rules) and the binding that gives it, until f returns false. A rule may come
// more than once. The error names the roles that are missing.
func (r *Resolver) visit(u user.Info, namespace string, f func(b any, rule *rbacv1.PolicyRule) bool) error {
	var errs []error
	groups := u.GetGroups()
	at := func(index cache.Indexer, ns string) bool {
		for i := -1; i < len(groups); i++ {
			key := ""
			if i < 0 {
				key = userKey(ns, u.GetName())
			} else {
				key = groupKey(ns, groups[i])
			}
			found, err := index.ByIndex(bySubject, key)
			if err != nil {
				errs = append(errs, err)
			}
			for _, b := range found {
				rules, err := r.rulesOf(refOf(b), ns)
				if err != nil {
					errs = append(errs, err)
				}
				for j := range rules {
					if !f(b, &rules[j]) {
						return false
					}
				}
			}
		}
		return true
	}
	if at(r.clusterBindings, "") && namespace != "" {
		at(r.bindings, namespace)
	}
	return errors.Join(errs...)
}

func refOf(b any) rbacv1.RoleRef {
	switch b := b.(type) {
	case *rbacv1.RoleBinding:
		return b.RoleRef
	case *rbacv1.ClusterRoleBinding:
		return b.RoleRef
	}
	return rbacv1.RoleRef{}
}

// rulesOf are the rules of the role that a binding in namespace refers to.
func (r *Resolver) rulesOf(ref rbacv1.RoleRef, namespace string) ([]rbacv1.PolicyRule, error) {
	switch ref.Kind {
	case kindRole:
		role, err := r.roles.Roles(namespace).Get(ref.Name)
		if err != nil {
			return nil, err
		}
		return role.Rules, nil
	case kindClusterRole:
		role, err := r.clusterRoles.Get(ref.Name)
		if err != nil {
			return nil, err
		}
		return role.Rules, nil
	}
	return nil, fmt.Errorf("a binding refers to a %q; there are Role and ClusterRole", ref.Kind)
}

// Authorize allows what a rule of the user's bindings allows and has no
// opinion of the rest.
func (r *Resolver) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	var by any
	err := r.visit(a.GetUser(), a.GetNamespace(), func(b any, rule *rbacv1.PolicyRule) bool {
		if Allows(a, rule) {
			by = b
		}
		return by == nil
	})
	switch b := by.(type) {
	case *rbacv1.RoleBinding:
		return authorizer.DecisionAllow, fmt.Sprintf("RBAC: allowed by RoleBinding %q of %s %q", b.Name+"/"+b.Namespace, b.RoleRef.Kind,
			b.RoleRef.Name), nil
	case *rbacv1.ClusterRoleBinding:
		return authorizer.DecisionAllow, fmt.Sprintf("RBAC: allowed by ClusterRoleBinding %q of %s %q", b.Name, b.RoleRef.Kind, b.RoleRef.Name),
			nil
	}
	if err != nil {
		return authorizer.DecisionNoOpinion, "RBAC: " + err.Error(), nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// RulesFor lists the rules of u in namespace.
func (r *Resolver) RulesFor(_ context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo,
	[]authorizer.NonResourceRuleInfo, bool, error) {
	var resources []authorizer.ResourceRuleInfo
	var urls []authorizer.NonResourceRuleInfo
	err := r.visit(u, namespace, func(_ any, rule *rbacv1.PolicyRule) bool {
		if len(rule.Resources) > 0 {
			resources = append(resources, &authorizer.DefaultResourceRuleInfo{
				Verbs: rule.Verbs, APIGroups: rule.APIGroups, Resources: rule.Resources, ResourceNames: rule.ResourceNames,
			})
		}
		if len(rule.NonResourceURLs) > 0 {
			urls = append(urls, &authorizer.DefaultNonResourceRuleInfo{Verbs: rule.Verbs, NonResourceURLs: rule.NonResourceURLs})
		}
		return true
	})
	return resources, urls, false, err
}

// policyOf lists the rules of u in namespace as roles hold them.
func (r *Resolver) policyOf(u user.Info, namespace string) ([]rbacv1.PolicyRule, error) {
	var out []rbacv1.PolicyRule
	err := r.visit(u, namespace, func(_ any, rule *rbacv1.PolicyRule) bool {
		out = append(out, *rule)
		return true
	})
	return out, err
}

// Allows reports whether rule allows what a asks for.
func Allows(a authorizer.Attributes, rule *rbacv1.PolicyRule) bool {
	if !has(rule.Verbs, rbacv1.VerbAll, a.GetVerb()) {
		return false
	}
	if !a.IsResourceRequest() {
		return allowsPath(rule.NonResourceURLs, a.GetPath())
	}
	return has(rule.APIGroups, rbacv1.APIGroupAll, a.GetAPIGroup()) &&
		allowsResource(rule.Resources, a.GetResource(), a.GetSubresource()) &&
		(len(rule.ResourceNames) == 0 || has(rule.ResourceNames, a.GetName()))
}

// allowsResource also knows "*/scale": a subresource of whatever resource.
func allowsResource(resources []string, resource, sub string) bool {
	for _, r := range resources {
		if r == rbacv1.ResourceAll {
			return true
		}
		if sub == "" {
			if r == resource {
				return true
			}
			continue
		}
		if of, s, ok := strings.Cut(r, "/"); ok && s == sub && (of == resource || of == "*") {
			return true
		}
	}
	return false
}

// allowsPath: a URL that ends in "*" stands for all that begin like it.
func allowsPath(urls []string, path string) bool {
	for _, u := range urls {
		if prefix, ok := strings.CutSuffix(u, "*"); u == path || ok && strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

// has reports whether list holds one of the values.
func has(list []string, values ...string) bool {
	for _, s := range list {
		for _, v := range values {
			if s == v {
				return true
			}
		}
	}
	return false
}
