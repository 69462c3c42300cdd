package ui

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net/http"
	"net/http/httputil"
	"regexp"
	"slices"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/certs"
)

// Local serves the page for the API of cfg, at hosts, which are values of the header Host. What it passes on has the rights of cfg,
// so that all requests except for files need the secret as a bearer token, which other users of the machine, and other sites, do
// not know. It passes on only what the page reads.
func Local(cfg *rest.Config, hosts []string, secret string) (http.Handler, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // one question may ask every node; turns bounds them
	target, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		return nil, err
	}
	pass := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = ""
			for name := range r.Out.Header {
				if name != "Accept" {
					r.Out.Header.Del(name) // also Impersonate-User, Cookie, Authorization
				}
			}
		},
		ModifyResponse: func(r *http.Response) error {
			r.Header.Del("Set-Cookie")
			return nil
		},
		Transport: transport, FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, "the API server does not answer: "+err.Error(), http.StatusBadGateway)
		},
	}
	mux := http.NewServeMux()
	mux.Handle(Path+"/", Files())
	mux.Handle(Path, Files())
	guarded := func(h http.Handler) http.Handler { return withSecret(h, secret) }
	for path, h := range Questions(func(*http.Request) (*rest.Config, error) { return rest.CopyConfig(cfg), nil }) {
		mux.Handle(path, guarded(h))
	}
	for _, path := range []string{"/api/", "/apis/", certs.Path} {
		mux.Handle("GET "+path, guarded(reading(pass)))
	}
	return onlyAt(mux, hosts), nil
}

// onlyAt refuses requests for another name: a site can make its own name lead to loopback (DNS rebinding).
func onlyAt(h http.Handler, hosts []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(hosts, r.Host) {
			http.Error(w, fmt.Sprintf("this server is %s", strings.Join(hosts, " or ")), http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func withSecret(h http.Handler, secret string) http.Handler {
	want := sha256.Sum256([]byte("Bearer " + secret))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(r.Header.Get("Authorization")))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			http.Error(w, "open the page with 'fairlead ui': its link has the key", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// read are the lists and watches that the page reads.
var read = regexp.MustCompile(`^/(api|apis/[a-z0-9.]+)/v1(/namespaces/[a-z0-9-]+)?/(services|endpointslices|nodes|events)$`)

// reading refuses what the page does not read: with the rights of an administrator a GET can be a shell.
func reading(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != certs.Path && !read.MatchString(r.URL.Path) {
			http.Error(w, "the page does not read this path", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}
