package watch

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/responsewriter"
)

// guardKey is the key of the stallGuard in the context of a watch.
type guardKey struct{}

// Shortcut has the events of watches go from next, which is below the filters, to
// the stallGuard above them at once. Filters want the status of a watch, which they get;
// each of the layers that tracing and logging put around the response would do nothing
// with an event but pass it on. Other requests are buffered by filters.
func Shortcut(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g, ok := r.Context().Value(guardKey{}).(*stallGuard); ok {
			w = responsewriter.WrapForHTTP1Or2(&shortcut{ResponseWriter: w, guard: g})
		}
		next.ServeHTTP(w, r)
	})
}

// shortcut is a response that goes through the layers until its status is written.
type shortcut struct {
	http.ResponseWriter
	guard  *stallGuard
	status bool // written
}

// Unwrap returns the response with the layers.
func (s *shortcut) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// WriteHeader sends the header.
func (s *shortcut) WriteHeader(code int) {
	s.ResponseWriter.WriteHeader(code)
	s.status = code == http.StatusOK
}

// Write sends p.
func (s *shortcut) Write(p []byte) (int, error) {
	if s.status {
		return s.guard.Write(p)
	}
	return s.ResponseWriter.Write(p)
}

// Flush sends what is buffered.
func (s *shortcut) Flush() {
	if s.status {
		s.guard.Flush()
	} else if f, ok := s.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}
