package access

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/registry/rbac"
	"github.com/fairlead/fairlead/internal/svc"
)

// NodeOf returns the name of the node that u is; isNode is false for other users.
func NodeOf(u user.Info) (name string, isNode bool) {
	name, ok := strings.CutPrefix(u.GetName(), svc.NodeUserPrefix)
	return name, ok && name != "" && slices.Contains(u.GetGroups(), user.NodesGroup)
}

// nodeAuthorizer allows a node the requests that its agent needs: on its own objects by nodeKinds, and on
// others by nodeRules. nodeRestriction decides later what depends on more than the name of an object.
type nodeAuthorizer struct {
	pods    *podIndex
	tls     *tlsIndex
	nodes   nodeIndex
	removed *removedNodes
	rules   []rbacv1.PolicyRule
}

// nodeIndex finds Nodes in memory.
type nodeIndex struct{ corelisters.NodeLister }

// await returns a Node for which ok returns true, which a Node may become a moment
// after the requester has seen it; nil if there is none within timeout.
func (x nodeIndex) await(
	ctx context.Context, timeout time.Duration, name string, ok func(*corev1.Node) bool,
) (found *corev1.Node) {
	await(ctx, timeout, func() bool {
		n, err := x.Get(name)
		if err == nil && ok(n) {
			found = n
		}
		return found != nil
	})
	return found
}

// beforeRegistered reports whether a node may make a request without a Node: to
// register, to review its own rights, and to read the ranges and authorities that it needs for both. A
// certificate is otherwise not valid longer than the Node that it was issued for.
func beforeRegistered(r nodeAttributes) bool {
	if !r.IsResourceRequest() {
		return true
	}
	switch r.resource() {
	case schema.GroupResource{Resource: "nodes"}:
		return r.GetSubresource() == "" && (r.reads() || r.is("create"))
	case schema.GroupResource{Group: groupNetworking, Resource: "servicecidrs"}:
		return r.reads()
	case schema.GroupResource{Resource: "configmaps"}:
		return r.readsCluster()
	case schema.GroupResource{Group: groupAuthentication, Resource: "selfsubjectreviews"},
		schema.GroupResource{Group: groupAuthorization, Resource: "selfsubjectaccessreviews"}:
		return true
	}
	return false
}

// Authorize has no opinion on users that are not nodes. It denies every request, also one that RBAC grants to all
// nodes, to a node without a Node or with a Node that is bound to another certificate or is being deleted. A machine
// whose Node was deleted is denied everything.
func (n nodeAuthorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	node, ok := NodeOf(a.GetUser())
	if !ok {
		return authorizer.DecisionNoOpinion, "", nil
	}
	r := nodeAttributes{a, node}
	if why := n.checkIdentity(ctx, r); why != "" {
		return authorizer.DecisionDeny, why, nil
	}
	if a.IsResourceRequest() {
		if check := checkOf(r); check != nil {
			if why := check(n, ctx, r); why != "" {
				return authorizer.DecisionNoOpinion, why, nil
			}
			return authorizer.DecisionAllow, "", nil
		}
	}
	for i := range n.rules {
		if rbac.Allows(a, &n.rules[i]) {
			return authorizer.DecisionAllow, "", nil
		}
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// checkIdentity returns why a node may make no request at all, or only others than this one; "" if it may.
func (n nodeAuthorizer) checkIdentity(ctx context.Context, r nodeAttributes) string {
	u := r.GetUser()
	mine := func(o *corev1.Node) bool { return n.removed.mayAct(o, u) }
	o, err := n.nodes.Get(r.node)
	if err == nil && mine(o) {
		return ""
	}
	if n.removed.has(r.node, u) {
		return errRemoved(r.node).Error()
	}
	timeout := indexTimeout
	if err != nil {
		timeout = registrationTimeout
	}
	if beforeRegistered(r) || n.nodes.await(ctx, timeout, r.node, mine) != nil {
		return ""
	}
	switch o, err := n.nodes.Get(r.node); {
	case err != nil:
		return fmt.Sprintf("Node %s does not exist: this node may only register", r.node)
	case o.DeletionTimestamp != nil:
		return fmt.Sprintf("Node %s is being deleted", r.node)
	}
	return fmt.Sprintf("Node %s was registered with the certificate of another machine, or an earlier one: "+
		"delete the Node to let this one register", r.node)
}

// RulesFor returns an error for nodes: rights that depend on objects cannot be listed.
func (nodeAuthorizer) RulesFor(
	_ context.Context, u user.Info, _ string,
) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	if _, ok := NodeOf(u); ok {
		return nil, nil, true, errors.New("the rights of a node depend on the objects and cannot be listed")
	}
	return nil, nil, false, nil
}
