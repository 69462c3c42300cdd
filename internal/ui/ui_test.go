package ui

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/svc"
)

func get(h http.Handler, method, target string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, nil)
	r.Host = "127.0.0.1:1"
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// Everyone gets the files, with the headers that keep other sites and other scripts out, and nothing else.
func TestFiles(t *testing.T) {
	for path, want := range map[string]struct {
		code int
		kind string
	}{
		"/ui": {http.StatusPermanentRedirect, ""}, "/ui/": {http.StatusOK, "text/html; charset=utf-8"},
		"/ui/app.js": {http.StatusOK, "text/javascript; charset=utf-8"}, "/ui/style.css": {http.StatusOK, "text/css; charset=utf-8"},
		"/ui/icon.svg": {http.StatusOK, "image/svg+xml"}, "/ui/LICENSES.txt": {http.StatusOK, "text/plain; charset=utf-8"},
		"/ui/../../etc/passwd": {http.StatusNotFound, ""}, "/ui/static/app.js": {http.StatusNotFound, ""}, "/ui/none": {http.StatusNotFound, ""},
	} {
		w := get(Files(), http.MethodGet, path)
		if w.Code != want.code || want.kind != "" && w.Header().Get("Content-Type") != want.kind {
			t.Errorf("%s: %d %s, want %v", path, w.Code, w.Header().Get("Content-Type"), want)
		}
		for name, has := range map[string]string{
			"Content-Security-Policy": "frame-ancestors 'none'", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
		} {
			if !strings.Contains(w.Header().Get(name), has) {
				t.Errorf("%s: the header %s is %q", path, name, w.Header().Get(name))
			}
		}
	}
	if w := get(Files(), http.MethodPost, "/ui/"); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
	if strings.Contains(policy, "unsafe") || strings.Contains(policy, "*") {
		t.Errorf("the policy is %s", policy)
	}
	plain, small := get(Files(), http.MethodGet, "/ui/app.js"), get(Files(), http.MethodGet, "/ui/app.js", "Accept-Encoding", "gzip")
	if small.Header().Get("Content-Encoding") != "gzip" || small.Body.Len() >= plain.Body.Len() {
		t.Errorf("compressed: %v, %d of %d bytes", small.Header(), small.Body.Len(), plain.Body.Len())
	}
	w := get(Files(), http.MethodGet, "/ui/app.js", "If-None-Match", plain.Header().Get("ETag"))
	if w.Code != http.StatusNotModified || w.Body.Len() > 0 {
		t.Errorf("an unchanged file: %d, %d bytes", w.Code, w.Body.Len())
	}
}

// The HTML has something to show before any script, and names all modules at once: none is found only by reading another one.
func TestFirstPaint(t *testing.T) {
	index := string(files()["/"].plain)
	if !regexp.MustCompile(`<div id="app"><header[^>]*><h1>fairlead</h1></header><main>`).MatchString(index) {
		t.Errorf("the HTML is empty without scripts:\n%s", index)
	}
	modules := 0
	for name := range files() {
		if !strings.HasSuffix(name, ".js") {
			continue
		}
		modules++
		name = strings.TrimPrefix(name, "/")
		preloaded := strings.Contains(index, `<link rel="modulepreload" href="`+name+`">`)
		if !preloaded && !strings.Contains(index, `<script type="module" src="`+name+`">`) {
			t.Errorf("the HTML does not name %s", name)
		}
	}
	if modules < 5 {
		t.Errorf("%d modules: the test looks for nothing", modules)
	}
}

// The HTML has no script or style of its own, and no file names another host.
func TestNoOtherHost(t *testing.T) {
	unsafe := regexp.MustCompile(`\beval\(|new Function|innerHTML|document\.write|localStorage|sessionStorage|document\.cookie`)
	elsewhere := regexp.MustCompile(`(?:src|href|from|import|fetch|url)\s*[=(]?\s*["'(]?(https?:)?//`)
	var sum int
	for name, f := range files() {
		sum += len(f.small)
		if strings.HasSuffix(name, ".txt") {
			continue
		}
		if m := elsewhere.Find(f.plain); m != nil {
			t.Errorf("%s has %q", name, m)
		}
		if strings.HasSuffix(name, ".js") && unsafe.Match(f.plain) && name != "/preact-htm.js" {
			t.Errorf("%s makes code from text, or keeps something", name)
		}
	}
	if index := string(files()["/"].plain); regexp.MustCompile(`<script[^>]*>[^<]|<style|\son[a-z]+=|style=`).MatchString(index) {
		t.Errorf("the HTML has a script or a style:\n%s", index)
	}
	if sum > 120<<10 {
		t.Errorf("the files are %d bytes", sum)
	}
}

// A question with parameters that it does not know, or that another site asks, gets no answer.
func TestQuestionsRefuse(t *testing.T) {
	handlers := Questions(func(*http.Request) (*rest.Config, error) {
		return &rest.Config{Host: "http://127.0.0.1:1"}, nil // nothing listens there
	})
	if len(handlers) != len(svc.QuestionPaths()) {
		t.Errorf("%d paths are answered, %d are for all users", len(handlers), len(svc.QuestionPaths()))
	}
	many := strings.Repeat("&service=a/b", maxNamed+1)
	for target, want := range map[string]string{
		svc.ExplainPath:                                            "the SERVICE is empty",
		svc.ExplainPath + "?question=10.96.0.1":                    "has no port",
		svc.ExplainPath + "?question=a/b/c":                        "is not NAMESPACE/SERVICE",
		svc.ExplainPath + "?question=a&probe=maybe":                "probe is",
		svc.ExplainPath + "?question=a&as=admin":                   `parameter \"as\" is unknown; want question, from`,
		svc.ExplainPath + "?question=" + strings.Repeat("a", 2000): "is longer than 1024 bytes",
		svc.HistoryPath:                                            "service is given 0 times",
		svc.HistoryPath + "?service=web":                           "want NAMESPACE/NAME",
		svc.HistoryPath + "?service=a/b&since=2h":                  "since is",
		svc.StatusPath + "?service=web":                            "service without namespace",
		svc.StatusPath + "?services=few":                           "services is",
		svc.ServicesPath + "?service=web":                          "want NAMESPACE/NAME",
		svc.ServicesPath + "?" + many:                              "at most 100",
		svc.ServicesPath + "?seen=a1":                              "want the resourceVersion of an object, a number",
		svc.ServicesPath + "?%zz":                                  "cannot read the parameters",
	} {
		at, _, _ := strings.Cut(target, "?")
		w := get(handlers[at], http.MethodGet, target)
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), want) {
			t.Errorf("%.80s: %d %s, want %q", target, w.Code, w.Body, want)
		}
	}
	if w := get(handlers[svc.StatusPath], http.MethodPost, svc.StatusPath); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d %s", w.Code, w.Body)
	}
	for _, site := range []string{"cross-site", "same-site"} {
		if w := get(handlers[svc.StatusPath], http.MethodGet, svc.StatusPath, "Sec-Fetch-Site", site); w.Code != http.StatusForbidden {
			t.Errorf("%s: %d %s", site, w.Code, w.Body)
		}
	}
}

// Pages that have seen the same share a judgement; one that has seen more, and who does not say what, asks anew.
func TestPagesShareJudgements(t *testing.T) {
	lists := map[string]string{"services": "ServiceList", "nodes": "NodeList", "pods": "PodList"}
	asked := 0
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		kind, version := lists[path.Base(r.URL.Path)], "v1"
		if path.Base(r.URL.Path) == "endpointslices" {
			kind, version = "EndpointSliceList", "discovery.k8s.io/v1"
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": kind, "apiVersion": version})
	}))
	defer api.Close()
	h := Questions(func(r *http.Request) (*rest.Config, error) {
		return &rest.Config{Host: api.URL, Impersonate: rest.ImpersonationConfig{UserName: r.Header.Get("User")}}, nil
	})[svc.ServicesPath]
	for _, c := range []struct {
		user, params string
		asks         bool
	}{
		{"ann", "?seen=7", true}, {"ann", "?seen=7", false}, {"bob", "?seen=7", true}, {"ann", "?seen=8", true}, {"ann", "?seen=8", false},
		{"ann", "", true}, {"ann", "", true},
	} {
		before := asked
		if w := get(h, http.MethodGet, svc.ServicesPath+c.params, "User", c.user); w.Code != http.StatusOK {
			t.Fatalf("%q: %d %s", c.params, w.Code, w.Body)
		}
		if (asked > before) != c.asks {
			t.Errorf("%q: %d requests, want some: %v", c.params, asked-before, c.asks)
		}
	}
}

// A user has at most maxAtOnce questions at a time; others are not concerned.
func TestTurns(t *testing.T) {
	turns := &turns{of: map[string]int{}}
	for range maxAtOnce {
		if !turns.take("one") {
			t.Fatal("refused")
		}
	}
	if turns.take("one") || !turns.take("other") {
		t.Error("the bound is not of each user")
	}
	turns.leave("one")
	if !turns.take("one") {
		t.Error("a place that was left is not free")
	}
}

// On loopback only who has the secret gets what the kubeconfig may read, and only at the server's own name; a client cannot add
// headers, write, or reach what the page does not read.
func TestLocal(t *testing.T) {
	var asked []string
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.RequestURI()+" "+r.Header.Get("Authorization")+r.Header.Get("Impersonate-User")+
			r.Header.Get("Cookie"))
		w.Header().Set("Set-Cookie", "a=b")
		_, _ = io.WriteString(w, "{}")
	}))
	defer api.Close()
	h, err := Local(&rest.Config{Host: api.URL, BearerToken: "admin"}, []string{"127.0.0.1:1"}, "secret")
	if err != nil {
		t.Fatal(err)
	}
	key := []string{"Authorization", "Bearer secret", "Impersonate-User", "root", "Cookie", "c=d"}
	w := get(h, http.MethodGet, "/api/v1/services?watch=1", key...)
	if w.Code != http.StatusOK || w.Header().Get("Set-Cookie") != "" || len(asked) != 1 ||
		asked[0] != "GET /api/v1/services?watch=1 Bearer admin" {
		t.Errorf("%d %v, asked %q", w.Code, w.Header(), asked)
	}
	for _, path := range []string{
		"/api/v1/secrets", "/api/v1/namespaces/a/secrets/b", "/api/v1/nodes/n/proxy/run", "/api/v1/namespaces/a/pods/b/exec?command=sh",
		"/apis/apps/v1/deployments", "/api/v1/namespaces/a%2F..%2F..%2Fsecrets/services", "/metrics", "/",
		"/api/v1/services/a",
	} {
		if w := get(h, http.MethodGet, path, key...); w.Code < 300 || len(asked) != 1 {
			t.Errorf("%s: %d, asked %q", path, w.Code, asked)
		}
	}
	for _, headers := range [][]string{nil, {"Authorization", "Bearer wrong"}, {"Authorization", "secret"}} {
		for _, path := range append(svc.QuestionPaths(), "/api/v1/services") {
			if w := get(h, http.MethodGet, path, headers...); w.Code != http.StatusUnauthorized {
				t.Errorf("%s with %q: %d", path, headers, w.Code)
			}
		}
	}
	if w := get(h, http.MethodPost, "/api/v1/services", key...); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
	other := httptest.NewRequest(http.MethodGet, "/ui/", nil)
	other.Host = "attacker.example:1"
	answer := httptest.NewRecorder()
	if h.ServeHTTP(answer, other); answer.Code != http.StatusMisdirectedRequest {
		t.Errorf("another name: %d", answer.Code)
	}
	if len(asked) != 1 {
		t.Errorf("the API was asked %q", asked)
	}
}

// A question on loopback is not bound to client-go's 5 requests a second: with that, one for so many Services would have no answer.
func TestLocalIsNotSlow(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "{}")
	}))
	defer api.Close()
	h, err := Local(&rest.Config{Host: api.URL}, []string{"127.0.0.1:1"}, "secret")
	if err != nil {
		t.Fatal(err)
	}
	many := strings.Repeat("&service=a/b", maxNamed)[1:]
	if w := get(h, http.MethodGet, svc.ServicesPath+"?"+many, "Authorization", "Bearer secret"); w.Code != http.StatusOK {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
