package apiserver_test

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/testbed"
)

// The definitions of other projects install, and their objects are checked as
// those projects mean it.
func TestDefinitionsOfProjects(t *testing.T) {
	gateway := testbed.ModuleDir(t, filepath.Join("..", "..", "test", "crds"), "sigs.k8s.io/gateway-api")
	manager := testbed.ModuleDir(t, filepath.Join("..", "..", "test", "crds"), "github.com/cert-manager/cert-manager")
	c := newCustom(t)
	n := 0
	for _, pattern := range []string{gateway + "/config/crd/standard/*.yaml", manager + "/deploy/crds/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, f := range files {
			c.install(f)
			n++
		}
	}
	if n < 12 {
		t.Fatalf("only %d definitions", n)
	}
	c.install("../lb/v1/crds/ipaddresspools.yaml")
	cfg, warned := rest.CopyConfig(c.cfg), &warnings{}
	cfg.WarningHandler = warned
	c.objs = dynamic.NewForConfigOrDie(cfg)
	create := func(group, version, resource, text string) error {
		gvr := schema.GroupVersionResource{Group: group, Version: version, Resource: resource}
		_, err := c.objs.Resource(gvr).Namespace("default").Create(c.ctx, object(t, text), metav1.CreateOptions{FieldValidation: "Strict"})
		return err
	}
	const gw, routes = "gateway.networking.k8s.io", "{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: "
	if err := create(gw, "v1", "gateways", `{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: web},
		spec: {gatewayClassName: any, listeners: [{name: http, port: 80, protocol: HTTP}]}}`); err != nil {
		t.Error(err)
	}
	if got := warned.take(); !strings.HasPrefix(got, `spec.gatewayClassName: there is no GatewayClass "any"`) || strings.Contains(got, "\n") {
		t.Errorf("a Gateway without a class: %q", got)
	}
	_, err := c.objs.Resource(schema.GroupVersionResource{Group: "fairlead.dev", Version: "v1", Resource: "ipaddresspools"}).Create(c.ctx,
		object(t, `{apiVersion: fairlead.dev/v1, kind: IPAddressPool, metadata: {name: a, annotations: {fairlead.dev/colour: red}},
			spec: {addresses: [192.0.2.0/24]}}`), metav1.CreateOptions{})
	if got := warned.take(); err != nil || got != "metadata.annotations[fairlead.dev/colour]: unknown annotation" {
		t.Errorf("a pool with an unknown annotation: %v, %q", err, got)
	}
	invalidAt(t, create(gw, "v1", "gateways", `{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: duplicate},
		spec: {gatewayClassName: any, listeners: [{name: a, port: 80, protocol: HTTP}, {name: b, port: 80, protocol: HTTP}]}}`), "spec.listeners")
	if err := create(gw, "v1", "httproutes", routes+`web}, spec: {parentRefs: [{name: web}],
		rules: [{matches: [{path: {value: /app}}], backendRefs: [{name: my-service, port: 80}]}]}}`); err != nil {
		t.Error(err)
	}
	invalidAt(t, create(gw, "v1", "httproutes", routes+`bad}, spec: {rules: [{matches: [{path: {value: app}}]}]}}`),
		"spec.rules[0].matches[0].path")
	if err := create("cert-manager.io", "v1", "certificates", `{apiVersion: cert-manager.io/v1, kind: Certificate, metadata: {name: web},
		spec: {secretName: web, dnsNames: [web.example.com], issuerRef: {name: ca}}}`); err != nil {
		t.Error(err)
	}
}

// A definition whose webhook converts: the object goes there in one version and
// comes back in the other.
func TestCustomConversion(t *testing.T) {
	t.Parallel()
	c := newCustom(t)
	hook := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review apiextensionsv1.ConversionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		review.Response = &apiextensionsv1.ConversionResponse{UID: review.Request.UID, Result: metav1.Status{Status: metav1.StatusSuccess}}
		for _, raw := range review.Request.Objects {
			from, to := `"host":`, `"address":`
			if strings.HasSuffix(review.Request.DesiredAPIVersion, "/v1") {
				from, to = to, from
			}
			text := strings.Replace(string(raw.Raw), from, to, 1)
			text = strings.NewReplacer(`"hosts.example.com/v1"`, `"`+review.Request.DesiredAPIVersion+`"`,
				`"hosts.example.com/v2"`, `"`+review.Request.DesiredAPIVersion+`"`).Replace(text)
			review.Response.ConvertedObjects = append(review.Response.ConvertedObjects, runtime.RawExtension{Raw: []byte(text)})
		}
		review.Request = nil
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(hook.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.Certificate().Raw})
	version := func(name, field, storage string) string {
		return "{name: " + name + ", served: true, storage: " + storage + ", schema: {openAPIV3Schema: {type: object, properties: {" + field +
			": {type: string}}}}}"
	}
	dir := t.TempDir()
	write(t, dir, "crd.yaml", `{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition,
  metadata: {name: machines.hosts.example.com}, spec: {
		group: hosts.example.com, scope: Cluster, names: {plural: machines, singular: machine, kind: Machine},
		versions: [`+version("v1", "host", "true")+", "+version("v2", "address", "false")+`],
		conversion: {strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {
			url: "`+hook.URL+`/convert", caBundle: `+base64.StdEncoding.EncodeToString(ca)+`}}}}}`)
	c.install(filepath.Join(dir, "crd.yaml"))
	in := func(v string) dynamic.ResourceInterface {
		return c.objs.Resource(schema.GroupVersionResource{Group: "hosts.example.com", Version: v, Resource: "machines"})
	}
	made := object(t, "{apiVersion: hosts.example.com/v2, kind: Machine, metadata: {name: one}, address: 192.0.2.1}")
	if _, err := in("v2").Create(c.ctx, made, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := in("v1").Get(c.ctx, "one", metav1.GetOptions{})
	if err != nil || got.Object["host"] != "192.0.2.1" || got.Object["address"] != nil {
		t.Errorf("as v1: %v, %v", got, err)
	}
	got, err = in("v2").Get(c.ctx, "one", metav1.GetOptions{})
	if err != nil || got.Object["address"] != "192.0.2.1" || got.Object["host"] != nil {
		t.Errorf("as v2: %v, %v", got, err)
	}
}
