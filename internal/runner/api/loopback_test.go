package api

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
)

// The listener may be open to the network, for metrics: only this machine gets answers.
func TestOnLoopback(t *testing.T) {
	h := OnLoopback(map[string]View{"explain": func(context.Context, url.Values) (any, error) { return "yes", nil }})["GET /explain"]
	const own, other = "127.0.0.1:10249", "192.0.2.1:10249"
	for _, test := range []struct {
		to, from, host string
		want           int
	}{
		{own, "127.0.0.1:40000", own, http.StatusOK},
		{"[::1]:10249", "[::1]:40000", "[::1]:10249", http.StatusOK},
		{other, "192.0.2.1:40000", other, http.StatusForbidden},
		{other, "198.51.100.7:40000", "127.0.0.1:10249", http.StatusForbidden},
		{own, "127.0.0.1:40000", "rebound.example.com:10249", http.StatusForbidden},
		{own, "198.51.100.7:40000", own, http.StatusForbidden},
	} {
		to, err := net.ResolveTCPAddr("tcp", test.to)
		if err != nil {
			t.Fatal(err)
		}
		q := httptest.NewRequestWithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, net.Addr(to)), http.MethodGet,
			"/explain", http.NoBody)
		q.RemoteAddr, q.Host = test.from, test.host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, q)
		if w.Code != test.want {
			t.Errorf("%+v: %d", test, w.Code)
		}
	}
}
