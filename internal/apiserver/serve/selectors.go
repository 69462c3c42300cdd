package serve

import (
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"

	"github.com/fairlead/fairlead/internal/registry"
)

// maxSelector is how long the selectors of a request may be together, in bytes.
const maxSelector = 16 << 10

// BoundSelectors rejects requests with longer selectors. To parse one of 690 KB took a second of CPU, before it was known
// who asks.
func BoundSelectors(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.URL.RawQuery) <= maxSelector {
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

// Reject answers a request with an error, in the encoding that the client asks for.
func Reject(w http.ResponseWriter, r *http.Request, err error) {
	responsewriters.ErrorNegotiated(err, registry.Codecs, schema.GroupVersion{Version: "v1"}, w, r)
}
