package explaincmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// A question reads what it is about, by selectors and page by page, in the encoding that costs the server the least, and never all
// EndpointSlices or Pods.
func TestQuestionReadsLittle(t *testing.T) {
	service := func(namespace, name, ip string) corev1.Service {
		return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": name},
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}}
	}
	web := service("shop", "web", "10.96.0.10")
	pages := map[string][]corev1.Service{"": {service("a", "other", "10.96.0.9")}, "1": {service("shop", "cart", "10.96.0.11")}, "2": {web}}
	slice := discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		Ports:     []discoveryv1.EndpointPort{{Port: new(int32(8080)), Name: new(""), Protocol: new(corev1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.5"}, NodeName: new("n7")}}}
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "client"}, Spec: corev1.PodSpec{NodeName: "n1"},
		Status: corev1.PodStatus{PodIP: "10.244.1.9", PodIPs: []corev1.PodIP{{IP: "10.244.1.9"}, {IP: "fd00::9"}}}}
	var mu sync.Mutex
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if !strings.HasPrefix(r.Header.Get("Accept"), "application/vnd.kubernetes.protobuf") {
			t.Errorf("%s in %s", r.URL, r.Header.Get("Accept"))
		}
		mu.Lock()
		if at := r.URL.Path; strings.HasSuffix(at, "endpointslices") || strings.HasSuffix(at, "pods") || strings.Contains(at, "/services") {
			asked = append(asked, strings.Trim(at[strings.LastIndex(at, "/v1/")+4:]+" "+q.Get("labelSelector")+q.Get("fieldSelector")+
				q.Get("continue"), " "))
			if q.Get("limit") == "" && !strings.HasSuffix(at, "/web") {
				t.Errorf("%s is no page", r.URL)
			}
		}
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		var out any
		switch at := r.URL.Path; {
		case at == "/api/v1/services":
			more := map[string]string{"": "1", "1": "2", "2": ""}[q.Get("continue")]
			out = corev1.ServiceList{ListMeta: metav1.ListMeta{Continue: more, ResourceVersion: "1"}, Items: pages[q.Get("continue")]}
		case at == "/api/v1/namespaces/shop/services/web":
			out = web
		case strings.HasSuffix(at, "endpointslices"):
			out = discoveryv1.EndpointSliceList{Items: []discoveryv1.EndpointSlice{slice}}
		case q.Get("fieldSelector") == "status.podIP=10.244.1.9", at == "/api/v1/pods" && q.Get("fieldSelector") == "":
			out = corev1.PodList{Items: []corev1.Pod{pod}}
		case strings.HasSuffix(at, "pods"):
			out = corev1.PodList{}
		case at == "/api/v1/nodes":
			out = corev1.NodeList{Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}}}
		case strings.HasSuffix(at, "servicecidrs"):
			out = networkingv1.ServiceCIDRList{}
		case strings.HasSuffix(at, "namespaces"):
			out = corev1.NamespaceList{Items: []corev1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}}}
		default:
			w.WriteHeader(http.StatusNotFound)
			out = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
				Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound}
		}
		_ = json.NewEncoder(w).Encode(out)
	}))
	defer server.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"c",
		"clusters":[{"name":"c","cluster":{"server":%q}}],"contexts":[{"name":"c","context":{"cluster":"c"}}]}`, server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	services := []string{"services", "services 1", "services 2"}
	services = services[:3:3]
	ofWeb := []string{"namespaces/shop/endpointslices kubernetes.io/service-name=web", "namespaces/shop/pods app=web"}
	const proxies = "namespaces/kube-system/pods app.kubernetes.io/name=fairlead-proxy"
	one := []string{"namespaces/shop/services/web", proxies}
	one = one[:2:2]
	for question, want := range map[string]struct {
		asked []string
		says  string
	}{
		"shop/web":                               {append(one, ofWeb...), "shop/web on node n1: answers"},
		"10.96.0.10:80":                          {append(append(services, proxies), ofWeb...), "10.96.0.10:80 on node n1: answers"},
		"web.shop.svc.cluster.local":             {append(append(services, proxies), ofWeb...), "on node n1: answers"},
		"shop/web --from 10.244.1.9":             {append(append(one, "pods status.podIP=10.244.1.9"), ofWeb...), "10.244.1.9, on node n1"},
		"shop/web --from fd00::9":                {append(append(one, "pods status.podIP=fd00::9", "pods"), ofWeb...), "fd00::9, on node n1"},
		"10.244.1.9:80 --node n1":                {append(services, "pods status.podIP=10.244.1.9", proxies), "Pod shop/client has it"},
		"carts.shop.svc.cluster.local --node n1": {services, "there is no Service shop/carts; there are cart, web"},
		"other.shop.svc.cluster.local --node n1": {services, "there is no Service shop/other; there is one in a"},
	} {
		asked = nil
		var out bytes.Buffer
		cmd := NewExplain(&base.Global{Streams: base.Streams{Out: &out}})
		cmd.SetArgs(append(strings.Fields(question), "--kubeconfig", kubeconfig))
		cmd.SetContext(t.Context())
		if err := cmd.Execute(); err != nil {
			t.Errorf("%s: %v", question, err)
		}
		slices.Sort(asked)
		slices.Sort(want.asked)
		if !slices.Equal(asked, want.asked) {
			t.Errorf("%s: asked for\n%q, want\n%q", question, asked, want.asked)
		}
		if !strings.Contains(out.String(), want.says) {
			t.Errorf("%s: want %q\n%s", question, want.says, &out)
		}
	}
}
