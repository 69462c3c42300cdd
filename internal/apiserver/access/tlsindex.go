package access

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/dialect"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// tlsIndex indexes the Services of type LoadBalancer by the Secrets and ConfigMaps that they name, of TLS and of access
// logs: any node may have to answer for their addresses within a second, and ends or begins TLS and stores logs with
// these. Those without an address, or of the direct way, do not count.
type tlsIndex struct{ informer cache.SharedIndexInformer }

// tlsRefs is the part of a Service that is kept.
type tlsRefs struct {
	metav1.ObjectMeta
	objects []string // secret/NAME and configmap/NAME
	fronts  []string // NAMESPACE/secret/NAME and NAMESPACE/configmap/NAME, of the front of a Gateway or of Ingresses
	ordered []string // NAMESPACE/NAME of the Secrets whose certificates are ordered by ACME
}

// byOrder is the index of the Secrets whose certificates are ordered by ACME.
const byOrder = "order"

func newTLSIndex(client kubernetes.Interface) (*tlsIndex, error) {
	informer := coreinformers.NewServiceInformer(client, metav1.NamespaceAll, 0, cache.Indexers{byReference: tlsKeys, byOrder: orderKeys})
	return &tlsIndex{informer}, informer.SetTransform(toTLSRefs)
}

// run follows the Services until ctx ends.
func (x *tlsIndex) run(ctx context.Context) { x.informer.RunWithContext(ctx) }

// named reports whether a load balancer of the namespace names an object of a resource: secrets or configmaps.
func (x *tlsIndex) named(resource, namespace, name string) bool {
	keys, err := x.informer.GetIndexer().IndexKeys(byReference, namespace+"/"+strings.TrimSuffix(resource, "s")+"/"+name)
	return err == nil && len(keys) > 0
}

// ordered reports whether a load balancer of the namespace has the certificate of a Secret ordered by ACME.
func (x *tlsIndex) ordered(namespace, secret string) bool {
	keys, err := x.informer.GetIndexer().IndexKeys(byOrder, namespace+"/"+secret)
	return err == nil && len(keys) > 0
}

// authorizeOrders lets the controllers keep the Secrets whose certificates they order, and no others: a request that makes
// one by server-side apply has its name, too.
func (x *tlsIndex) authorizeOrders(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser().GetName() != svc.ControllersUser || a.GetResource() != "secrets" || a.GetAPIGroup() != "" || a.GetSubresource() != "" ||
		!slices.Contains([]string{"get", "patch", "create"}, a.GetVerb()) || a.GetName() == "" || a.GetNamespace() == metav1.NamespaceSystem {
		return authorizer.DecisionNoOpinion, "", nil
	}
	if !awaitIndex(ctx, func() bool { return x.ordered(a.GetNamespace(), a.GetName()) }) {
		return authorizer.DecisionNoOpinion, "no load balancer has its certificate ordered", nil
	}
	return authorizer.DecisionAllow, "", nil
}

func orderKeys(obj any) ([]string, error) {
	s, ok := obj.(*tlsRefs)
	if !ok {
		return nil, nil
	}
	return s.ordered, nil
}

func tlsKeys(obj any) ([]string, error) {
	s, ok := obj.(*tlsRefs)
	if !ok {
		return nil, fmt.Errorf("the index of TLS Secrets holds a %T", obj)
	}
	keys := make([]string, 0, len(s.objects))
	for _, name := range s.objects {
		keys = append(keys, s.Namespace+"/"+name)
	}
	keys = append(keys, s.fronts...)
	return keys, nil
}

// frontObjects returns the Secrets and ConfigMaps that the Service of a Gateway or of all Ingresses names, and the Secrets whose
// certificates are ordered for it. A user who may change Services of a namespace opens no object of another one by that.
func frontObjects(s *corev1.Service) (out, ordered []string) {
	shared := s.Namespace == metav1.NamespaceSystem && s.Name == svc.IngressService
	read := func(annotation, kind string) (out []string) {
		for text := range strings.SplitSeq(s.Annotations[annotation], ",") {
			if n, err := svc.ParseName(text); err == nil && (shared || n.Namespace == s.Namespace) {
				out = append(out, n.Namespace+kind+n.Name)
			}
		}
		return out
	}
	out = append(read(svc.FrontSecretsAnnotation, "/secret/"), read(svc.FrontConfigMapsAnnotation, "/configmap/")...)
	return out, read(svc.FrontOrdersAnnotation, "/")
}

// toTLSRefs drops all but what tlsRefs has.
func toTLSRefs(obj any) (any, error) {
	s, ok := obj.(*corev1.Service)
	if !ok {
		return obj, nil // a tombstone
	}
	out := &tlsRefs{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion}}
	if s.Spec.ClusterIP == corev1.ClusterIPNone { // of a ListenerSet, a ReferenceGrant or a BackendTLSPolicy
		out.fronts, out.ordered = frontObjects(s)
		return out, nil
	}
	class := s.Spec.LoadBalancerClass
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer || class != nil && *class != svc.LoadBalancerClass || !v1.Proxied(s) {
		return out, nil
	}
	out.fronts, out.ordered = frontObjects(s)
	d := dialect.Service{Annotations: s.Annotations}
	for _, p := range s.Spec.Ports {
		d.Ports = append(d.Ports, dialect.Port{Name: p.Name, Number: uint16(p.Port), Protocol: string(p.Protocol)})
	}
	if r := dialect.Read(d); r.Way == dialect.Proxied {
		out.objects = r.Spec.Objects()
		if len(r.Spec.ACMEHosts) > 0 && len(r.Spec.Certificates) > 0 {
			out.ordered = append(out.ordered, s.Namespace+"/"+r.Spec.Certificates[0])
		}
	}
	return out, nil
}
