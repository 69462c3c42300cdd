package access

import (
	"context"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/svc"
)

// nodeCheck decides about a request for a kind of objects. It returns why a node may not make the request, "" if it may.
type nodeCheck func(n nodeAuthorizer, ctx context.Context, r nodeAttributes) string

// nodeKinds are the kinds whose requests depend on the object. Nodes may make requests for other kinds
// as nodeRules allows.
//
//nolint:gochecknoglobals // constant
var nodeKinds = map[schema.GroupResource]nodeCheck{
	{Resource: "nodes"}:                                 nodeAuthorizer.checkNode,
	{Resource: "pods"}:                                  nodeAuthorizer.checkPod,
	{Resource: "secrets"}:                               nodeAuthorizer.checkRead,
	{Resource: "configmaps"}:                            nodeAuthorizer.checkRead,
	{Resource: "serviceaccounts"}:                       nodeAuthorizer.checkToken,
	{Group: groupCoordination, Resource: "leases"}:      nodeAuthorizer.checkLease,
	{Group: groupDiscovery, Resource: "endpointslices"}: nodeAuthorizer.checkSlice,
	{Group: svc.Domain, Resource: svc.SpeakersResource}: nodeAuthorizer.checkSpeaker,
}

// checkOf returns the check of a request, nil if nodeRules decides: all nodes may read EndpointSlices.
func checkOf(r nodeAttributes) nodeCheck {
	if r.GetResource() == "endpointslices" && r.reads() {
		return nil
	}
	return nodeKinds[r.resource()]
}

// nodeAttributes is a request of a node.
type nodeAttributes struct {
	authorizer.Attributes
	node string
}

func (r nodeAttributes) resource() schema.GroupResource {
	return schema.GroupResource{Group: r.GetAPIGroup(), Resource: r.GetResource()}
}

// is reports whether the verb of the request is one of verbs.
func (r nodeAttributes) is(verbs ...string) bool { return slices.Contains(verbs, r.GetVerb()) }

func (r nodeAttributes) reads() bool { return r.is("get", "list", "watch") }

// whole reports whether the request is for an object and not for a subresource.
func (r nodeAttributes) whole() bool { return r.GetSubresource() == "" }

// status reports whether the request is for the status of an object.
func (r nodeAttributes) status() bool { return r.GetSubresource() == "status" }

// ownName reports whether the object has the name of the node. A request to create has no name here:
// nodeRestriction checks that of the object.
func (r nodeAttributes) ownName() bool { return r.is("create") && r.whole() || r.GetName() == r.node }

// checkNode lets a node read all Nodes, for topology, and create and change its own one.
func (nodeAuthorizer) checkNode(_ context.Context, r nodeAttributes) string {
	switch {
	case r.whole() && r.reads():
		return ""
	case !(r.whole() && r.is("create", "update", "patch") || r.status() && r.is("update", "patch")):
		return "a node may only create its own Node and update it and its status"
	case !r.ownName():
		return "a node may only change its own Node"
	}
	return ""
}

// checkPod lets a node follow its own Pods, delete them and write their status. It may also create Pods, which
// nodeRestriction limits to mirrors of its static Pods and to registrations.
func (n nodeAuthorizer) checkPod(ctx context.Context, r nodeAttributes) string {
	switch {
	case r.whole() && r.is("create"):
		return ""
	case r.whole() && r.is("list", "watch"):
		if !r.selectsOwnPods() {
			return "a node may only read its own Pods, with the field selector spec.nodeName=" + r.node
		}
		return ""
	case r.whole() && r.is("get", "delete"), r.status() && r.is("update", "patch"):
		return n.checkOwnPod(ctx, r)
	}
	return "a node may only read its own Pods, delete them, write their status and create mirrors of its static Pods"
}

// checkOwnPod waits for the index, which may not have a new Pod yet.
func (n nodeAuthorizer) checkOwnPod(ctx context.Context, r nodeAttributes) string {
	elsewhere := false
	here := awaitIndex(ctx, func() bool {
		p := n.pods.get(r.GetNamespace(), r.GetName())
		elsewhere = p != nil && p.node != "" && p.node != r.node
		return elsewhere || p != nil && p.node == r.node
	})
	if here && !elsewhere {
		return ""
	}
	return fmt.Sprintf("Pod %s/%s does not run on node %s", r.GetNamespace(), r.GetName(), r.node)
}

// selectsOwnPods reports whether a list or watch is limited to the node's Pods.
func (r nodeAttributes) selectsOwnPods() bool {
	requirements, err := r.GetFieldSelector()
	if err != nil {
		return false
	}
	for _, q := range requirements {
		equals := q.Operator == selection.Equals || q.Operator == selection.DoubleEquals
		if q.Field == "spec.nodeName" && equals && q.Value == r.node {
			return true
		}
	}
	return false
}

// checkRead lets a node read a Secret or a ConfigMap that one of its Pods, or a load balancer, refers to, and the few that
// all nodes need. A list or watch with a field selector of one name has that name.
func (n nodeAuthorizer) checkRead(ctx context.Context, r nodeAttributes) string {
	switch {
	case !r.whole() || !r.reads() || r.GetName() == "":
		return "a node may only read single " + r.GetResource() + ", by name"
	case r.readsOfSpeakers(), r.readsCluster():
		return ""
	}
	return n.checkRelated(ctx, r)
}

// readsOfSpeakers reports whether a request reads an object that the speakers of all nodes work with: the list of
// voters, the key of their messages, or a password for BGP.
func (r nodeAttributes) readsOfSpeakers() bool {
	if !r.whole() || !r.reads() || r.GetNamespace() != metav1.NamespaceSystem {
		return false
	}
	if r.GetResource() == "configmaps" {
		return r.GetName() == svc.VotersConfigMap
	}
	return r.GetName() == svc.SpeakerKeySecret || strings.HasPrefix(r.GetName(), svc.BGPPasswordPrefix)
}

// readsCluster reports whether a request is for the ranges and authorities that all nodes have in common.
func (r nodeAttributes) readsCluster() bool {
	return r.whole() && r.reads() && r.resource() == schema.GroupResource{Resource: "configmaps"} &&
		r.GetNamespace() == metav1.NamespacePublic && r.GetName() == join.ClusterConfigMap
}

// checkToken lets a node request tokens of the ServiceAccounts of its Pods; nodeRestriction checks the Pod.
func (n nodeAuthorizer) checkToken(ctx context.Context, r nodeAttributes) string {
	if r.GetSubresource() != "token" || !r.is("create") {
		return "a node may only request tokens of its Pods' ServiceAccounts"
	}
	return n.checkRelated(ctx, r)
}

// checkRelated accepts an object that one of the node's Pods refers to, or a load balancer: any node may have to
// serve that.
func (n nodeAuthorizer) checkRelated(ctx context.Context, r nodeAttributes) string {
	related := awaitIndex(ctx, func() bool {
		return n.pods.referred(r.node, r.GetResource(), r.GetNamespace(), r.GetName()) ||
			n.tls.named(r.GetResource(), r.GetNamespace(), r.GetName())
	})
	if related {
		return ""
	}
	return fmt.Sprintf("no relationship found between node '%s' and this object", r.node) // as kube-apiserver
}

// checkLease lets a node keep its own Lease.
func (n nodeAuthorizer) checkLease(ctx context.Context, r nodeAttributes) string {
	switch {
	case r.GetNamespace() == metav1.NamespaceSystem:
		return n.checkSystemLease(ctx, r)
	case r.GetNamespace() != leaseNamespace || !r.whole() || !r.is("get", "create", "update", "patch", "delete"):
		return "a node may only write its own Lease, in " + leaseNamespace
	case !r.ownName():
		return "a node may only write its own Lease"
	}
	return ""
}

// checkSystemLease lets a node read the Lease of the versions that all nodes must report, and keep the witness, which
// the speakers of all nodes write. nodeRestriction checks the name of a Lease that it creates.
func (nodeAuthorizer) checkSystemLease(_ context.Context, r nodeAttributes) string {
	switch {
	case !r.whole():
	case r.reads() && (r.GetName() == svc.ProgrammedLease || r.GetName() == svc.WitnessLease),
		r.is("update", "patch") && r.GetName() == svc.WitnessLease,
		r.is("create"):
		return ""
	}
	return "a node may only write the Lease " + svc.WitnessLease + " in this namespace"
}

// checkSlice lets a node write EndpointSlices in the namespace of the cluster's DNS, of which its DNS server is an
// endpoint. nodeRestriction checks which.
func (nodeAuthorizer) checkSlice(_ context.Context, r nodeAttributes) string {
	if r.GetNamespace() == dnsNamespace && r.whole() && r.is("create", "update", "patch", "delete") {
		return ""
	}
	return "a node may only write the EndpointSlices of its DNS server, in " + dnsNamespace
}

// checkSpeaker lets a node read all Speakers, which find each other by them, and write its own one.
func (nodeAuthorizer) checkSpeaker(_ context.Context, r nodeAttributes) string {
	switch {
	case r.whole() && r.reads():
		return ""
	case (r.whole() || r.status()) && r.is("create", "update", "patch", "delete") && r.ownName():
		return ""
	}
	return "a node may only write its own Speaker"
}
