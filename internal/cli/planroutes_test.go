package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/metrics"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// planBed has an API server with the kinds of the Gateway API, and the file of a plan.
type planBed struct {
	client     kubernetes.Interface
	dynamic    dynamic.Interface
	kubeconfig string
	file       string
}

func newPlanBed(t *testing.T) *planBed {
	t.Helper()
	server := apiservertest.StartServer(t)
	b := &planBed{client: kubernetes.NewForConfigOrDie(server.LoopbackConfig()), dynamic: dynamic.NewForConfigOrDie(server.LoopbackConfig()),
		kubeconfig: server.Kubeconfig(), file: filepath.Join(t.TempDir(), "plan.yaml")}
	definitions, err := api.Definitions(api.Standard)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range definitions {
		const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
		if err := b.client.CoreV1().RESTClient().Post().AbsPath(path).Body([]byte(d.Object)).Do(t.Context()).Error(); err != nil {
			t.Fatal(err)
		}
	}
	b.create(t, planObjects)
	return b
}

// create makes objects, once their kinds are served.
func (b *planBed) create(t *testing.T, manifest string) {
	t.Helper()
	for doc := range strings.SplitSeq(manifest, "---\n") {
		var o unstructured.Unstructured
		if err := yaml.Unmarshal([]byte(doc), &o.Object); err != nil {
			t.Fatalf("%v in %s", err, doc)
		}
		gvr := o.GroupVersionKind().GroupVersion().WithResource(strings.ToLower(o.GetKind()) + "s")
		gvr.Resource = strings.Replace(gvr.Resource, "classs", "classes", 1)
		gvr.Resource = strings.Replace(gvr.Resource, "ingresss", "ingresses", 1)
		gvr.Resource = strings.Replace(gvr.Resource, "policys", "policies", 1)
		in := dynamic.ResourceInterface(b.dynamic.Resource(gvr))
		if n := o.GetNamespace(); n != "" {
			in = b.dynamic.Resource(gvr).Namespace(n)
		}
		until(t, func() error {
			_, err := in.Create(t.Context(), &o, metav1.CreateOptions{})
			return err
		})
	}
}

// plan runs 'fairlead plan' for a manifest, with more arguments.
func (b *planBed) plan(t *testing.T, manifest string, more ...string) (code int, out string) {
	t.Helper()
	if err := os.WriteFile(b.file, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := call(t, append([]string{"plan", "-f", b.file, "--kubeconfig", b.kubeconfig}, more...)...)
	return code, stdout + stderr
}

const planObjects = `{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: infra}}
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: cart, namespace: shop}, spec: {ports: [{port: 80}]}}
---
{apiVersion: networking.k8s.io/v1, kind: IngressClass, metadata: {name: fairlead}, spec: {controller: fairlead.dev/ingress}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: GatewayClass, metadata: {name: fairlead}, spec: {controllerName: fairlead.dev/gateway}}
---
{apiVersion: networking.k8s.io/v1, kind: Ingress, metadata: {name: shop, namespace: shop}, spec: {ingressClassName: fairlead, rules: [
  {host: shop.example.com, http: {paths: [
    {path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}},
    {path: /cart, pathType: Prefix, backend: {service: {name: cart, port: {number: 80}}}}]}}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: web, namespace: infra}, spec: {gatewayClassName: fairlead,
  listeners: [{name: http, port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}},
    {name: alt, port: 8080, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}}]}}
---
` + planRoute

const planRoute = `{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: cart, namespace: shop}, spec: {
  parentRefs: [{name: web, namespace: infra, sectionName: http}], hostnames: [gw.example.com], rules: [
    {matches: [{path: {type: PathPrefix, value: /}}], backendRefs: [{name: web, port: 80}]},
    {matches: [{path: {type: PathPrefix, value: /cart}}], backendRefs: [{name: cart, port: 80}]}]}}`

// A plan names each host and path of Ingresses and Gateways that would be served otherwise, and why; it exits with 2 if one is not served
// any more. A user of a namespace is told what is not known. Nothing is changed.
func TestPlanOfRoutes(t *testing.T) {
	b := newPlanBed(t)
	_, err := b.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	check := func(manifest string, want int, texts ...string) string {
		t.Helper()
		var more []string
		if rest, remove := strings.CutPrefix(manifest, "delete "); remove {
			manifest, more = rest, []string{"--delete"}
		}
		code, out := b.plan(t, manifest, more...)
		if code != want {
			t.Errorf("exit %d, want %d: %s", code, want, out)
		}
		for _, text := range texts {
			if !strings.Contains(out, text) {
				t.Errorf("no %q in\n%s", text, out)
			}
		}
		return out
	}
	before := b.versions(t)
	docs := strings.Split(planObjects, "---\n")
	of := func(kind string) string {
		return docs[slices.IndexFunc(docs, func(d string) bool { return strings.Contains(d, "kind: "+kind+",") })]
	}
	ingress, gateway, route := of("Ingress"), of("Gateway"), of("HTTPRoute")
	const cut = "\n  ! CUT: requests are answered with 404\n"

	check(ingress, 0, "Ingress shop/shop: unchanged", "\nnothing changes for Services, hosts and paths")
	check(strings.Replace(ingress, "name: cart, port", "name: web, port", 1), 0, "Ingress shop/shop: changed\n",
		"\nIngresses at the shared front\n  http://shop.example.com/cart: goes to Service shop/web:80 instead of Service shop/cart:80 "+
			"(Ingress shop/shop)\n")
	check(strings.Replace(ingress, "path: /,", "path: /start,", 1), 2,
		"  http://shop.example.com/: no longer served: 404; it went to Service shop/web:80"+cut)
	check(strings.Replace(ingress, "{host: shop.", "{host: new.", 1), 2,
		"  http://new.example.com/: is served now: goes to Service shop/web:80 (Ingress shop/shop)\n", "http://shop.example.com/cart: no longer"+
			" served: 404; it went to Service shop/cart:80"+cut)
	check("delete "+ingress, 2, "Ingress shop/shop: deleted", "port 80: closes, nothing answers there any more\n  ! CUT: ",
		"Service kube-system/fairlead-ingress: goes, and gives its addresses back")
	check(strings.Replace(ingress, "pathType: Prefix", "pathType: Wrong", 1), exitFailed, "Ingress shop/shop: ", "pathType")
	late := strings.Replace(ingress, "name: shop, namespace", "name: late, namespace", 1)
	check(strings.Replace(late, "name: web, port", "name: cart, port", 1), 0,
		"  http://shop.example.com/: Ingress shop/late gets no requests there: Ingress shop/shop comes first\n")
	check("delete "+of("Service"), 2, "it went to Service shop/web:80", "there is no Service shop/web")

	out := check(strings.Replace(route, "name: cart, port", "name: web, port", 1), 0, "HTTPRoute shop/cart: changed", "\nGateway infra/web\n"+
		"  http://gw.example.com/cart: goes to Service shop/web:80 instead of Service shop/cart:80 (HTTPRoute shop/cart, rules[1])\n")
	if strings.Contains(out, "Ingresses at") {
		t.Errorf("the front of Ingresses is not touched:\n%s", out)
	}
	check(strings.Replace(route, "sectionName: http", "sectionName: nothing", 1), 2,
		"http://gw.example.com/: no longer served: 404; it went to Service shop/web:80"+cut,
		"HTTPRoute shop/cart at Gateway infra/web, listener nothing: is not served as it asks: NoMatchingParent: ")
	check(strings.Replace(gateway, "port: 80,", "port: 81,", 1), 2,
		"port 80: closes, nothing answers there any more: listener http\n  ! CUT: new connections are refused, and open ones end; "+
			"hosts and paths that were served there: 2", "port 81: opens: listener http", "http://gw.example.com:81/: is served now")
	check(ingress+"---\n"+gateway+"---\n"+route, 0, "nothing changes for Services, hosts and paths\n")

	code, text := b.plan(t, route, "-o", "json", "--delete")
	var report struct {
		Cuts   bool
		Routes []struct {
			Front, Service string
			Changes        []struct{ Where, Text, Cuts string }
		}
	}
	if err := json.Unmarshal([]byte(text), &report); err != nil || code != 2 || !report.Cuts || len(report.Routes) != 1 ||
		report.Routes[0].Service != "infra/web-fairlead" || len(report.Routes[0].Changes) != 2 ||
		report.Routes[0].Changes[1].Where != "http://gw.example.com/cart" || report.Routes[0].Changes[1].Cuts == "" {
		t.Errorf("exit %d, %v in %s", code, err, text)
	}
	if after := b.versions(t); !maps.Equal(before, after) {
		t.Errorf("plans have written objects:\n%s", strings.Join(differences(before, after), "\n"))
	}

	b.as(t, "tenant", "shop")
	check(strings.Replace(route, "name: cart, port", "name: web, port", 1), 0,
		"! you may not list GatewayClasses: the plan is as if each Gateway had a class of fairlead",
		"! you may not read Gateway infra/web: the plan is as if its listeners took all hosts and routes",
		"HTTPRoutes, GRPCRoutes", "of all namespaces: the plan has the ones of shop, and does not know which hosts others have",
		"  gw.example.com/cart: goes to Service shop/web:80 instead of Service shop/cart:80 (HTTPRoute shop/cart, rules[1])\n")
	out = check("delete "+ingress, 2, "! you may not list IngressClasses: the plan is as if each Ingress had a class of fairlead",
		"! you may not list Ingresses, ReferenceGrants of all namespaces",
		"  http://shop.example.com/cart: no longer served: 404; it went to Service shop/cart:80"+cut)
	if strings.Contains(out, "port 80: closes") {
		t.Errorf("others may have Ingresses at the shared front:\n%s", out)
	}
	check("delete "+of("Service"), 2, "! you may not list IngressClasses", "it went to Service shop/web:80", "there is no Service shop/web")
	out = check("{apiVersion: v1, kind: Service, metadata: {name: unused}, spec: {ports: [{port: 80}]}}", 0, "Service shop/unused: created")
	if strings.Contains(out, "you may not list") {
		t.Errorf("no front leads to the Service:\n%s", out)
	}
}

// versions returns the version of each object of each kind, without Leases, which the servers renew all the time, and usage,
// which is measured and not stored.
func (b *planBed) versions(t *testing.T) map[string]string {
	t.Helper()
	kinds, err := b.client.Discovery().ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, of := range kinds {
		gv, err := schema.ParseGroupVersion(of.GroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range of.APIResources {
			if !slices.Contains(r.Verbs, "list") || r.Name == "leases" || gv.Group == "metrics.k8s.io" {
				continue
			}
			list, err := b.dynamic.Resource(gv.WithResource(r.Name)).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatalf("%s: %v", r.Name, err)
			}
			for i := range list.Items {
				o := &list.Items[i]
				out[r.Name+"."+gv.Group+" "+o.GetNamespace()+"/"+o.GetName()] = o.GetResourceVersion()
			}
		}
	}
	for _, kind := range []string{"services.", "ipaddresses.networking.k8s.io", "ingresses.networking.k8s.io",
		"httproutes." + gwv1.GroupName} {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(out)), func(key string) bool { return strings.HasPrefix(key, kind+" ") }) {
			t.Fatalf("no object of %s is looked at", kind)
		}
	}
	return out
}

// differences are the keys whose values differ.
func differences(before, after map[string]string) (out []string) {
	all := maps.Clone(before)
	maps.Copy(all, after)
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if before[key] != after[key] {
			out = append(out, fmt.Sprintf("%s: version %q, then %q", key, before[key], after[key]))
		}
	}
	return out
}

// throttled records the requests that wait for the rate limit of a client.
type throttled struct {
	mu    sync.Mutex
	paths []string
}

func (r *throttled) Observe(_ context.Context, _ string, u url.URL, _ time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.paths = append(r.paths, u.Path)
}

func (r *throttled) has(part string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.paths, func(p string) bool { return strings.Contains(p, part) })
}

// A plan of a long file waits for no rate limit of its own, names what was not read when its time is over, sees each namespace of the file
// and names the ones that it may not, and refuses a file with two different states of an object.
func TestPlanOfMuch(t *testing.T) {
	b := newPlanBed(t)
	was, record := metrics.RateLimiterLatency, &throttled{}
	metrics.RateLimiterLatency = record
	t.Cleanup(func() { metrics.RateLimiterLatency = was })

	var docs []string
	for i := range 40 {
		docs = append(docs, fmt.Sprintf("{apiVersion: v1, kind: ConfigMap, metadata: {name: c%d, namespace: shop}}", i))
	}
	long := strings.Join(docs, "\n---\n")
	if code, out := b.plan(t, long); code != 0 || !strings.Contains(out, "ConfigMap shop/c39: created") {
		t.Errorf("exit %d: %s", code, out)
	}
	if record.has("/configmaps") {
		t.Error("requests of a plan wait for the rate limit of its client")
	}
	config, err := clientcmd.BuildConfigFromFlags("", b.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(config).CoreV1().ConfigMaps("shop").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	if !record.has("/configmaps") {
		t.Error("the test sees no rate limit where there is one")
	}

	code, out := b.plan(t, long, "--timeout", "1ns")
	if want := "the plan was not made within 1ns, and nothing is known of what would change; not read: Services (only 0), EndpointSlices, " +
		"Pods, Nodes, what the server makes of the objects of the file, Ingresses and Gateways"; code != exitFailed ||
		!strings.Contains(out, want) || !strings.Contains(out, "--timeout") {
		t.Errorf("exit %d: no %q in %s", code, want, out)
	}
	if code, out := b.plan(t, long, "--timeout", "-1s"); code != 64 || !strings.Contains(out, "want a time above 0") {
		t.Errorf("exit %d: %s", code, out)
	}

	const first = "{apiVersion: v1, kind: Service, metadata: {name: twin, namespace: shop}, spec: {ports: [{port: 80}]}}"
	second := strings.Replace(first, "80", "81", 1)
	list := "apiVersion: v1\nkind: List\nitems:\n- " + first + "\n- " + second + "\n"
	for manifest, want := range map[string]string{
		"# a comment\n---\n" + first + "\n---\n" + second: "Service shop/twin is there twice and differs, at document 2 (line 3) and at " +
			"document 3 (line 5)",
		list: "Service shop/twin is there twice and differs, at document 1 (line 1), items[0] and at document 1 (line 1), items[1]",
	} {
		if code, out := b.plan(t, manifest); code != exitFailed || !strings.Contains(out, want) {
			t.Errorf("exit %d, no %q in %s", code, want, out)
		}
	}
	if code, out := b.plan(t, first+"\n---\n"+first); code != 0 ||
		!strings.Contains(out, "Service shop/twin: created\nService shop/twin: unchanged\n") {
		t.Errorf("exit %d: %s", code, out)
	}

	b.create(t, "{apiVersion: v1, kind: Service, metadata: {name: far, namespace: infra}, spec: {ports: [{port: 80}]}}")
	b.as(t, "tenant", "shop", "infra") // the kubeconfig names shop
	far := "{apiVersion: v1, kind: Service, metadata: {name: far, namespace: infra}}"
	if code, out := b.plan(t, far, "--delete"); code != 0 || !strings.Contains(out, "DNS: far.infra.svc.cluster.local no longer resolves") ||
		!strings.Contains(out, "! Services, EndpointSlices, Pods were read of infra, shop only, for want of rights") {
		t.Errorf("exit %d: %s", code, out)
	}
	b.as(t, "other", "shop")
	if code, out := b.plan(t, strings.Replace(planRoute, "name: cart, port", "name: far, namespace: infra, port", 1)); !strings.Contains(out,
		"! Services, EndpointSlices, Pods were read of shop only, for want of rights: what changes for others is not in the plan (infra)") {
		t.Errorf("exit %d: %s", code, out)
	}
}

// A Secret or a ConfigMap of a file is in the plan of the Gateways that use it.
func TestPlanOfHiddenReferences(t *testing.T) {
	b := newPlanBed(t)
	_, cert, key := lbtest.Certificate(t, "gw.example.com")
	_, other, _ := lbtest.Certificate(t, "ca")
	secret := fmt.Sprintf("{apiVersion: v1, kind: Secret, type: kubernetes.io/tls, metadata: {name: own, namespace: infra}, "+
		"stringData: {tls.crt: %q, tls.key: %q}}", cert, key)
	ca := func(certs ...[]byte) string {
		return fmt.Sprintf("{apiVersion: v1, kind: ConfigMap, metadata: {name: ca, namespace: shop}, data: {ca.crt: %q}}", bytes.Join(certs, nil))
	}
	b.create(t, secret+"\n---\n"+ca(cert, other)+`
---
{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: secure, namespace: infra}, spec: {gatewayClassName: fairlead,
  listeners: [{name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: own}]}, allowedRoutes: {namespaces: {from: All}}}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: BackendTLSPolicy, metadata: {name: web, namespace: shop}, spec: {
  targetRefs: [{group: "", kind: Service, name: web}], validation: {hostname: web.example, caCertificateRefs: [
  {group: "", kind: ConfigMap, name: ca}]}}}`)
	check := func(want int, manifest string, texts ...string) {
		t.Helper()
		var more []string
		if rest, remove := strings.CutPrefix(manifest, "delete "); remove {
			manifest, more = rest, []string{"--delete"}
		}
		code, out := b.plan(t, manifest, more...)
		for _, text := range texts {
			if code != want || !strings.Contains(out, text) {
				t.Errorf("exit %d, want %d and %q: %s", code, want, text, out)
			}
		}
	}
	check(2, "delete "+secret, "\nGateway infra/secure\n",
		"  port 443: closes, nothing answers there any more: listener https: InvalidCertificateRef",
		"listener https on port 443 of Gateway infra/secure loses its certificate")
	check(0, ca(cert, other), "ConfigMap shop/ca: unchanged")
	check(2, "delete "+ca(cert), "http://gw.example.com/: no longer served: 503", "BackendTLSPolicy shop/web: is not served as it asks")
	check(2, ca(cert), "ConfigMap shop/ca: has other certificates of authorities: 0 come, 1 go\n  ! CUT: ")
	check(2, ca([]byte("nothing")), "http://gw.example.com/: no longer served: 503", "has no certificate")
	missing := `{apiVersion: gateway.networking.k8s.io/v1, kind: BackendTLSPolicy, metadata: {name: web, namespace: shop}, spec: {
  targetRefs: [{group: "", kind: Service, name: web}], validation: {hostname: web.example, caCertificateRefs: [
  {group: "", kind: ConfigMap, name: missing}]}}}`
	check(2, missing, "http://gw.example.com/: no longer served: 503", "ConfigMap shop/missing: it does not exist")
}

// as has later plans made by a user with the role edit in namespaces, of which the kubeconfig names the first.
func (b *planBed) as(t *testing.T, user string, namespaces ...string) {
	t.Helper()
	for _, n := range namespaces {
		_, err := b.client.RbacV1().RoleBindings(n).Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user},
			Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	config, err := clientcmd.LoadFromFile(b.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range config.AuthInfos {
		a.Impersonate = user
	}
	for _, c := range config.Contexts {
		c.Namespace = namespaces[0]
	}
	b.kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, b.kubeconfig); err != nil {
		t.Fatal(err)
	}
}
