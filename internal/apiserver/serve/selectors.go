package serve

import (
	"fmt"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"

	"github.com/fairlead/fairlead/internal/registry"
)

// maxSelector is how long the selectors of a request may be together, in bytes.
const maxSelector = 16 << 10

// BoundSelectors rejects requests with longer selectors. To parse one of 690 KB took a second of CPU, before it was known
// who asks. Below the path of a proxy they are parameters of a program, which the server does not parse.
func BoundSelectors(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.URL.RawQuery) <= maxSelector || proxied(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		query := r.URL.Query()
		for _, name := range []string{"labelSelector", "fieldSelector"} {
			size := 0
			for _, s := range query[name] {
				size += len(s)
			}
			if size > maxSelector {
				Reject(w, r, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("%s has %d bytes; want at most %d: select fewer names, "+
					"or list all and choose from the answer", name, size, maxSelector)))
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

// proxied reports whether a path is that of services/proxy, pods/proxy or nodes/proxy.
func proxied(path string) bool {
	p := strings.Split(strings.Trim(path, "/"), "/")
	if len(p) < 5 || p[0] != "api" || p[1] != "v1" || p[3] == "" {
		return false
	}
	if p[2] == "nodes" {
		return p[4] == "proxy"
	}
	return p[2] == "namespaces" && len(p) > 6 && (p[4] == "services" || p[4] == "pods") && p[5] != "" && p[6] == "proxy"
}

// Reject answers a request with an error, in the encoding that the client asks for.
func Reject(w http.ResponseWriter, r *http.Request, err error) {
	responsewriters.ErrorNegotiated(err, registry.Codecs, schema.GroupVersion{Version: "v1"}, w, r)
}
