package documents

import (
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/emicklei/go-restful/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/spec3"
)

// root is where the list of the documents of version 3 is. Each document is below it, with the path of its group and version.
const root = "/openapi/v3"

// document is a document of version 3 that a client has asked for. service serves it.
type document struct {
	hash    string
	service func() *handler3.OpenAPIService
}

// source is what a document of version 3 is built from: a web service, or the version of definitions of one group.
type source struct {
	hash    string
	web     *restful.WebService
	version string
	crds    []*apiextensionsv1.CustomResourceDefinition
}

// sources returns all documents that exist, by their paths. The hash of each is that of what it is built from, where the
// library builds all documents for the list of their hashes.
func (d *documents) sources() (map[string]*source, error) {
	crds, err := d.definitions()
	if err != nil {
		return nil, err
	}
	all := map[string]*source{}
	for _, crd := range crds {
		for _, v := range crd.Spec.Versions {
			if !v.Served {
				continue
			}
			path := "apis/" + crd.Spec.Group + "/" + v.Name
			s := all[path]
			if s == nil {
				s = &source{hash: d.program, version: v.Name}
				all[path] = s
			}
			s.crds = append(s.crds, crd)
			s.hash = hash(s.hash, state(crd))
		}
	}
	for path, s := range d.builtIn() {
		all[path] = s
	}
	return all, nil
}

// listBuiltIn returns the documents of the built-in kinds, by their paths.
func (d *documents) listBuiltIn() map[string]*source {
	all := map[string]*source{}
	for _, ws := range d.o.Container.RegisteredWebServices() {
		parts := []string{d.program}
		for _, r := range ws.Routes() {
			parts = append(parts, r.Method, r.Path)
		}
		slices.Sort(parts)
		all[strings.TrimPrefix(ws.RootPath(), "/")] = &source{hash: hash(parts...), web: ws}
	}
	return all
}

// serveIndex answers with the list of the documents.
func (d *documents) serveIndex(w http.ResponseWriter, r *http.Request) {
	all, err := d.sources()
	if err != nil {
		d.o.Log.Error("cannot list the OpenAPI documents", "err", err)
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	index := handler3.OpenAPIV3Discovery{Paths: make(map[string]handler3.OpenAPIV3DiscoveryGroupVersion, len(all))}
	for path, s := range all {
		index.Paths[path] = handler3.OpenAPIV3DiscoveryGroupVersion{ServerRelativeURL: address(path, s.hash)}
	}
	text, err := json.Marshal(index)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Etag", strconv.Quote(hash(string(text))))
	http.ServeContent(w, r, root, time.Time{}, strings.NewReader(string(text)))
}

// address returns where a document is, with its hash, by which clients may keep it for good.
func address(path, hash string) string {
	u := url.URL{Path: root + "/" + path, RawQuery: url.Values{"hash": {hash}}.Encode()}
	return u.String()
}

// ServeHTTP answers with a document of version 3; 404 if there is none, where the library answers 200 with an empty body.
func (d *documents) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	all, err := d.sources()
	if err != nil {
		d.o.Log.Error("cannot list the OpenAPI documents", "err", err)
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	path := strings.TrimPrefix(r.URL.Path, root+"/")
	s := all[path]
	if s == nil {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	asked := r.URL.Query().Get("hash")
	if asked != "" && asked != s.hash {
		http.Redirect(w, r, address(path, s.hash), http.StatusMovedPermanently)
		return
	}
	// The library knows the document by the hash of its text.
	unhashed := r.WithContext(r.Context())
	unhashed.URL = &url.URL{Path: r.URL.Path}
	answer := &answer{ResponseWriter: w, forGood: asked != ""}
	d.keep(path, s, all).HandleGroupVersion(answer, unhashed)
	if !answer.begun {
		http.Error(w, "the document cannot be built; the log of the server says why", http.StatusInternalServerError)
	}
}

// keep returns the service of a document that is as s describes it. all are the documents that exist: others are dropped.
func (d *documents) keep(path string, s *source, all map[string]*source) *handler3.OpenAPIService {
	d.mu.Lock()
	for p := range d.kept {
		if all[p] == nil {
			delete(d.kept, p)
		}
	}
	have := d.kept[path]
	if have == nil || have.hash != s.hash {
		have = &document{hash: s.hash, service: sync.OnceValue(func() *handler3.OpenAPIService { return d.build(path, s) })}
		d.kept[path] = have
	}
	d.mu.Unlock()
	return have.service()
}

// build returns a service of the document at path; it answers nothing if the document cannot be built.
func (d *documents) build(path string, s *source) *handler3.OpenAPIService {
	if s.web != nil {
		only := restful.NewContainer()
		only.Add(s.web)
		// Building changes the schemas that the config has, which the server reads when it applies objects.
		own := *d.o.V3
		own.Definitions = nil
		return routes.OpenAPI{V3Config: &own}.InstallV3(only, mux.NewPathRecorderMux("openapi"))
	}
	var specs []*spec3.OpenAPI
	for _, crd := range s.crds {
		one, err := builder.BuildOpenAPIV3(crd, s.version, options(false))
		if err != nil {
			d.undescribed(crd, s.version, err)
			continue
		}
		specs = append(specs, one)
	}
	service := handler3.NewOpenAPIService()
	merged, err := builder.MergeSpecsV3(specs...)
	if err != nil {
		d.o.Log.Warn("cannot merge the OpenAPI descriptions of custom resources", "path", path, "err", err)
		return service
	}
	service.UpdateGroupVersion(path, merged)
	return service
}

// answer lets clients keep a document for good if they have named it by its hash.
type answer struct {
	http.ResponseWriter
	forGood, begun bool
}

// WriteHeader sends the status code.
func (a *answer) WriteHeader(code int) {
	if !a.begun && a.forGood && (code == http.StatusOK || code == http.StatusNotModified) {
		a.Header().Set("Cache-Control", "public, immutable")
		a.Header().Set("Expires", time.Now().AddDate(1, 0, 0).UTC().Format(http.TimeFormat))
	}
	a.begun = true
	a.ResponseWriter.WriteHeader(code)
}

// Write sends a part of the body.
func (a *answer) Write(b []byte) (int, error) {
	if !a.begun {
		a.WriteHeader(http.StatusOK)
	}
	return a.ResponseWriter.Write(b)
}

// Unwrap returns the writer below.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }
