package rbac

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/component-helpers/auth/rbac/validation"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// check rejects a write that would grant more than its user has. old is
// nil for a new object.
type check func(ctx context.Context, u user.Info, obj, old runtime.Object) error

// guarded is a storage whose writes must pass a check. system:masters pass
// always: the server's own client is one of them.
type guarded struct {
	*store.REST
	check check
}

var _ rest.StandardStorage = (*guarded)(nil)

// Create stores a new object that passes the check.
func (g *guarded) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	o *metav1.CreateOptions) (runtime.Object, error) {
	u, free := unchecked(ctx)
	if !free {
		if err := g.check(ctx, u, obj, nil); err != nil {
			return nil, err
		}
	}
	return g.REST.Create(ctx, obj, validate, o)
}

// Update stores a changed object that passes the check.
func (g *guarded) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, force bool, o *metav1.UpdateOptions) (runtime.Object, bool, error) {
	if u, free := unchecked(ctx); !free {
		info = rest.WrapUpdatedObjectInfo(info, func(ctx context.Context, obj, old runtime.Object) (runtime.Object, error) {
			if onlyOwnership(obj, old) {
				return obj, nil
			}
			if m, err := meta.Accessor(old); err != nil || m.GetUID() == "" {
				old = nil // created by this update
			}
			return obj, g.check(ctx, u, obj, old)
		})
	}
	return g.REST.Update(ctx, name, info, create, update, force, o)
}

// unchecked returns the user of a request and whether he may grant anything. A
// request without a user may grant nothing.
func unchecked(ctx context.Context) (user.Info, bool) {
	u, ok := request.UserFrom(ctx)
	if !ok {
		return &user.DefaultInfo{}, false
	}
	return u, slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup)
}

// onlyOwnership reports whether an update changes no more than who owns the object
// and what holds it: a garbage collector may do that to every role.
func onlyOwnership(obj, old runtime.Object) bool {
	if old == nil {
		return false
	}
	before, err := meta.Accessor(old)
	if err != nil || before.GetUID() == "" {
		return false
	}
	c := obj.DeepCopyObject()
	m, err := meta.Accessor(c)
	if err != nil {
		return false
	}
	m.SetOwnerReferences(before.GetOwnerReferences())
	m.SetFinalizers(before.GetFinalizers())
	m.SetManagedFields(before.GetManagedFields())
	return equality.Semantic.DeepEqual(c, old)
}

func (a Authority) checkRole(ctx context.Context, u user.Info, obj, _ runtime.Object) error {
	r := obj.(*rbacv1.Role)
	namespace := request.NamespaceValue(ctx)
	if a.may(ctx, u, "escalate", "roles", namespace, r.Name) {
		return nil
	}
	return forbidden("roles", r.Name, a.covers(u, namespace, r.Rules))
}

func (a Authority) checkClusterRole(ctx context.Context, u user.Info, obj, old runtime.Object) error {
	r := obj.(*rbacv1.ClusterRole)
	if a.may(ctx, u, "escalate", "clusterroles", "", r.Name) {
		return nil
	}
	if err := a.covers(u, "", r.Rules); err != nil {
		return forbidden("clusterroles", r.Name, err)
	}
	before, _ := old.(*rbacv1.ClusterRole)
	// An aggregation gathers whatever there will ever be.
	if aggregates(r) || before != nil && aggregates(before) {
		everything := []rbacv1.PolicyRule{
			{Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"}},
			{Verbs: []string{"*"}, NonResourceURLs: []string{"*"}},
		}
		if a.covers(u, "", everything) != nil {
			return forbidden("clusterroles", r.Name, errors.New("must have cluster-admin privileges to use the aggregationRule"))
		}
	}
	return nil
}

func (a Authority) checkBinding(ctx context.Context, u user.Info, obj, _ runtime.Object) error {
	b, namespace := bindingOf(obj), request.NamespaceValue(ctx)
	resource := "clusterrolebindings"
	if namespace != "" {
		resource = "rolebindings"
	}
	if target := resourceOf(b.ref.Kind); target != "" && a.may(ctx, u, "bind", target, namespace, b.ref.Name) {
		return nil
	}
	rules, err := a.Rules.rulesOf(b.ref, namespace)
	if err != nil {
		if resourceOf(b.ref.Kind) == "" {
			return nil // validation reports the error
		}
		return err
	}
	return forbidden(resource, b.meta.Name, a.covers(u, namespace, rules))
}

func resourceOf(kind string) string {
	switch kind {
	case kindRole:
		return "roles"
	case kindClusterRole:
		return "clusterroles"
	}
	return ""
}

func aggregates(r *rbacv1.ClusterRole) bool {
	return r.AggregationRule != nil && len(r.AggregationRule.ClusterRoleSelectors) > 0
}

// may asks for one of the two verbs that stand above the check.
func (a Authority) may(ctx context.Context, u user.Info, verb, resource, namespace, name string) bool {
	d, _, err := a.Authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: u, Verb: verb, APIGroup: rbacv1.GroupName, APIVersion: "*", Resource: resource, Namespace: namespace, Name: name,
		ResourceRequest: true,
	})
	return err == nil && d == authorizer.DecisionAllow
}

// covers returns an error that names the rules that u does not have in namespace.
func (a Authority) covers(u user.Info, namespace string, rules []rbacv1.PolicyRule) error {
	own, err := a.Rules.policyOf(u, namespace)
	ok, missing := validation.Covers(own, rules)
	if ok {
		return nil
	}
	lines := describeAll(missing)
	msg := fmt.Sprintf("user %q (groups=%q) is attempting to grant RBAC permissions not currently held:\n%s", u.GetName(), u.GetGroups(),
		strings.Join(lines, "\n"))
	if err != nil {
		msg += fmt.Sprintf("; resolution errors: %v", err)
	}
	return errors.New(msg)
}

// describeAll describes rules of one verb each. Rules that differ only in the
// verb are one line. Lines are in order.
func describeAll(rules []rbacv1.PolicyRule) []string {
	byRest := map[string]*rbacv1.PolicyRule{}
	for _, r := range rules {
		verbs := r.Verbs
		r.Verbs = nil
		merged := byRest[describe(&r)]
		if merged == nil {
			merged = r.DeepCopy()
			byRest[describe(&r)] = merged
		}
		for _, v := range verbs {
			if !slices.Contains(merged.Verbs, v) {
				merged.Verbs = append(merged.Verbs, v)
			}
		}
	}
	lines := make([]string, 0, len(byRest))
	for _, r := range byRest {
		lines = append(lines, describe(r))
	}
	slices.Sort(lines)
	return lines
}

// describe writes a rule as {APIGroups:[""], Resources:["pods"], Verbs:["get"]}.
func describe(r *rbacv1.PolicyRule) string {
	var parts []string
	for _, p := range []struct {
		name   string
		values []string
	}{
		{"APIGroups", r.APIGroups}, {"Resources", r.Resources}, {"NonResourceURLs", r.NonResourceURLs},
		{"ResourceNames", r.ResourceNames}, {"Verbs", r.Verbs},
	} {
		if len(p.values) > 0 {
			parts = append(parts, fmt.Sprintf("%s:%q", p.name, p.values))
		}
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

func forbidden(resource, name string, err error) error {
	if err == nil {
		return nil
	}
	return apierrors.NewForbidden(rbacv1.Resource(resource), name, err)
}
