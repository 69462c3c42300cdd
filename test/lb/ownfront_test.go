package lb

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// An Ingress that asks for it has an address for itself, and is not served at the shared one; without the annotation it comes back. A
// tenant gets nothing by it: other Services stay, the quota holds, and Secrets of other namespaces are closed.
func TestFrontOfOneIngress(t *testing.T) {
	inParallel(t)
	f := newFrontDoor(t, 1)
	f.pod("web", 8080)
	f.pod("cart", 8081)
	f.secret("default", "books-tls", "books.example.com")
	awaitClass(f, f.api)
	f.apply(`apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: cart}
spec: {selector: {app: cart}, ports: [{name: http, port: 80, targetPort: 8081}]}`)
	manifests, _ := f.document("ingress.md", "frontdoor_test.go")
	f.apply(manifests)
	shared := f.ingressAddress("books", "")
	manifests, commands := f.document("ingress.md", "ownfront_test.go")
	f.apply(manifests)
	own := f.ingressAddress("admin", shared)
	f.answers(own, commands)
	service := names.ServiceOfFront(svc.Name{Namespace: "default", Name: "admin"})
	s, err := f.client.CoreV1().Services(service.Namespace).Get(f.Context(), service.Name, metav1.GetOptions{})
	f.must(err)
	if s.Annotations["fairlead.dev/lb-drain-timeout"] != "30" || s.OwnerReferences[0].Kind != "Ingress" {
		f.Errorf("Service %+v", s.ObjectMeta)
	}
	code := func(host, path string) string {
		return "-s -o /dev/null -w %{http_code} --resolve " + host + ":80:192.0.2.100 http://" + host + path
	}
	f.answers(own, [][2]string{{code("books.example.com", "/"), "404"}})    // of the shared front
	f.answers(shared, [][2]string{{code("admin.example.com", "/"), "404"}}) // of the own front

	// Its canary follows it.
	f.apply(ownIngress("next", `nginx.ingress.kubernetes.io/canary: "true", nginx.ingress.kubernetes.io/canary-by-header: X-Next`,
		"admin.example.com", "cart"))
	if a := f.ingressAddress("next", shared); a != own {
		f.Errorf("the canary has the address %s, want %s", a, own)
	}
	f.answers(own, [][2]string{{
		"-s -H X-Next:always --resolve admin.example.com:80:192.0.2.100 http://admin.example.com/", "cart: GET / HTTP/1.1",
	}})
	f.answers(shared, [][2]string{{code("admin.example.com", "/"), "404"}})

	// A wrong value has no front.
	f.reannotate("admin", `{"fairlead.dev/front": "private"}`)
	f.ingressEvents("admin", names.IngressNotServed, "want one of own, shared")
	f.unserved("admin")
	f.noService(service)
	f.answers(shared, [][2]string{{code("admin.example.com", "/"), "404"}})

	// Without the annotation it is at the shared front.
	f.reannotate("admin", `{"fairlead.dev/front": null}`)
	if a := f.ingressAddress("admin", own); a != shared {
		f.Errorf("the address %s, want %s", a, shared)
	}
	f.answers(shared, [][2]string{{code("admin.example.com", "/"), "200"}})
	f.reannotate("admin", `{"fairlead.dev/front": "own"}`)
	_ = f.ingressAddress("admin", shared)
	f.answers(shared, [][2]string{{code("admin.example.com", "/"), "404"}})
	f.must(f.client.NetworkingV1().Ingresses("default").Delete(f.Context(), "admin", metav1.DeleteOptions{}))
	f.noService(service)

	f.takenService()
	f.frontQuota()
	f.stolenSecret()
	f.tamperedService()
	f.sameService()
	f.sameServiceOfGateways()
	f.foreignClass()
}

// ownIngress returns an Ingress with annotations for a path of a host.
func ownIngress(name, annotations, host, backend string) string {
	return fmt.Sprintf(`apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: %s, annotations: {%s}}
spec:
  ingressClassName: fairlead
  rules:
  - host: %s
    http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: %s, port: {number: 80}}}}]}`, name, annotations, host, backend)
}

const ownFront = "fairlead.dev/front: own"

// ingressAddress waits until an Ingress has another address than one, and returns it.
func (f *frontDoor) ingressAddress(name, not string) (vip string) {
	f.Helper()
	testbed.Until(f, "the address of Ingress "+name, func() error {
		in, err := f.client.NetworkingV1().Ingresses("default").Get(f.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, a := range in.Status.LoadBalancer.Ingress {
			if netip.MustParseAddr(a.IP).Is4() && a.IP != not {
				vip = a.IP
				return nil
			}
		}
		text, _ := json.Marshal(in.Status)
		return fmt.Errorf("status %s", text)
	})
	return vip
}

// unserved waits until an Ingress has no address.
func (f *frontDoor) unserved(name string) {
	f.Helper()
	testbed.Until(f, "no address of Ingress "+name, func() error {
		in, err := f.client.NetworkingV1().Ingresses("default").Get(f.Context(), name, metav1.GetOptions{})
		if err == nil && len(in.Status.LoadBalancer.Ingress) > 0 {
			err = fmt.Errorf("status %+v", in.Status)
		}
		return err
	})
}

// noService waits for the end of a Service.
func (f *frontDoor) noService(n svc.Name) {
	f.Helper()
	testbed.Until(f, "the end of Service "+n.String(), func() error {
		_, err := f.client.CoreV1().Services(n.Namespace).Get(f.Context(), n.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there, %w", err)
	})
}

// takenService checks that a Service of a tenant with the name of a front's is neither changed nor deleted.
func (f *frontDoor) takenService() {
	f.Helper()
	for name, labels := range map[string]string{"taken": "{}", "labelled": "{fairlead.dev/front: ingress}"} {
		n := names.ServiceOfFront(svc.Name{Namespace: "default", Name: name})
		f.apply(fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s, labels: %s}\nspec: {ports: [{port: 7}]}", n.Name, labels))
		f.apply(ownIngress(name, ownFront, "taken.example.com", "web"))
		f.ingressEvents(name, names.IngressNotServed, "that is not of this controller")
		f.unserved(name)
		f.must(f.client.NetworkingV1().Ingresses("default").Delete(f.Context(), name, metav1.DeleteOptions{}))
		f.apply(ownIngress("fence", "", "fence.example.com", "web")) // the controller has seen the deletion once this is served
		_ = f.ingressAddress("fence", "")
		s, err := f.client.CoreV1().Services(n.Namespace).Get(f.Context(), n.Name, metav1.GetOptions{})
		if err != nil || s.Spec.Type != corev1.ServiceTypeClusterIP || len(s.Spec.Ports) != 1 || s.Spec.Ports[0].Port != 7 {
			f.Errorf("labels %s: the Service is %+v, %v", labels, s, err)
		}
		f.must(f.client.NetworkingV1().Ingresses("default").Delete(f.Context(), "fence", metav1.DeleteOptions{}))
	}
}

// frontQuota checks that the quota of load balancers of a namespace counts fronts, and that one is served once there is room.
func (f *frontDoor) frontQuota() {
	f.Helper()
	quotas := f.client.CoreV1().ResourceQuotas("default")
	_, err := quotas.Create(f.Context(), &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "none"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{corev1.ResourceServicesLoadBalancers: resource.MustParse("0")}},
	}, metav1.CreateOptions{})
	f.must(err)
	testbed.Until(f, "the quota", func() error { // nothing counts before it is in the status
		q, err := quotas.Get(f.Context(), "none", metav1.GetOptions{})
		if err == nil && q.Status.Hard == nil {
			err = fmt.Errorf("status %+v", q.Status)
		}
		return err
	})
	f.apply(ownIngress("many", ownFront, "many.example.com", "web"))
	f.ingressEvents("many", names.IngressNotServed, "exceeded quota")
	f.unserved("many")
	f.must(quotas.Delete(f.Context(), "none", metav1.DeleteOptions{}))
	vip := f.ingressAddress("many", "")
	f.answers(vip, [][2]string{{"-s --resolve many.example.com:80:192.0.2.100 http://many.example.com/", "web: GET / HTTP/1.1"}})
}

// stolenSecret checks that a front has the Secrets of its namespace only, whatever its Ingress and the annotations of its Service name.
func (f *frontDoor) stolenSecret() {
	f.Helper()
	f.secret("kube-system", "bank-tls", "bank.example.com")
	f.apply(strings.Replace(ownIngress("thief", ownFront+", fairlead.dev/front-secrets: kube-system/bank-tls", "bank.example.com", "web"),
		"  rules:", "  tls: [{hosts: [bank.example.com], secretName: bank-tls}]\n  rules:", 1))
	f.ingressEvents("thief", names.IngressNotServed, "Secret default/bank-tls: it does not exist")
	_ = f.ingressAddress("thief", "")
	n := names.ServiceOfFront(svc.Name{Namespace: "default", Name: "thief"})
	s, err := f.client.CoreV1().Services(n.Namespace).Get(f.Context(), n.Name, metav1.GetOptions{})
	f.must(err)
	if s.Annotations[svc.FrontSecretsAnnotation] != "" || len(s.Spec.Ports) != 1 {
		f.Errorf("Service %+v", s)
	}
}

// tamperedService checks that what a tenant writes into the Service of a front is mended, and that one without its label is no front.
func (f *frontDoor) tamperedService() {
	f.Helper()
	n := names.ServiceOfFront(svc.Name{Namespace: "default", Name: "thief"})
	services := f.client.CoreV1().Services(n.Namespace)
	patch := func(text string) {
		f.Helper()
		_, err := services.Patch(f.Context(), n.Name, types.MergePatchType, []byte(text), metav1.PatchOptions{})
		f.must(err)
	}
	patch(`{"metadata": {"annotations": {"fairlead.dev/front-secrets": "kube-system/bank-tls", "fairlead.dev/lb-protocol": "tcp"}},
		"spec": {"ports": [{"port": 22, "name": "ssh"}]}}`)
	testbed.Until(f, "the mended Service", func() error {
		s, err := services.Get(f.Context(), n.Name, metav1.GetOptions{})
		if err == nil && (s.Annotations[svc.FrontSecretsAnnotation] != "" || s.Annotations["fairlead.dev/lb-protocol"] != "http" ||
			len(s.Spec.Ports) != 1 || s.Spec.Ports[0].Port != 80) {
			err = fmt.Errorf("%+v, %+v", s.Annotations, s.Spec.Ports)
		}
		return err
	})
	patch(`{"metadata": {"labels": {"fairlead.dev/front": null}}}`)
	f.ingressEvents("thief", names.IngressNotServed, "that is not of this controller")
	f.unserved("thief")
}

// sameService checks that of two Ingresses whose fronts have one Service name the first one has it, and the other one after that.
func (f *frontDoor) sameService() {
	f.Helper()
	f.apply(ownIngress("a.b", ownFront, "first.example.com", "web"))
	vip := f.ingressAddress("a.b", "")
	f.apply(ownIngress("a-b", ownFront, "second.example.com", "cart"))
	f.ingressEvents("a-b", names.IngressNotServed, "which Ingress a.b has; give one of them another name")
	f.unserved("a-b")
	f.answers(vip, [][2]string{{"-s --resolve first.example.com:80:192.0.2.100 http://first.example.com/", "web: GET / HTTP/1.1"}})
	f.reannotate("a.b", `{"fairlead.dev/front": null}`)
	vip = f.ingressAddress("a-b", "")
	f.answers(vip, [][2]string{{"-s --resolve second.example.com:80:192.0.2.100 http://second.example.com/", "cart: GET / HTTP/1.1"}})
}

// sameServiceOfGateways checks that of two Gateways whose Services have one name the first one has it and is served, and that the other
// one has no address, not even the first one's, and is told why. Once the first one has gone, the other one is served.
func (f *frontDoor) sameServiceOfGateways() {
	f.Helper()
	door := func(name, backend string) string {
		return fmt.Sprintf(`apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: %[1]s}
spec: {gatewayClassName: fairlead, listeners: [{name: http, port: 80, protocol: HTTP}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: %[1]s}
spec: {parentRefs: [{name: %[1]s}], rules: [{backendRefs: [{name: %[2]s, port: 80}]}]}`, name, backend)
	}
	f.apply(door("front.door", "web"))
	first := f.programmed("front.door")
	f.apply(door("front-door", "cart"))
	testbed.Until(f, "the refusal of the other Gateway", func() error {
		g, err := f.api.Gateways("default").Get(f.Context(), "front-door", metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(g.Status.Conditions, string(gwv1.GatewayConditionProgrammed))
		if c == nil || c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, "which Gateway front.door has") ||
			len(g.Status.Addresses) > 0 {
			return fmt.Errorf("status %+v", g.Status)
		}
		return nil
	})
	f.answers(first, [][2]string{{"-s http://192.0.2.100/", "web: GET / HTTP/1.1"}})
	f.must(f.api.Gateways("default").Delete(f.Context(), "front.door", metav1.DeleteOptions{}))
	f.answers(f.programmed("front-door"), [][2]string{{"-s http://192.0.2.100/", "cart: GET / HTTP/1.1"}})
}

// foreignClass checks that the annotation of an Ingress of another class does nothing.
func (f *frontDoor) foreignClass() {
	f.Helper()
	f.apply(strings.Replace(ownIngress("foreign", ownFront, "foreign.example.com", "web"), "ClassName: fairlead", "ClassName: other", 1))
	f.apply(ownIngress("after", ownFront, "after.example.com", "web"))
	_ = f.ingressAddress("after", "")
	f.unserved("foreign")
	f.noService(names.ServiceOfFront(svc.Name{Namespace: "default", Name: "foreign"}))
}
