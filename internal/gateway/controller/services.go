package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/svc"
)

// Annotations of load balancers that a front needs (docs/annotations.md).
const (
	protocolAnnotation  = "fairlead.dev/lb-protocol" // only the table knows which ports are of HTTPS
	addressesAnnotation = "fairlead.dev/lb-addresses"
	healthAnnotation    = "fairlead.dev/lb-health-check"
	idleAnnotation      = "fairlead.dev/lb-idle-timeout"
)

// What svc.FrontKeysAnnotation names.
const (
	keyOfLabel      = "label"
	keyOfAnnotation = "annotation"
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
	s.Annotations = map[string]string{protocolAnnotation: "http", healthAnnotation: "false"}
	return s
}

// serviceOf returns the Service of a Gateway. Labels and annotations of its infrastructure come first: they cannot replace
// what makes it the front.
func serviceOf(g *gwv1.Gateway, ports map[gateway.PortKey]string, secrets []svc.Name) *corev1.Service {
	s := front(gateway.ServiceOfGateway(svc.NameOf(g)), ports)
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
	var addresses []string
	for _, a := range g.Spec.Addresses {
		if a.Value != "" {
			addresses = append(addresses, a.Value)
		}
	}
	if len(addresses) > 0 {
		s.Annotations[addressesAnnotation] = strings.Join(addresses, ",")
		keys = append(keys, keyOfAnnotation+":"+addressesAnnotation)
	}
	if _, has := s.Annotations[idleAnnotation]; !has && !slices.ContainsFunc(slices.Collect(maps.Keys(ports)), isTCP) {
		s.Annotations[idleAnnotation] = "3600" // the default; by it a front with datagrams only takes the proxied way
		keys = append(keys, keyOfAnnotation+":"+idleAnnotation)
	}
	slices.Sort(keys)
	s.Annotations[svc.FrontKeysAnnotation] = strings.Join(slices.Compact(keys), ",")
	setSecrets(s, slices.DeleteFunc(slices.Clone(secrets), func(n svc.Name) bool { return n.Namespace != g.Namespace }))
	s.Labels[gateway.FrontLabel], s.Labels[gateway.NameLabel] = gateway.FrontGateway, labelValue(g.Name)
	s.Labels[gateway.ClassLabel] = labelValue(string(g.Spec.GatewayClassName))
	s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(g, schema.GroupVersion(gwv1.GroupVersion).WithKind("Gateway"))}
	return s
}

// serviceOfSet returns the Service that names the Secrets of a ListenerSet's namespace.
func serviceOfSet(set *gwv1.ListenerSet, secrets []svc.Name) *corev1.Service {
	owner := metav1.NewControllerRef(set, schema.GroupVersion(gwv1.GroupVersion).WithKind("ListenerSet"))
	return secretsService(gateway.ServiceOfSet(svc.NameOf(set)), gateway.FrontSet, owner, secrets)
}

// serviceOfGrant returns the Service that names the Secrets of a ReferenceGrant's namespace that Gateways use by it. It is
// deleted with the grant.
func serviceOfGrant(grant *gwv1.ReferenceGrant, secrets []svc.Name) *corev1.Service {
	owner := metav1.NewControllerRef(grant, schema.GroupVersion(gwv1.GroupVersion).WithKind("ReferenceGrant"))
	return secretsService(gateway.ServiceOfGrant(svc.NameOf(grant)), gateway.FrontGrant, owner, secrets)
}

// secretsService returns a Service that names Secrets of its namespace. It has no address and no ports: who may change
// Services of a namespace lets nodes read Secrets of that namespace, and of no other.
func secretsService(n svc.Name, kind string, owner *metav1.OwnerReference, secrets []svc.Name) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{gateway.FrontLabel: kind}, Annotations: map[string]string{},
		OwnerReferences: []metav1.OwnerReference{*owner},
	}}
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: corev1.ClusterIPNone}
	setSecrets(s, secrets)
	return s
}

func isTCP(p gateway.PortKey) bool { return !p.UDP }

// setSecrets names the Secrets that nodes need: they may read no others.
func setSecrets(s *corev1.Service, names []svc.Name) {
	var out []string
	for _, n := range names {
		out = append(out, n.String())
	}
	slices.Sort(out)
	s.Annotations[svc.FrontSecretsAnnotation] = strings.Join(slices.Compact(out), ",")
}

// labelValue cuts a name that is too long for a label.
func labelValue(name string) string {
	const most = 63
	return strings.TrimRight(name[:min(len(name), most)], "-.")
}

// keepService makes the Service of a front, or changes it. It returns why the front cannot have it, "" if it can.
func (c *controller) keepService(ctx context.Context, want, have *corev1.Service) (problem string, err error) {
	services := c.client.CoreV1().Services(want.Namespace)
	if have == nil {
		_, err := services.Create(ctx, want, metav1.CreateOptions{FieldManager: svc.LoadBalancer})
		if apierrors.IsAlreadyExists(err) {
			return fmt.Sprintf("there is a Service %s that is not of this controller", svc.NameOf(want)), nil
		}
		return "", err
	}
	if !ours(have) || len(want.OwnerReferences) > 0 && metav1.GetControllerOf(have).UID != want.OwnerReferences[0].UID {
		return fmt.Sprintf("there is a Service %s that is not of this controller", svc.NameOf(want)), nil
	}
	labels, annotations := changes(have, want)
	if len(labels)+len(annotations) == 0 && samePorts(have.Spec.Ports, want.Spec.Ports) {
		return "", nil
	}
	patch := map[string]any{
		"metadata": map[string]any{"uid": have.UID, "labels": labels, "annotations": annotations},
		"spec":     map[string]any{"ports": want.Spec.Ports},
	}
	text, err := json.Marshal(patch)
	if err != nil {
		return "", err
	}
	_, err = services.Patch(ctx, want.Name, types.MergePatchType, text, metav1.PatchOptions{FieldManager: svc.LoadBalancer})
	return "", err
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
		if h, ok := have[k]; !ok || h != v {
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
