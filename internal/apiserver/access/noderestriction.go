package access

import (
	"context"
	"fmt"
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/svc"
)

// dnsNamespace is the namespace of the Service of the cluster's DNS.
const dnsNamespace = metav1.NamespaceSystem

// restrictedLabels is the domain of labels that select where Pods may run, which a
// node must not set on itself.
const restrictedLabels = "node-restriction.kubernetes.io"

// ownLabels are the labels of reserved domains that a node may set on itself: a kubelet's, as kube-apiserver's admission
// plugin NodeRestriction has them (KEP-279).
func ownLabels() []string {
	return []string{
		corev1.LabelHostname, corev1.LabelTopologyZone, corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaZone,
		corev1.LabelFailureDomainBetaRegion, corev1.LabelInstanceType, corev1.LabelInstanceTypeStable, corev1.LabelOSStable,
		corev1.LabelArchStable, "beta.kubernetes.io/os", "beta.kubernetes.io/arch", corev1.LabelWindowsBuild,
	}
}

// reservedLabel reports whether a node must not set the label k on itself: of the domains kubernetes.io, k8s.io and
// fairlead's it may set only ownLabels and what begins with kubelet.kubernetes.io/ or node.kubernetes.io/.
func reservedLabel(k string) bool {
	domain, _, ok := strings.Cut(k, "/")
	within := func(d string) bool { return domain == d || strings.HasSuffix(domain, "."+d) }
	switch {
	case !ok || !within("kubernetes.io") && !within("k8s.io") && !within(svc.Domain):
		return false
	case within(restrictedLabels) || within(svc.Domain):
		return true
	case within(corev1.LabelNamespaceSuffixKubelet), within(corev1.LabelNamespaceSuffixNode):
		return false
	}
	return !slices.Contains(ownLabels(), k)
}

func hasKey(m map[string]string, k string) bool {
	_, ok := m[k]
	return ok
}

// nodeRestriction rejects writes of a node to objects that are not its own, where
// that depends on the object.
type nodeRestriction struct {
	*admission.Handler
	pods    *podIndex
	nodes   nodeIndex
	removed *removedNodes
	dns     *dnsPlaces
	// rbac answers only by roles: the node authorizer lets every node create Pods, for mirrors.
	rbac authorizer.UnconditionalAuthorizer
}

var _ admission.ValidationInterface = nodeRestriction{}

func newNodeRestriction(
	pods *podIndex, nodes nodeIndex, removed *removedNodes, dns *dnsPlaces, rbac authorizer.UnconditionalAuthorizer,
) nodeRestriction {
	return nodeRestriction{admission.NewHandler(admission.Create, admission.Update, admission.Delete), pods, nodes, removed, dns, rbac}
}

// Validate accepts all requests of users that are not nodes.
func (n nodeRestriction) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	node, ok := NodeOf(a.GetUserInfo())
	if !ok {
		return nil
	}
	err := checkFinalizers(node, a)
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	switch r := a.GetResource(); r.Group + "/" + r.Resource {
	case "/nodes":
		if err = checkNode(node, a); err == nil && a.GetOperation() == admission.Create {
			err = n.removed.check(ctx, node, a.GetUserInfo())
		}
	case "/pods":
		err = n.checkPod(ctx, node, a)
	case "/serviceaccounts":
		err = n.checkToken(node, a)
	case svc.Domain + "/" + svc.SpeakersResource:
		if writtenName(a) != node {
			err = fmt.Errorf("node %q may only write its own Speaker", node)
		}
	case "coordination.k8s.io/leases":
		err = checkLease(node, a)
	case "discovery.k8s.io/endpointslices":
		err = n.checkSlice(ctx, node, a)
	}
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	return nil
}

// checkFinalizers rejects finalizers that a node adds, to objects of every kind: they would keep what an administrator
// deletes.
func checkFinalizers(node string, a admission.Attributes) error {
	now, ok := a.GetObject().(metav1.Object)
	if !ok {
		return nil
	}
	var had []string
	if old, ok := a.GetOldObject().(metav1.Object); ok {
		had = old.GetFinalizers()
	}
	for _, f := range now.GetFinalizers() {
		if !slices.Contains(had, f) {
			return fmt.Errorf("node %q may not add the finalizer %q: nodes must not delay deletions", node, f)
		}
	}
	return nil
}

// writtenName returns the name of the object that a writes. A request to create has it only in the object.
func writtenName(a admission.Attributes) string {
	if a.GetOperation() != admission.Create {
		return a.GetName()
	}
	if m, ok := a.GetObject().(metav1.Object); ok {
		return m.GetName()
	}
	return ""
}

// checkLease accepts the node's own Lease and the witness, which all speakers write. The
// latter is beside the Leases of servers: it must not pass for one of them.
func checkLease(node string, a admission.Attributes) error {
	name := writtenName(a)
	switch a.GetNamespace() {
	case leaseNamespace:
		if name == node {
			return nil
		}
	case metav1.NamespaceSystem:
		if name == svc.WitnessLease && a.GetOperation() != admission.Delete {
			return checkMarks(node, a)
		}
	}
	return fmt.Errorf("node %q may only write its own Lease in %s, and %s/%s", node, leaseNamespace, metav1.NamespaceSystem, svc.WitnessLease)
}

// checkMarks rejects labels and annotations of the product's domain that a write adds
// or changes.
func checkMarks(node string, a admission.Attributes) error {
	now, ok := a.GetObject().(metav1.Object)
	if !ok {
		return fmt.Errorf("unexpected %T", a.GetObject())
	}
	old, ok := a.GetOldObject().(metav1.Object)
	if !ok {
		old = &metav1.ObjectMeta{}
	}
	for _, m := range []struct{ now, old map[string]string }{
		{now.GetLabels(), old.GetLabels()}, {now.GetAnnotations(), old.GetAnnotations()},
	} {
		for k, v := range m.now {
			if was, ok := m.old[k]; strings.HasPrefix(k, svc.Domain+"/") && (!ok || was != v) {
				return fmt.Errorf("node %q may not set %q on a Lease", node, k)
			}
		}
	}
	return nil
}

func checkNode(node string, a admission.Attributes) error {
	if a.GetOperation() == admission.Delete {
		return fmt.Errorf("node %q may not delete a Node", node)
	}
	n, ok := a.GetObject().(*corev1.Node)
	if !ok {
		return fmt.Errorf("unexpected %T", a.GetObject())
	}
	if n.Name != node {
		return fmt.Errorf("node %q may only create and change its own Node, not %q", node, n.Name)
	}
	old, updated := a.GetOldObject().(*corev1.Node)
	if !updated || old == nil {
		old = &corev1.Node{}
	}
	for _, labels := range []map[string]string{n.Labels, old.Labels} {
		for k := range labels {
			if was, had := old.Labels[k]; reservedLabel(k) && (n.Labels[k] != was || had != hasKey(n.Labels, k)) {
				return fmt.Errorf("node %q may not change the label %q: a node may set, beside labels of domains that are not reserved, %s",
					node, k, strings.Join(ownLabels(), ", "))
			}
		}
	}
	const confirmed = svc.NodeAddressesAnnotation
	if was, had := old.Annotations[confirmed]; n.Annotations[confirmed] != was || had != hasKey(n.Annotations, confirmed) {
		return fmt.Errorf("node %q may not change the annotation %s: an administrator confirms addresses with it", node, confirmed)
	}
	// A node's ranges become routes on every other one.
	if n.Spec.PodCIDR != old.Spec.PodCIDR || !equality.Semantic.DeepEqual(n.Spec.PodCIDRs, old.Spec.PodCIDRs) {
		return fmt.Errorf("node %q may not change the ranges of its Pods (spec.podCIDRs): the controllers assign them", node)
	}
	if a.GetOperation() == admission.Update && !equality.Semantic.DeepEqual(n.Spec.Taints, old.Spec.Taints) {
		return fmt.Errorf("node %q may not change its taints", node)
	}
	if a.GetOperation() == admission.Update && !equality.Semantic.DeepEqual(n.OwnerReferences, old.OwnerReferences) {
		return fmt.Errorf("node %q may not change its owners", node)
	}
	return nil
}

// checkPod checks the Pod as it is stored: the content of an update proves nothing. A node may create the Pods
// of its directory of services, where RBAC lets it, and mirrors.
func (n nodeRestriction) checkPod(ctx context.Context, node string, a admission.Attributes) error {
	if a.GetOperation() == admission.Create {
		p, ok := a.GetObject().(*corev1.Pod)
		if ok && a.GetSubresource() == "" && registration.Is(p) && p.Spec.NodeName == node && p.Annotations[svc.ServicesFileAnnotation] != "" {
			return n.mayRegister(ctx, node, a)
		}
		return n.checkMirror(ctx, node, a)
	}
	p, ok := a.GetOldObject().(*corev1.Pod)
	if !ok || p == nil {
		return fmt.Errorf("node %q may only delete single Pods", node)
	}
	if p.Spec.NodeName != node {
		return fmt.Errorf("node %q may only write to its own Pods: %s/%s is on %q", node, p.Namespace, p.Name, p.Spec.NodeName)
	}
	if now, ok := a.GetObject().(*corev1.Pod); ok && now != nil && !equality.Semantic.DeepEqual(now.Labels, p.Labels) {
		return fmt.Errorf("node %q may not change the labels of a Pod", node)
	}
	return nil
}

// mayRegister accepts a registration of a node that a role lets create Pods.
func (n nodeRestriction) mayRegister(ctx context.Context, node string, a admission.Attributes) error {
	d, _, err := n.rbac.Authorize(ctx, authorizer.AttributesRecord{
		User: a.GetUserInfo(), Verb: "create", APIVersion: "v1", Resource: "pods", Namespace: a.GetNamespace(), ResourceRequest: true,
	})
	if err == nil && d != authorizer.DecisionAllow {
		err = fmt.Errorf("no role lets node %q create Pods in namespace %s", node, a.GetNamespace())
	}
	return err
}

// checkMirror accepts a Pod that shows a static one of the node, as kube-apiserver does. No
// node runs such a Pod; it refers to nothing that the node could read because of it. Unlike
// there, labels need a role: a Service that selects it leads to the address that the node
// gives it.
func (n nodeRestriction) checkMirror(ctx context.Context, node string, a admission.Attributes) error {
	p, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return fmt.Errorf("unexpected %T", a.GetObject())
	}
	if _, ok := p.Annotations[corev1.MirrorPodAnnotationKey]; !ok || a.GetSubresource() != "" {
		return fmt.Errorf("node %q may only create mirrors of its static Pods, with the annotation %s", node, corev1.MirrorPodAnnotationKey)
	}
	if p.Spec.NodeName != node {
		return fmt.Errorf("node %q may only create Pods with its own name in spec.nodeName", node)
	}
	if at := podspec.APIReference(&p.Spec); at != nil {
		return fmt.Errorf("node %q may not create a Pod that refers to objects of the API: %s", node, at)
	}
	if len(p.OwnerReferences) != 1 {
		return fmt.Errorf("node %q may only create Pods with its own Node as the only owner", node)
	}
	o := &p.OwnerReferences[0]
	if o.APIVersion != "v1" || o.Kind != "Node" || o.Name != node || o.Controller == nil || !*o.Controller ||
		o.BlockOwnerDeletion != nil && *o.BlockOwnerDeletion ||
		n.nodes.await(ctx, indexTimeout, node, func(n *corev1.Node) bool { return n.UID == o.UID }) == nil {
		return fmt.Errorf("node %q may only create Pods with its own Node as controller, by name and UID, without blockOwnerDeletion", node)
	}
	if len(p.Labels) == 0 {
		return nil
	}
	if err := n.mayRegister(ctx, node, a); err != nil {
		return fmt.Errorf("%w, and a mirror with labels may be selected by a Service; allow it by 'kubectl create rolebinding nodes-register "+
			"--namespace %s --clusterrole %s --group %s'", err, a.GetNamespace(), svc.NodeRegistrarRole, svc.NodesGroup)
	}
	return nil
}

// checkToken accepts requests for tokens that are bound to a Pod of the node.
func (n nodeRestriction) checkToken(node string, a admission.Attributes) error {
	r, ok := a.GetObject().(*authenticationv1.TokenRequest)
	if !ok {
		return fmt.Errorf("unexpected %T", a.GetObject())
	}
	ref := r.Spec.BoundObjectRef
	if ref == nil || ref.Kind != "Pod" || ref.APIVersion != "v1" || ref.Name == "" || ref.UID == "" {
		return fmt.Errorf("node %q may only request tokens that are bound to a Pod, by name and UID", node)
	}
	p := n.pods.get(a.GetNamespace(), ref.Name)
	if p == nil || p.UID != ref.UID {
		return fmt.Errorf("node %q: Pod %s with UID %s does not exist", node, ref.Name, ref.UID)
	}
	if p.node != node {
		return fmt.Errorf("node %q may only request tokens of its Pods", node)
	}
	return nil
}

// checkSlice accepts writes to the slices of the node's own DNS server, one of each
// family, with one endpoint at an address of its Node. It accepts writes to another server's slices if they
// only make endpoints unready.
func (n nodeRestriction) checkSlice(ctx context.Context, node string, a admission.Attributes) error {
	old, _ := a.GetOldObject().(*discoveryv1.EndpointSlice)
	now, _ := a.GetObject().(*discoveryv1.EndpointSlice)
	for _, s := range []*discoveryv1.EndpointSlice{old, now} {
		if s != nil && s.Labels[discoveryv1.LabelServiceName] != svc.DNSService {
			return fmt.Errorf("node %q may only write EndpointSlices of %s/%s", node, dnsNamespace, svc.DNSService)
		}
	}
	if old == nil && now == nil {
		return fmt.Errorf("node %q may only delete single EndpointSlices", node)
	}
	if now == nil && ofNode(old, node) {
		return nil
	}
	if onlyUnready(old, now) {
		if ofNode(old, node) {
			return nil
		}
		return n.dns.mayMark(old, node, a.GetUserInfo(), a.IsDryRun())
	}
	if (old == nil || ofNode(old, node)) && now != nil && ofNode(now, node) {
		if err := n.checkEndpoints(ctx, node, now); err != nil {
			return err
		}
		if !anyInUse(now) || anyInUse(old) {
			return nil
		}
		return n.dns.take(ctx, node, a.GetUserInfo(), a.IsDryRun())
	}
	return fmt.Errorf("node %q may only write the EndpointSlices of its DNS server, or mark another one's endpoints unready", node)
}

// maxOwnPrefix is the part of a slice's name that is compared: longer ones end with a
// hash.
const maxOwnPrefix = 200

// checkEndpoints checks that a slice is one of the two that a node may have, that it goes with the node, and that its
// only endpoint is the node itself.
func (n nodeRestriction) checkEndpoints(ctx context.Context, node string, s *discoveryv1.EndpointSlice) error {
	name := svc.DNSService + "-" + node
	if s.Name != name && s.Name != name+"-ipv6" && (len(name) <= maxOwnPrefix || !strings.HasPrefix(s.Name, name[:maxOwnPrefix])) {
		return fmt.Errorf("node %q may only write the EndpointSlices %s and %s-ipv6", node, name, name)
	}
	if s.Labels[discoveryv1.LabelManagedBy] != svc.DNSSliceManager || s.Labels[svc.NodeLabel] != svc.NodeLabelValue(node) {
		return fmt.Errorf("node %q must label its EndpointSlices %s=%s and %s=%s", node,
			discoveryv1.LabelManagedBy, svc.DNSSliceManager, svc.NodeLabel, svc.NodeLabelValue(node))
	}
	isOwner := func(n *corev1.Node) bool { return owns(n, &s.OwnerReferences[0]) }
	if len(s.OwnerReferences) != 1 || n.nodes.await(ctx, indexTimeout, node, isOwner) == nil {
		return fmt.Errorf("node %q must name its Node, by name and UID, as the only owner of its EndpointSlices: they go with it", node)
	}
	if len(s.Endpoints) > 1 || len(s.Endpoints) == 1 && len(s.Endpoints[0].Addresses) != 1 {
		return fmt.Errorf("node %q may list one address in a slice", node)
	}
	for i := range s.Endpoints {
		addr := s.Endpoints[i].Addresses[0]
		if n.nodes.await(ctx, indexTimeout, node, func(n *corev1.Node) bool { return hasAddress(n, addr) }) == nil {
			return fmt.Errorf("node %q may only list its own addresses: its Node does not have %s", node, addr)
		}
	}
	return nil
}

// owns reports whether o refers to a Node.
func owns(n *corev1.Node, o *metav1.OwnerReference) bool {
	return o.APIVersion == "v1" && o.Kind == "Node" && o.Name == n.Name && o.UID == n.UID
}

func hasAddress(n *corev1.Node, addr string) bool {
	return slices.ContainsFunc(n.Status.Addresses, func(a corev1.NodeAddress) bool {
		return a.Type == corev1.NodeInternalIP && a.Address == addr
	})
}

func ofNode(s *discoveryv1.EndpointSlice, node string) bool {
	for i := range s.Endpoints {
		if n := s.Endpoints[i].NodeName; n == nil || *n != node {
			return false
		}
	}
	return true
}

// onlyUnready reports whether all that changes is that endpoints become unready.
func onlyUnready(old, now *discoveryv1.EndpointSlice) bool {
	if old == nil || now == nil || len(old.Endpoints) != len(now.Endpoints) {
		return false
	}
	old = old.DeepCopy()
	old.ManagedFields, old.ResourceVersion, old.Generation = now.ManagedFields, now.ResourceVersion, now.Generation
	for i := range old.Endpoints {
		before, after := &old.Endpoints[i].Conditions, now.Endpoints[i].Conditions
		for _, c := range []struct{ before, after **bool }{{&before.Ready, &after.Ready}, {&before.Serving, &after.Serving}} {
			if *c.after != nil && !**c.after {
				*c.before = *c.after
			}
		}
	}
	return equality.Semantic.DeepEqual(old, now)
}
