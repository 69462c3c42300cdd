package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// What svc.FrontKeysAnnotation names.
const (
	keyOfLabel      = "label"
	keyOfAnnotation = "annotation"
)

// The kinds of objects that have Services.
const (
	kindGateway = "Gateway"
	kindSet     = "ListenerSet"
	kindGrant   = "ReferenceGrant"
	kindPolicy  = "BackendTLSPolicy"
)

// front returns the Service of a front with some ports, by the names of their protocols.
func front(n svc.Name, ports map[gateway.PortKey]string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{}}}
	s.Spec = corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(svc.LoadBalancerClass), AllocateLoadBalancerNodePorts: new(false),
		IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack),
	}
	sorted := slices.SortedFunc(maps.Keys(ports), func(a, b gateway.PortKey) int {
		return cmp.Or(cmp.Compare(a.Number, b.Number), strings.Compare(ports[a], ports[b]))
	})
	for _, p := range sorted {
		protocol := corev1.ProtocolTCP
		if p.UDP {
			protocol = corev1.ProtocolUDP
		}
		name := fmt.Sprintf("%s-%d", ports[p], p.Number)
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: name, Port: int32(p.Number), Protocol: protocol})
	}
	// Whether endpoints are ready, Kubernetes knows: no node has to ask all backends of all routes.
	// Only the table knows which ports are of HTTPS.
	s.Annotations = map[string]string{dialect.LBProtocol: "http", dialect.LBHealthCheck: "false"}
	return s
}

// serviceOf returns the Service of a Gateway. Labels and annotations of its infrastructure come first: they cannot replace
// what makes it the front.
func serviceOf(g *gwv1.Gateway, ports map[gateway.PortKey]string, opened []trust.Ref, orders []svc.Name) *corev1.Service {
	s := front(names.ServiceOfGateway(svc.NameOf(g)), ports)
	var keys []string
	if i := g.Spec.Infrastructure; i != nil {
		for k, v := range i.Labels {
			s.Labels[string(k)] = string(v)
			keys = append(keys, keyOfLabel+":"+string(k))
		}
		for k, v := range i.Annotations {
			if _, fixed := s.Annotations[string(k)]; !fixed {
				s.Annotations[string(k)] = string(v)
				keys = append(keys, keyOfAnnotation+":"+string(k))
			}
		}
	}
	addresses, family := addressesFor(g)
	if family != "" {
		s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = new(corev1.IPFamilyPolicySingleStack), []corev1.IPFamily{family}
	}
	if len(addresses) > 0 {
		s.Annotations[dialect.LBAddresses] = strings.Join(addresses, ",")
		keys = append(keys, keyOfAnnotation+":"+dialect.LBAddresses)
	}
	if _, has := s.Annotations[dialect.LBIdleTimeout]; !has && !slices.ContainsFunc(slices.Collect(maps.Keys(ports)), isTCP) {
		s.Annotations[dialect.LBIdleTimeout] = "3600" // the default; by it a front with datagrams only takes the proxied way
		keys = append(keys, keyOfAnnotation+":"+dialect.LBIdleTimeout)
	}
	slices.Sort(keys)
	s.Annotations[svc.FrontKeysAnnotation] = strings.Join(slices.Compact(keys), ",")
	open(s, slices.DeleteFunc(slices.Clone(opened), func(r trust.Ref) bool { return r.Namespace != g.Namespace }))
	order(s, orders)
	s.Labels[names.FrontLabel], s.Labels[names.NameLabel] = names.FrontGateway, labelValue(g.Name)
	s.Labels[names.ClassLabel] = labelValue(string(g.Spec.GatewayClassName))
	s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(g, schema.GroupVersion(gwv1.GroupVersion).WithKind(kindGateway))}
	return s
}

// addressesFor returns the addresses that a Gateway asks for, the first of each family: others are not usable. If all that it asks
// for are of one family, it has no address of the other.
func addressesFor(g *gwv1.Gateway) (addresses []string, only corev1.IPFamily) {
	families := map[corev1.IPFamily]bool{}
	for _, a := range g.Spec.Addresses {
		asked, err := netip.ParseAddr(a.Value)
		if err != nil {
			only = ""
			families[only] = true // any address
			continue
		}
		if only = corev1.IPv6Protocol; asked.Is4() {
			only = corev1.IPv4Protocol
		}
		if !families[only] {
			families[only] = true
			addresses = append(addresses, asked.String())
		}
	}
	if len(families) != 1 {
		only = ""
	}
	return addresses, only
}

// serviceOfSet returns the Service that names the Secrets of a ListenerSet's namespace.
func serviceOfSet(set *gwv1.ListenerSet, secrets, orders []svc.Name) *corev1.Service {
	owner := metav1.NewControllerRef(set, schema.GroupVersion(gwv1.GroupVersion).WithKind(kindSet))
	s := openingService(names.ServiceOfSet(svc.NameOf(set)), names.FrontSet, owner, trust.SecretRefs(secrets))
	order(s, orders)
	return s
}

// serviceOfGrant returns the Service that names the objects of a ReferenceGrant's namespace that Gateways use by it. It is
// deleted with the grant.
func serviceOfGrant(grant *gwv1.ReferenceGrant, opened []trust.Ref) *corev1.Service {
	owner := metav1.NewControllerRef(grant, schema.GroupVersion(gwv1.GroupVersion).WithKind(kindGrant))
	return openingService(names.ServiceOfGrant(svc.NameOf(grant)), names.FrontGrant, owner, opened)
}

// serviceOfPolicy returns the Service that names the objects with authorities of a BackendTLSPolicy.
func serviceOfPolicy(policy *gwv1.BackendTLSPolicy, opened []trust.Ref) *corev1.Service {
	owner := metav1.NewControllerRef(policy, schema.GroupVersion(gwv1.GroupVersion).WithKind(kindPolicy))
	return openingService(names.ServiceOfPolicy(svc.NameOf(policy)), names.FrontPolicy, owner, opened)
}

// openingService returns a Service that names objects of its namespace. It has no address and no ports: who may change
// Services of a namespace lets nodes read objects of that namespace, and of no other.
func openingService(n svc.Name, kind string, owner *metav1.OwnerReference, opened []trust.Ref) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{names.FrontLabel: kind}, Annotations: map[string]string{},
		OwnerReferences: []metav1.OwnerReference{*owner},
	}}
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: corev1.ClusterIPNone}
	open(s, opened)
	return s
}

// keepMeshService makes the Service by which nodes know that routes name Services as their parents.
func (c *controller) keepMeshService(ctx context.Context, have *corev1.Service) error {
	n := names.MeshService()
	want := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{names.FrontLabel: names.FrontMesh},
	}}
	want.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: corev1.ClusterIPNone}
	problem, err := c.keepService(ctx, want, have)
	if problem != "" {
		err = errors.New(problem)
	}
	return err
}

func isTCP(p gateway.PortKey) bool { return !p.UDP }

// open names the Secrets and ConfigMaps that nodes need: they may read no others.
func open(s *corev1.Service, refs []trust.Ref) {
	named := map[string][]string{}
	for _, r := range refs {
		named[r.Kind] = append(named[r.Kind], r.Name.String())
	}
	for kind, annotation := range map[string]string{trust.Secret: svc.FrontSecretsAnnotation, trust.ConfigMap: svc.FrontConfigMapsAnnotation} {
		slices.Sort(named[kind])
		s.Annotations[annotation] = strings.Join(slices.Compact(named[kind]), ",")
	}
}

// order names the Secrets that the controllers may make and change: they have their certificates ordered. A Service that never had one
// lacks the annotation.
func order(s *corev1.Service, secrets []svc.Name) {
	text := make([]string, 0, len(secrets))
	for _, n := range secrets {
		text = append(text, n.String())
	}
	s.Annotations[svc.FrontOrdersAnnotation] = strings.Join(text, ",")
}

// labelValue cuts a name that is too long for a label.
func labelValue(name string) string {
	const most = 63
	return strings.TrimRight(name[:min(len(name), most)], "-.")
}

// refusal is a Service that the API server refuses as it is wanted: by a quota, a policy, or for its name.
type refusal struct {
	want    *corev1.Service
	changed bool // it is there, and cannot be changed
	why     string
	wait    time.Duration
	again   time.Time
}

// wanting is an object that wants a Service. The names of several objects can lead to one name of a Service.
type wanting struct {
	service    svc.Name
	kind, name string
}

// wantingOf returns whose Service s is.
func wantingOf(s *corev1.Service) wanting {
	w := wanting{service: svc.NameOf(s)}
	if owner := metav1.GetControllerOf(s); owner != nil {
		w.kind, w.name = owner.Kind, owner.Name
	}
	return w
}

type refusals map[wanting]*refusal

// The first and the longest time until a refused write is tried again. A tenant may want many Services over its quota.
const firstRefusal, mostRefusal = time.Second, time.Minute

// keepService makes the Service of a front, or changes it. It returns why the front cannot have it, "" if it can.
func (c *controller) keepService(ctx context.Context, want, have *corev1.Service) (problem string, err error) {
	of := wantingOf(want)
	c.kept[of] = true
	before := c.refusals[of]
	if before != nil && (before.changed != (have != nil) || !equality.Semantic.DeepEqual(before.want, want)) {
		before = nil
	}
	if before != nil && time.Now().Before(before.again) {
		return before.why, nil
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	problem, err = c.writeService(ctx, want, have)
	if !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) && !apierrors.IsAlreadyExists(err) {
		delete(c.refusals, of)
		return problem, err
	}
	r := &refusal{want: want, changed: have != nil, why: err.Error(), wait: firstRefusal}
	if problem != "" {
		r.why = problem
	}
	if before != nil {
		r.wait = min(2*before.wait, mostRefusal)
	}
	r.again = time.Now().Add(r.wait)
	c.refusals[of] = r
	return r.why, nil
}

// heldBy tells whose a Service is that another object would have by its name. nil is one that could not be read.
func heldBy(n svc.Name, s *corev1.Service) string {
	if s == nil {
		return fmt.Sprintf("there is a Service %s, which cannot be read now", n)
	}
	owner := metav1.GetControllerOf(s)
	if owner == nil || !ours(s) {
		return fmt.Sprintf("there is a Service %s that is not of this controller", n)
	}
	return fmt.Sprintf("its Service would be %s, which %.63s %.253s has; give one of them another name", n, owner.Kind, owner.Name)
}

// isHeldBy reports whether this controller has made a Service for an object of a kind: names of different objects can lead to one name
// of a Service, and an object that was deleted and made again is another one.
func isHeldBy(s *corev1.Service, kind string, o metav1.Object) bool {
	owner := metav1.GetControllerOf(s)
	return ours(s) && owner != nil && owner.Kind == kind && owner.Name == o.GetName() && owner.UID == o.GetUID()
}

// holders finds out which Services objects have.
type holders struct {
	have   map[svc.Name]*corev1.Service
	wanted map[svc.Name]bool
}

// claim wants the Service that an object of a kind has or gets. One that another object has is that object's to want: it must not
// outlive its use there.
func (h holders) claim(service svc.Name, kind string, o metav1.Object) {
	if s := h.have[service]; s == nil || isHeldBy(s, kind, o) {
		h.wanted[service] = true
	}
}

// of returns the Service of an object, nil if it has none, or another object has the one of its name.
func (h holders) of(service svc.Name, kind string, o metav1.Object) *corev1.Service {
	if s := h.have[service]; s != nil && isHeldBy(s, kind, o) {
		return s
	}
	return nil
}

// next forgets refusals of Services that are not kept any more, and returns when the next of the others is tried again, 0 if there is none.
func (all refusals) next(kept map[wanting]bool) (next time.Duration) {
	maps.DeleteFunc(all, func(w wanting, _ *refusal) bool { return !kept[w] })
	for _, r := range all {
		if d := max(time.Until(r.again), time.Millisecond); next == 0 || d < next {
			next = d
		}
	}
	return next
}

// writeService makes or changes a Service. An error of a refusal is the API server's.
func (c *controller) writeService(ctx context.Context, want, have *corev1.Service) (problem string, err error) {
	services := c.client.CoreV1().Services(want.Namespace)
	if have == nil {
		_, err := services.Create(ctx, want, metav1.CreateOptions{FieldManager: svc.LoadBalancer})
		if apierrors.IsAlreadyExists(err) { // perhaps the watch has not brought it yet
			there, failed := services.Get(ctx, want.Name, metav1.GetOptions{})
			switch {
			case failed != nil:
				return heldBy(svc.NameOf(want), nil), err
			case isOf(there, want) || ofBefore(there, want):
				return "", nil
			}
			return heldBy(svc.NameOf(want), there), err
		}
		return "", err
	}
	if ofBefore(have, want) {
		return "", nil
	}
	if !isOf(have, want) {
		return heldBy(svc.NameOf(want), have), nil
	}
	labels, annotations := changes(have, want)
	spec := map[string]any{}
	if !samePorts(have.Spec.Ports, want.Spec.Ports) {
		spec["ports"] = want.Spec.Ports
	}
	switch familiesOf(have, want) {
	case sameFamilies:
	case otherPolicy:
		spec["ipFamilyPolicy"] = want.Spec.IPFamilyPolicy
	case otherFamily: // no Service can have another first family: it is made again
		o := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(have.UID))}
		return "its Service is made again for another family of addresses", services.Delete(ctx, have.Name, o)
	}
	if len(labels)+len(annotations)+len(spec) == 0 {
		return "", nil
	}
	patch := map[string]any{
		"metadata": map[string]any{"uid": have.UID, "labels": labels, "annotations": annotations},
		"spec":     spec,
	}
	text, err := json.Marshal(patch)
	if err != nil {
		return "", err
	}
	_, err = services.Patch(ctx, want.Name, types.MergePatchType, text, metav1.PatchOptions{FieldManager: svc.LoadBalancer})
	return "", err
}

// ofBefore reports whether a Service is of a deleted owner with the name of the present one: it goes first.
func ofBefore(have, want *corev1.Service) bool {
	was, is := metav1.GetControllerOf(have), metav1.GetControllerOf(want)
	return ours(have) && was != nil && is != nil && was.Kind == is.Kind && was.Name == is.Name && was.UID != is.UID
}

// What differs between the families of two Services.
type familyChange int

const (
	sameFamilies familyChange = iota
	otherPolicy
	otherFamily
)

// familiesOf compares the families of a Service with the desired ones. The API server decides about them where a Service has no policy.
func familiesOf(have, want *corev1.Service) familyChange {
	h, w := have.Spec, want.Spec
	switch {
	case h.IPFamilyPolicy == nil || w.IPFamilyPolicy == nil:
		return sameFamilies
	case len(w.IPFamilies) > 0 && len(h.IPFamilies) > 0 && w.IPFamilies[0] != h.IPFamilies[0]:
		return otherFamily
	case *h.IPFamilyPolicy != *w.IPFamilyPolicy:
		return otherPolicy
	}
	return sameFamilies
}

// changes returns the labels and annotations of have that differ from want: nil is to be removed. A key that the Gateway
// gave have and no longer gives is removed; others of have stay.
func changes(have, want *corev1.Service) (labels, annotations map[string]any) {
	labels, annotations = differing(have.Labels, want.Labels), differing(have.Annotations, want.Annotations)
	for given := range strings.SplitSeq(have.Annotations[svc.FrontKeysAnnotation], ",") {
		kind, key, _ := strings.Cut(given, ":")
		if _, stays := want.Labels[key]; kind == keyOfLabel && !stays {
			labels[key] = nil
		}
		if _, stays := want.Annotations[key]; kind == keyOfAnnotation && !stays {
			annotations[key] = nil
		}
	}
	return labels, annotations
}

func differing(have, want map[string]string) map[string]any {
	out := map[string]any{}
	for k, v := range want {
		if h, ok := have[k]; h != v || !ok && k != svc.FrontOrdersAnnotation {
			out[k] = v
		}
	}
	return out
}

func samePorts(a, b []corev1.ServicePort) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.ServicePort) bool {
		return x.Name == y.Name && x.Port == y.Port && x.Protocol == y.Protocol
	})
}
