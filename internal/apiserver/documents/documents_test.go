package documents

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/emicklei/go-restful/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	listers "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/util"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// thing is what the built-in kinds of the tests are.
type thing struct {
	Name string `json:"name"`
}

// rig serves the documents of two groups, and of the definitions in store.
type rig struct {
	*testing.T
	mux   *mux.PathRecorderMux
	store cache.Indexer
	built atomic.Int32 // how often a document of built-in kinds was built
	v3    *common.OpenAPIV3Config
}

func newRig(t *testing.T) *rig {
	r := &rig{T: t, mux: mux.NewPathRecorderMux("test"), store: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
	definitions := func(common.ReferenceCallback) map[string]common.OpenAPIDefinition {
		r.built.Add(1)
		props := spec.SchemaProps{Type: []string{"object"}, Description: "a built-in thing"}
		schema := spec.Schema{SchemaProps: props}
		schema.Extensions = spec.Extensions{common.ExtensionV2Schema: spec.Schema{SchemaProps: props}}
		return map[string]common.OpenAPIDefinition{util.GetCanonicalTypeName(thing{}): {Schema: schema}}
	}
	container := restful.NewContainer()
	for _, path := range []string{"/apis/one.io/v1", "/apis/two.io/v1"} {
		ws := new(restful.WebService).Path(path)
		ws.Route(ws.GET("/things").Operation("list" + path).Writes(thing{}).To(func(*restful.Request, *restful.Response) {}))
		container.Add(ws)
	}
	info := &spec.Info{InfoProps: spec.InfoProps{Title: "test", Version: "1"}}
	r.v3 = &common.OpenAPIV3Config{Info: info, GetDefinitions: definitions, Definitions: definitions(nil)}
	r.built.Store(0)
	Install(r.mux, Options{
		V2: &common.Config{Info: info, GetDefinitions: definitions}, V3: r.v3, Container: container,
		Definitions: listers.NewCustomResourceDefinitionLister(r.store), Log: slog.New(slog.DiscardHandler),
	})
	return r
}

// define stores a definition of kind Gear in group three.io, whose field has a description.
func (r *rig) define(generation int64, description string, established apiextensionsv1.ConditionStatus) {
	r.Helper()
	schema := &apiextensionsv1.JSONSchemaProps{Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{
		"teeth": {Type: "integer", Description: description},
	}}
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "gears.three.io", UID: types.UID("u"), Generation: generation},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "three.io", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "gears", Kind: "Gear", ListKind: "GearList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{
				{Name: "v1", Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: schema}},
				{Name: "v0", Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: schema}},
			},
		},
		Status: apiextensionsv1.CustomResourceDefinitionStatus{Conditions: []apiextensionsv1.CustomResourceDefinitionCondition{
			{Type: apiextensionsv1.Established, Status: established},
		}},
	}
	if err := r.store.Add(crd); err != nil {
		r.Fatal(err)
	}
}

func (r *rig) get(url string, header ...string) *http.Response {
	r.Helper()
	req := httptest.NewRequest(http.MethodGet, url, http.NoBody)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	r.mux.ServeHTTP(rec, req)
	return rec.Result()
}

func (r *rig) text(url string, want ...string) string {
	r.Helper()
	res := r.get(url)
	var b strings.Builder
	if err := res.Write(&b); err != nil {
		r.Fatal(err)
	}
	for _, w := range append(want, "200 OK") {
		if !strings.Contains(b.String(), w) {
			r.Errorf("%s: no %q in\n%s", url, w, b.String())
		}
	}
	return b.String()
}

// index returns where each document is.
func (r *rig) index() map[string]string {
	r.Helper()
	var list handler3.OpenAPIV3Discovery
	if err := json.NewDecoder(r.get("/openapi/v3").Body).Decode(&list); err != nil {
		r.Fatal(err)
	}
	out := map[string]string{}
	for path, v := range list.Paths {
		out[path] = v.ServerRelativeURL
	}
	return out
}

// The list of the documents builds none, a document is built when it is asked for, and once.
func TestBuiltWhenAskedFor(t *testing.T) {
	r := newRig(t)
	index := r.index()
	if len(index) != 2 || r.built.Load() != 0 {
		t.Fatalf("the list is %v, and %d documents are built, want 2 documents and none built", index, r.built.Load())
	}
	for range 3 {
		text := r.text(index["apis/one.io/v1"], "a built-in thing", "/apis/one.io/v1/things", "Cache-Control: public, immutable")
		if strings.Contains(text, "two.io") {
			t.Error("the document describes another group")
		}
	}
	if n := r.built.Load(); n != 1 {
		t.Errorf("%d documents are built, want 1", n)
	}
	// Building changes schemas. Requests that apply objects read the schemas of the config at the same time.
	if shared := r.v3.Definitions[util.GetCanonicalTypeName(thing{})].Schema.Extensions; len(shared) != 1 {
		t.Errorf("the schema of the config has the extensions %v, want what it had", shared)
	}
	for range 3 {
		r.text("/openapi/v2", "/apis/one.io/v1/things", "/apis/two.io/v1/things")
	}
	if n := r.built.Load(); n != 2 {
		t.Errorf("%d documents are built with that of version 2, want 2", n)
	}
	if again := newRig(t).index(); again["apis/one.io/v1"] != index["apis/one.io/v1"] {
		t.Errorf("another server of the program has the document at %s, this one at %s", again["apis/one.io/v1"], index["apis/one.io/v1"])
	}
}

// The documents follow the definitions, and the hash of a document changes with what it describes.
func TestFollowsDefinitions(t *testing.T) {
	const path = "apis/three.io/v1"
	r := newRig(t)
	r.define(1, "number of teeth", apiextensionsv1.ConditionFalse)
	if index := r.index(); len(index) != 2 {
		t.Errorf("a definition that is not established is in the list: %v", index)
	}
	if res := r.get("/openapi/v3/" + path); res.StatusCode != http.StatusNotFound {
		t.Errorf("its document is answered with %s, want 404", res.Status)
	}
	r.define(1, "number of teeth", apiextensionsv1.ConditionTrue)
	first := r.index()
	if len(first) != 3 {
		t.Errorf("the list is %v, want three documents: v0 is not served", first)
	}
	r.text(first[path], "number of teeth", "io.three.v1.Gear")
	whole := r.get("/openapi/v2").Header.Get("Etag")
	r.text("/openapi/v2", "number of teeth", "/apis/one.io/v1/things")
	r.define(2, "count of teeth", apiextensionsv1.ConditionTrue)
	second := r.index()
	if second[path] == first[path] || second["apis/one.io/v1"] != first["apis/one.io/v1"] {
		t.Errorf("after a change the documents are at %v, before at %v", second, first)
	}
	res := r.get(first[path])
	if res.StatusCode != http.StatusMovedPermanently || res.Header.Get("Location") != second[path] {
		t.Errorf("the old address is answered with %s to %q, want 301 to %s", res.Status, res.Header.Get("Location"), second[path])
	}
	r.text(second[path], "count of teeth")
	r.text("/openapi/v2", "count of teeth")
	if etag := r.get("/openapi/v2").Header.Get("Etag"); etag == whole {
		t.Error("the changed document of version 2 has the same ETag")
	}
	if err := r.store.Replace(nil, ""); err != nil {
		t.Fatal(err)
	}
	if res := r.get(second[path]); res.StatusCode != http.StatusNotFound {
		t.Errorf("the document of a removed definition is answered with %s", res.Status)
	}
	if text := r.text("/openapi/v2"); strings.Contains(text, "Gear") {
		t.Error("the document of version 2 still has the removed kind")
	}
}

// A client may only keep a document that it named by its hash.
func TestWhatClientsKeep(t *testing.T) {
	r := newRig(t)
	at := r.index()["apis/one.io/v1"]
	etag := r.get(at).Header.Get("Etag")
	for _, c := range []struct {
		url    string
		header []string
		status int
		forget bool
	}{
		{at, nil, http.StatusOK, false},
		{at, []string{"If-None-Match", etag}, http.StatusNotModified, false},
		{at, []string{"Accept", "text/plain"}, http.StatusNotAcceptable, true},
		{"/openapi/v3/apis/one.io/v1", nil, http.StatusOK, true},
		{"/openapi/v3/apis/one.io/v2?hash=0", nil, http.StatusNotFound, true},
		{"/openapi/v3/", nil, http.StatusNotFound, true},
	} {
		res := r.get(c.url, c.header...)
		if kept := res.Header.Get("Cache-Control") != ""; res.StatusCode != c.status || kept == c.forget {
			t.Errorf("%s with %v: %s, Cache-Control %q", c.url, c.header, res.Status, res.Header.Get("Cache-Control"))
		}
	}
	proto := r.get(at, "Accept", "application/com.github.proto-openapi.spec.v3.v1.0+protobuf")
	if proto.StatusCode != http.StatusOK || !strings.Contains(proto.Header.Get("Content-Type"), "protobuf") {
		t.Errorf("protobuf: %s of %s", proto.Status, proto.Header.Get("Content-Type"))
	}
	tag := r.get("/openapi/v3").Header.Get("Etag")
	if res := r.get("/openapi/v3", "If-None-Match", tag); res.StatusCode != http.StatusNotModified {
		t.Errorf("the unchanged list is answered with %s, want 304", res.Status)
	}
}
