package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/registry/rbac"
)

// nodePrefix begins the user name of a node; its group is system:nodes.
const nodePrefix = "system:node:"

// nodeOf returns the name of the node that u is; isNode is false for other users.
func nodeOf(u user.Info) (name string, isNode bool) {
	name, ok := strings.CutPrefix(u.GetName(), nodePrefix)
	return name, ok && name != "" && slices.Contains(u.GetGroups(), user.NodesGroup)
}

// nodeAuthorizer allows a node what its agent needs, of its own objects and no
// other node's. What depends on more than the name of an object, nodeRestriction
// decides later, when the object itself is known.
type nodeAuthorizer struct {
	pods  *podIndex
	tls   *tlsIndex
	nodes nodeIndex
	rules []rbacv1.PolicyRule
}

// nodeIndex finds Nodes in memory.
type nodeIndex struct{ corelisters.NodeLister }

// await returns a Node for which ok returns true, which a Node may become a moment
// after the requester has seen it; nil if there is none.
func (x nodeIndex) await(ctx context.Context, name string, ok func(*corev1.Node) bool) (found *corev1.Node) {
	awaitIndex(ctx, func() bool {
		n, err := x.Get(name)
		if err == nil && ok(n) {
			found = n
		}
		return found != nil
	})
	return found
}

// beforeRegistered reports whether a node may make a request without a Node: to
// register, to be told about itself, and to read the ranges that it needs for both. A
// certificate does not outlive the Node that it was issued for in any other way.
func beforeRegistered(a authorizer.Attributes) bool {
	reads := slices.Contains([]string{"get", "list", "watch"}, a.GetVerb())
	switch a.GetAPIGroup() + "/" + a.GetResource() {
	case "/nodes":
		return a.GetSubresource() == "" && (reads || a.GetVerb() == "create")
	case groupNetworking + "/servicecidrs":
		return reads
	case "/configmaps":
		return readsCluster(a)
	case groupAuthentication + "/selfsubjectreviews", groupAuthorization + "/selfsubjectaccessreviews":
		return true
	}
	return !a.IsResourceRequest()
}

// readsCluster reports whether a request is for the ranges and authorities that all nodes have in common.
func readsCluster(a authorizer.Attributes) bool {
	// A list or watch with a field selector of one name has that name.
	reads := slices.Contains([]string{"get", "list", "watch"}, a.GetVerb())
	return reads && a.GetAPIGroup() == "" && a.GetResource() == "configmaps" && a.GetSubresource() == "" &&
		a.GetNamespace() == metav1.NamespacePublic && a.GetName() == ClusterConfigMap
}

// Authorize has no opinion on users that are no nodes. It denies a node without Node,
// or with one that is bound to another certificate, what RBAC may grant to all nodes,
// too.
func (n nodeAuthorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	node, ok := nodeOf(a.GetUser())
	if !ok {
		return authorizer.DecisionNoOpinion, "", nil
	}
	if !beforeRegistered(a) && n.nodes.await(ctx, node, func(o *corev1.Node) bool { return bound(o, a.GetUser()) }) == nil {
		if _, err := n.nodes.Get(node); err == nil {
			return authorizer.DecisionDeny, fmt.Sprintf("Node %s was registered with the certificate of another machine, or an earlier one: "+
				"delete the Node to let this one register", node), nil
		}
		return authorizer.DecisionDeny, fmt.Sprintf("there is no Node %s: it may register, and nothing else before", node), nil
	}
	if a.IsResourceRequest() {
		if why, mine := n.own(ctx, node, a); mine {
			if why == "" {
				return authorizer.DecisionAllow, "", nil
			}
			return authorizer.DecisionNoOpinion, why, nil
		}
	}
	for i := range n.rules {
		if rbac.Allows(a, &n.rules[i]) {
			return authorizer.DecisionAllow, "", nil
		}
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// own decides about the kinds of which a node has its own objects. mine is false
// for other requests; why is empty if the request is allowed.
func (n nodeAuthorizer) own(ctx context.Context, node string, a authorizer.Attributes) (why string, mine bool) {
	verb, sub := a.GetVerb(), a.GetSubresource()
	is := func(verbs ...string) bool { return slices.Contains(verbs, verb) }
	switch a.GetAPIGroup() + "/" + a.GetResource() {
	case "/nodes":
		if is("get", "list", "watch") && sub == "" {
			return "", true // for topology
		}
		if sub != "" && sub != "status" || !is("create", "update", "patch") || sub == "status" && is("create") {
			return "a node may make its Node and update it and its status, nothing else", true
		}
		return reason(is("create") || a.GetName() == node, "a node may change its own Node alone"), true
	case "/pods":
		switch {
		case sub == "" && is("list", "watch"):
			return reason(selectsNode(a, node), "a node may read its own Pods alone, with the field selector spec.nodeName="+node), true
		case sub == "" && is("get", "delete"), sub == "status" && is("update", "patch"):
			return n.pod(ctx, node, a.GetNamespace(), a.GetName()), true
		case sub == "" && is("create"):
			return "", true // mirrors of its static Pods, which nodeRestriction checks
		}
		return "a node may read its own Pods, delete them, write their status and show its static Pods, nothing else", true
	case "fairlead.dev/speakers":
		switch {
		case is("get", "list", "watch") && sub == "":
			return "", true // speakers find each other
		case sub != "" && sub != "status", !is("create", "update", "patch", "delete"):
			return "a node may write its own Speaker, nothing else", true
		}
		return reason(is("create") && sub == "" || a.GetName() == node, "a node may write its own Speaker alone"), true
	case "/secrets", "/configmaps":
		if ofSpeakers(a) {
			return "", true
		}
		// A list or watch with a field selector of one name has that name.
		if !is("get", "list", "watch") || sub != "" || a.GetName() == "" {
			return "a node may read single " + a.GetResource() + " alone, by name", true
		}
		if readsCluster(a) {
			return "", true
		}
		return n.related(ctx, node, a), true
	case "/serviceaccounts":
		if !is("create") || sub != "token" {
			return "a node may ask for tokens of its Pods' accounts, nothing else", true
		}
		return n.related(ctx, node, a), true
	case "coordination.k8s.io/leases":
		if a.GetNamespace() == metav1.NamespaceSystem && sub == "" && is("get", "list", "watch", "create", "update", "patch") {
			if a.GetName() == barrier.Name && is("get", "list", "watch") {
				return "", true // what is awaited of all nodes
			}
			return reason(is("create") || a.GetName() == lbWitness, "a node may write the Lease "+lbWitness+" alone of this namespace"), true
		}
		if a.GetNamespace() != leaseNamespace || !is("get", "create", "update", "patch", "delete") || sub != "" {
			return "a node may write its own Lease in " + leaseNamespace + " alone", true
		}
		return reason(is("create") || a.GetName() == node, "a node may write its own Lease alone"), true
	case "discovery.k8s.io/endpointslices":
		// The node's DNS server is an endpoint of kube-system/kube-dns.
		if !is("create", "update", "patch", "delete") {
			return "", false
		}
		return reason(a.GetNamespace() == dnsNamespace && sub == "",
			"a node may write its DNS server's EndpointSlices in "+dnsNamespace+" alone"), true
	}
	return "", false
}

// ofSpeakers reports whether a request reads what the speakers of all nodes work with:
// the list of voters, the key of their messages, and passwords of BGP.
func ofSpeakers(a authorizer.Attributes) bool {
	reads := slices.Contains([]string{"get", "list", "watch"}, a.GetVerb())
	if !reads || a.GetNamespace() != metav1.NamespaceSystem || a.GetSubresource() != "" {
		return false
	}
	if a.GetResource() == "configmaps" {
		return a.GetName() == lbVoters
	}
	return a.GetName() == lbName || strings.HasPrefix(a.GetName(), lbPasswords)
}

func reason(ok bool, why string) string {
	if ok {
		return ""
	}
	return why
}

// pod returns why node may not access a Pod, "" if the Pod is its own.
func (n nodeAuthorizer) pod(ctx context.Context, node, namespace, name string) string {
	elsewhere := false
	here := awaitIndex(ctx, func() bool {
		p := n.pods.get(namespace, name)
		elsewhere = p != nil && p.node != "" && p.node != node
		return elsewhere || p != nil && p.node == node
	})
	return reason(here && !elsewhere, fmt.Sprintf("Pod %s/%s does not run on node %s", namespace, name, node))
}

// related returns why node may not access an object, "" if one of its Pods refers to
// the object, or a load balancer that any node may have to serve.
func (n nodeAuthorizer) related(ctx context.Context, node string, a authorizer.Attributes) string {
	ok := awaitIndex(ctx, func() bool {
		return n.pods.referred(node, a.GetResource(), a.GetNamespace(), a.GetName()) ||
			n.tls.named(a.GetResource(), a.GetNamespace(), a.GetName())
	})
	return reason(ok, fmt.Sprintf("no relationship found between node '%s' and this object", node))
}

// selectsNode reports whether a list or watch is limited to the node's Pods.
func selectsNode(a authorizer.Attributes, node string) bool {
	requirements, err := a.GetFieldSelector()
	if err != nil {
		return false
	}
	for _, r := range requirements {
		if r.Field == "spec.nodeName" && (r.Operator == selection.Equals || r.Operator == selection.DoubleEquals) && r.Value == node {
			return true
		}
	}
	return false
}

// RulesFor returns an error for nodes: what depends on objects cannot be listed.
func (nodeAuthorizer) RulesFor(
	_ context.Context, u user.Info, _ string,
) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	if _, ok := nodeOf(u); ok {
		return nil, nil, true, errors.New("what a node may do depends on the objects, and is not listed")
	}
	return nil, nil, false, nil
}
