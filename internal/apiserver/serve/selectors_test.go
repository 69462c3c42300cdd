package serve

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// Long selectors are rejected where the server parses them, and passed on as what they are to a program behind a proxy.
func TestBoundSelectors(t *testing.T) {
	t.Parallel()
	h := BoundSelectors(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	for path, want := range map[string]int{
		"/api/v1/namespaces/shop/services/http:web:80/proxy/search": http.StatusNoContent,
		"/api/v1/namespaces/shop/pods/web/proxy":                    http.StatusNoContent,
		"/api/v1/nodes/a/proxy/metrics":                             http.StatusNoContent,
		"/api/v1/pods":                                              http.StatusRequestEntityTooLarge,
		"/api/v1/nodes/proxy":                                       http.StatusRequestEntityTooLarge,
		"/api/v1/nodes//proxy":                                      http.StatusRequestEntityTooLarge,
		"/api/v1/namespaces/proxy/pods":                             http.StatusRequestEntityTooLarge,
		"/api/v1/namespaces/shop/pods//proxy":                       http.StatusRequestEntityTooLarge,
		"/api/v1/namespaces/shop/configmaps/web/proxy":              http.StatusRequestEntityTooLarge,
		"/apis/example.com/v1/nodes/a/proxy":                        http.StatusRequestEntityTooLarge,
		"/api/v1/watch/nodes/a/proxy":                               http.StatusRequestEntityTooLarge,
	} {
		for _, name := range []string{"labelSelector", "fieldSelector"} {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodGet, path+"?"+name+"="+strings.Repeat("a", maxSelector+1), nil)
			r.Header.Set("Accept", "application/json")
			if h.ServeHTTP(w, r); w.Code != want {
				t.Errorf("%s with a long %s: %d, want %d", path, name, w.Code, want)
			}
		}
	}
}
