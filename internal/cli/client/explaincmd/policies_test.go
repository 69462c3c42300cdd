package explaincmd

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
)

// A server of fairlead does not serve NetworkPolicies, and explain says nothing of them. Of one that serves the kind the policies that
// select an endpoint Pod are named, and a user who may not list them is told so, as one who may not read Speakers.
func TestPoliciesOfTheAPI(t *testing.T) {
	cfg := apiservertest.Start(t)
	client := kubernetes.NewForConfigOrDie(cfg)
	ctx := t.Context()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	o := metav1.CreateOptions{}
	must(client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, o))
	web, err := client.CoreV1().Services("default").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}}}, o)
	must(web, err)
	web.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}
	must(client.CoreV1().Services("default").UpdateStatus(ctx, web, metav1.UpdateOptions{}))
	must(client.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{"app": "web"}},
		Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{
			{Name: "c", Image: "host", Command: []string{"/bin/true"}}}}}, o))
	must(client.DiscoveryV1().EndpointSlices("default").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: new(int32(8080))}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.243.9.9"}, NodeName: new("n1"),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "web-1", Namespace: "default"}}}}, o))
	must(client.RbacV1().RoleBindings("default").Create(ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "edit"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "tenant"}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"}}, o))

	var served atomic.Bool
	back, err := url.Parse(cfg.Host)
	must(back, err)
	transport, err := rest.TransportFor(cfg)
	must(transport, err)
	proxy := httputil.NewSingleHostReverseProxy(back)
	proxy.Transport = transport
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !served.Load() || r.URL.Path != "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies" {
			proxy.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if r.Header.Get("Impersonate-User") != "" {
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: "no networkpolicies for you"})
			return
		}
		_ = json.NewEncoder(w).Encode(networkingv1.NetworkPolicyList{Items: []networkingv1.NetworkPolicy{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "closed"}}}})
	}))
	defer front.Close()
	explained := func(user string) string {
		t.Helper()
		as := &rest.Config{Host: front.URL, Impersonate: rest.ImpersonationConfig{UserName: user}}
		nodes := asking.For(kubernetes.NewForConfigOrDie(as), as)
		r, err := Ask(ctx, nodes, &Asked{Question: "web", From: "198.51.100.9", Namespace: "default"})
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		if err := r.print(&out); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	if text := explained(""); strings.Contains(text, "NetworkPolic") || !strings.Contains(text, "10.243.9.9:8080") {
		t.Errorf("without the kind:\n%s", text)
	}
	served.Store(true)
	const closed = "NetworkPolicy default/closed does not let 198.51.100.9 in to Pod web-1, TCP port 8080: "
	if text := explained(""); !strings.Contains(text, closed+
		"fairlead does not enforce it, and a network plugin that does drops the connection  [NetworkPolicy default/closed spec.ingress]") {
		t.Errorf("with a policy:\n%s", text)
	}
	text := explained("tenant")
	for _, want := range []string{
		"which NetworkPolicies there are is not known: no networkpolicies for you  [NetworkPolicies of namespace default]",
		"which node announces an address is not known: ", "  203.0.113.7: who announces it is not known\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("a tenant is not told %q:\n%s", want, text)
		}
	}
}
