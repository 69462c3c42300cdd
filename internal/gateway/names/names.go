// Package names has what objects of the Gateway API and Ingresses are known by: the names of controllers and classes, and the names and
// labels of the Services that serve them. It is pure.
package names

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"iter"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// The names by which objects are ours.
const (
	// ControllerName is the controllerName of GatewayClasses, and in the statuses of routes.
	ControllerName = svc.Domain + "/gateway"
	// IngressController is spec.controller of IngressClasses.
	IngressController = svc.Domain + "/ingress"
	// NginxController is for classes of Ingresses that were written for ingress-nginx: a host with TLS has only that.
	NginxController = svc.Domain + "/ingress-nginx"
	// ConditionLoop is True on a route whose redirects lead clients back to where they came from. It is absent otherwise.
	ConditionLoop = svc.Domain + "/RedirectLoop"
	// ConditionMaintenance of a route is true while svc.MaintenanceAnnotation answers its requests.
	ConditionMaintenance = svc.Domain + "/Maintenance"
	// ConditionCertificate is of a listener whose certificate is ordered by ACME, and of its Gateway or ListenerSet for all of them: it is
	// True once the authority has issued it. Others lack it.
	ConditionCertificate = svc.Domain + "/CertificateIssued"
	// ClassName is the name of the GatewayClass and of the IngressClass that are made.
	ClassName = "fairlead"
)

// Labels of the Service that a front is served by.
const (
	// FrontLabel has one of the values below.
	FrontLabel = svc.Domain + "/front"
	// NameLabel is the name of the Gateway (well-known label of the Gateway API).
	NameLabel = "gateway.networking.k8s.io/gateway-name"
	// ClassLabel is the name of the GatewayClass.
	ClassLabel = "gateway.networking.k8s.io/gateway-class-name"
)

// The values of FrontLabel.
const (
	FrontGateway = "gateway"
	// FrontIngress is of IngressService, and of the Service of an Ingress that has a front for itself.
	FrontIngress = "ingress"
	// FrontSet is of the Service of a ListenerSet, which only names the Secrets of its namespace that nodes need.
	FrontSet = "listenerset"
	// FrontGrant is of the Service of a ReferenceGrant, which likewise only names Secrets and ConfigMaps of its namespace.
	FrontGrant = "referencegrant"
	// FrontPolicy is of the Service of a BackendTLSPolicy, which names the objects with authorities of its namespace.
	FrontPolicy = "backendtlspolicy"
	// FrontMesh is of MeshService.
	FrontMesh = "mesh"
)

// IngressService is the Service of the front of all Ingresses.
func IngressService() svc.Name {
	return svc.Name{Namespace: svc.SystemNamespace, Name: svc.IngressService}
}

// SharedFront is the key of the front of all Ingresses among fronts that are known by their Ingress.
func SharedFront() svc.Name { return svc.Name{} }

// ServiceOfFront returns the name of the Service of the front that an Ingress has for itself, or of SharedFront.
func ServiceOfFront(front svc.Name) svc.Name {
	if front == SharedFront() {
		return IngressService()
	}
	return serviceName(front, ClassName+"-ingress", 32) // an end that no name of another kind gives
}

// ServiceOfGateway returns the name of the Service of a Gateway.
func ServiceOfGateway(gateway svc.Name) svc.Name {
	return serviceName(gateway, ClassName, 40)
}

// ServiceOfSet returns the name of the Service of a ListenerSet.
func ServiceOfSet(set svc.Name) svc.Name { return serviceName(set, "listeners-"+ClassName, 32) }

// ServiceOfGrant returns the name of the Service of a ReferenceGrant by which Gateways use Secrets and ConfigMaps.
func ServiceOfGrant(grant svc.Name) svc.Name { return serviceName(grant, "secrets-"+ClassName, 32) }

// ServiceOfPolicy returns the name of the Service of a BackendTLSPolicy.
func ServiceOfPolicy(policy svc.Name) svc.Name {
	return serviceName(policy, "authorities-"+ClassName, 32)
}

// serviceName appends an end to the name of an object. One that is too long keeps some bytes, and gets a hash.
func serviceName(of svc.Name, end string, some int) svc.Name {
	const most = 63 // bytes of a name of DNS
	name := of.Name + "-" + end
	if len(name) > most {
		sum := sha256.Sum256([]byte(of.Name))
		name = fmt.Sprintf("%s-%x-%s", strings.TrimRight(of.Name[:some], ".-"), sum[:4], end)
	}
	return svc.Name{Namespace: of.Namespace, Name: strings.ReplaceAll(name, ".", "-")}
}

// MeshService is the Service that exists while there is a Mesh: it has no address and no ports, and tells nodes to follow routes.
func MeshService() svc.Name {
	return svc.Name{Namespace: svc.SystemNamespace, Name: svc.MeshService}
}

// IngressStatus returns the status of Ingresses at addresses.
func IngressStatus(addresses []string, ports []uint16) (out []networkingv1.IngressLoadBalancerIngress) {
	for _, a := range addresses {
		in := networkingv1.IngressLoadBalancerIngress{IP: a}
		for _, p := range ports {
			in.Ports = append(in.Ports, networkingv1.IngressPortStatus{Port: int32(p), Protocol: "TCP"})
		}
		out = append(out, in)
	}
	return out
}

// OurClass reports whether a GatewayClass is ours.
func OurClass(c *gwv1.GatewayClass) bool { return c.Spec.ControllerName == ControllerName }

// OurIngressClass reports whether an IngressClass is ours, and whether its Ingresses were written for ingress-nginx.
func OurIngressClass(c *networkingv1.IngressClass) (ours, nginx bool) {
	nginx = c.Spec.Controller == NginxController
	return nginx || c.Spec.Controller == IngressController, nginx
}

// DefaultClass returns the name of the class of Ingresses that name none: of several the newest, as Kubernetes has it; empty if there
// is none.
func DefaultClass(all iter.Seq[*networkingv1.IngressClass]) string {
	var best *networkingv1.IngressClass
	for c := range all {
		if c.Annotations[networkingv1.AnnotationIsDefaultIngressClass] != "true" {
			continue
		}
		if best == nil || cmp.Or(c.CreationTimestamp.Compare(best.CreationTimestamp.Time), strings.Compare(best.Name, c.Name)) > 0 {
			best = c
		}
	}
	if best == nil {
		return ""
	}
	return best.Name
}

// ClassOf returns the name of the IngressClass of an Ingress, or byDefault if it names none.
func ClassOf(in *networkingv1.Ingress, byDefault string) string {
	if c := in.Spec.IngressClassName; c != nil {
		return *c
	}
	if c, ok := in.Annotations[annotationIngressClass]; ok {
		return c
	}
	return byDefault
}

// annotationIngressClass named the class before spec.ingressClassName.
const annotationIngressClass = "kubernetes.io/ingress.class"

// ParentNotProgrammed is the reason of a ListenerSet whose Gateway is not programmed. The API's module has it only in a comment.
const ParentNotProgrammed = "ParentNotProgrammed"

// The reasons of Events on Ingresses: something is left out of what they ask for, or nothing is any longer.
const (
	IngressNotServed = "IngressNotServed"
	IngressServed    = "IngressServed"
	// CertificateNotOrdered is that of an Ingress whose certificate nothing orders.
	CertificateNotOrdered = "CertificateNotOrdered"
)
