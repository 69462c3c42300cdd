package ui

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/svc"
)

// Lists for the page have what the user may list, and of that only what the page shows; a watch goes on from their version.
func TestObjects(t *testing.T) {
	cfg := apiservertest.Start(t, func(o *apiserver.Options) { o.Questions = Questions })
	admin := kubernetes.NewForConfigOrDie(cfg)
	ctx := t.Context()
	for _, ns := range []string{"shop", "vault"} {
		_, err := admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		hidden := map[string]string{"example.com/password": "hunter2-" + ns}
		for i := range 3 {
			meta := metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("%s-s%d", ns, i), Annotations: hidden}
			_, err := admin.CoreV1().Services(ns).Create(ctx, &corev1.Service{ObjectMeta: meta,
				Spec: corev1.ServiceSpec{Selector: map[string]string{"app": ns}, Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			meta.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name, "example.com/secret": "hunter2"}
			ready := i > 0
			_, err = admin.DiscoveryV1().EndpointSlices(ns).Create(ctx, &discoveryv1.EndpointSlice{ObjectMeta: meta,
				AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.1.1"},
					Conditions: discoveryv1.EndpointConditions{Ready: &ready}}}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	_, err := admin.RbacV1().RoleBindings("shop").Create(ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "tenant"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "tenant"}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	as := rest.CopyConfig(cfg)
	as.Impersonate.UserName, as.Impersonate.Groups = "tenant", []string{"system:authenticated"}
	tenant := kubernetes.NewForConfigOrDie(as)
	ask := func(c *kubernetes.Clientset, query string) (string, error) {
		text, err := c.CoreV1().RESTClient().Get().RequestURI(svc.ObjectsPath + "?" + query).DoRaw(ctx)
		return string(text), err
	}
	for _, kind := range []string{"services", "endpointslices"} {
		// The administrator's answer, which the server keeps, is not the tenant's.
		for _, query := range []string{"kind=" + kind, "kind=" + kind + "&namespace=vault"} {
			if out, err := ask(admin, query); err != nil || !strings.Contains(out, "vault-s2") {
				t.Errorf("the administrator asks %s: %v\n%s", query, err, out)
			}
		}
		for _, query := range []string{"kind=" + kind, "kind=" + kind + "&namespace=vault", "kind=" + kind + "&namespace=",
			"kind=" + kind + "&namespace=vault&namespace=shop", "kind=" + kind + "&namespace=shop%2F..%2Fvault",
			"kind=" + kind + "&namespace=shop/../vault", "kind=" + kind + "&namespace=..", "kind=" + kind + "&namespace=shop%3F"} {
			if out, err := ask(tenant, query); err == nil || strings.Contains(out, "-s0") {
				t.Errorf("a tenant asks %s: %v\n%s", query, err, out)
			}
		}
		if out, err := ask(tenant, "kind="+kind+"&namespace=vault"); !apierrors.IsForbidden(err) {
			t.Errorf("a tenant asks for another namespace: %v\n%s", err, out)
		}
		out, err := ask(tenant, "kind="+kind+"&namespace=shop")
		if err != nil {
			t.Fatal(err)
		}
		for _, leak := range []string{"vault", "hunter2", "example.com", "managedFields", `"annotations":`, "fieldsV1"} {
			if strings.Contains(out, leak) {
				t.Errorf("%s of a tenant have %q:\n%s", kind, leak, out)
			}
		}
		var l struct {
			ResourceVersion string
			Writes          []write
			Items           []struct {
				Metadata struct {
					Name, ResourceVersion string
					Generation            int64
					Labels                map[string]string
					Writes                [][2]int64
				}
				Endpoints []struct {
					Addresses  []string
					Conditions *struct{ Ready *bool }
				}
			}
		}
		if err := json.Unmarshal([]byte(out), &l); err != nil || len(l.Items) != 3 || len(l.Writes) != 1 {
			t.Fatalf("%s: %v\n%s", kind, err, out)
		}
		for i, o := range l.Items {
			name := fmt.Sprintf("shop-s%d", i)
			if o.Metadata.Name != name || o.Metadata.ResourceVersion == "" || len(o.Metadata.Writes) != 1 || o.Metadata.Writes[0][1] != 0 {
				t.Errorf("%s %d is %+v", kind, i, o)
			}
			if kind == "services" && (o.Metadata.Generation != 1 || !strings.HasPrefix(l.Writes[0].Fields, "spec.")) {
				t.Errorf("Service %d is %+v, written %+v", i, o, l.Writes)
			}
			if kind == "endpointslices" && (o.Metadata.Labels[discoveryv1.LabelServiceName] != name || len(o.Endpoints) != 1 ||
				o.Endpoints[0].Addresses[0] != "10.1.1.1" || (o.Endpoints[0].Conditions == nil) != (i > 0)) {
				t.Errorf("EndpointSlice %d is %+v", i, o)
			}
		}
		if kind != "services" {
			continue
		}
		if err := tenant.CoreV1().Services("shop").Delete(ctx, "shop-s0", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w, err := tenant.CoreV1().Services("shop").Watch(ctx, metav1.ListOptions{ResourceVersion: l.ResourceVersion})
		if err != nil {
			t.Fatal(err)
		}
		if e := <-w.ResultChan(); e.Object.(*corev1.Service).Name != "shop-s0" {
			t.Errorf("the watch goes on with %v", e)
		}
		w.Stop()
	}
	if out, err := ask(tenant, "kind=secrets&namespace=shop"); err == nil || !strings.Contains(out, "want services or endpointslices") {
		t.Errorf("another kind: %v\n%s", err, out)
	}
}

// What is kept compressed comes the same to clients with and without gzip.
func TestPacked(t *testing.T) {
	p, err := pack([]string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	h := http.HandlerFunc(p.write)
	small, plain := get(h, http.MethodGet, "/", "Accept-Encoding", "gzip"), get(h, http.MethodGet, "/")
	if small.Header().Get("Content-Encoding") != "gzip" || small.Body.String() != string(p) {
		t.Errorf("compressed: %v", small.Header())
	}
	if text, err := io.ReadAll(plain.Body); string(text) != "[\"a\"]\n" || err != nil || plain.Header().Get("Content-Encoding") != "" {
		t.Errorf("not compressed: %q, %v", text, err)
	}
}
