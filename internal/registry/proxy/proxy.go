// Package proxy passes requests on to Pods, to the Pods of Services, and to
// nodes: what the subresource "proxy" of all three has in common.
package proxy

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Limits of the connections to what is behind a proxy. A request itself may
// last.
const (
	dialTimeout     = 10 * time.Second
	idleConnTimeout = 30 * time.Second
	maxIdleConns    = 100
)

// Methods are the HTTP methods passed on.
func Methods() []string {
	return []string{"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
}

// NewTransport returns the transport to processes. The certificates of
// processes are their own, so they are not checked, as in Kubernetes.
func NewTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout: dialTimeout,
		IdleConnTimeout:     idleConnTimeout,
		MaxIdleConns:        maxIdleConns,
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
	}
}

// Target is what the name in the path of a request says: NAME, NAME:PORT or
// SCHEME:NAME:PORT.
type Target struct {
	// Scheme is "" or "https".
	Scheme, Name string
	// Port is a number, a name, or "".
	Port string
}

// Parse reads the name in the path of a request; kind names the resource in
// the error.
func Parse(kind, id string) (Target, error) {
	scheme, name, port, ok := utilnet.SplitSchemeNamePort(id)
	if !ok {
		return Target{}, apierrors.NewBadRequest(fmt.Sprintf("invalid %s request %q: use NAME, NAME:PORT or SCHEME:NAME:PORT with the scheme http or https", kind, id))
	}
	return Target{scheme, name, port}, nil
}

// CheckAddress refuses addresses that lead back to the server's own machine or
// nowhere in particular.
func CheckAddress(ip string) error {
	a, err := netip.ParseAddr(ip)
	if err != nil || !a.Unmap().IsGlobalUnicast() {
		return apierrors.NewBadRequest("address not allowed")
	}
	return nil
}

// Handler passes one request on to location, with the rest of its path. In the
// answers, redirects and links of HTML pages lead through the proxy again; a
// request without any path is redirected to one that ends with a slash.
func Handler(location url.URL, path string, transport http.RoundTripper, responder rest.Responder) http.Handler {
	location.Path = utilnet.JoinPreservingTrailingSlash(location.Path, path)
	return proxy.NewUpgradeAwareHandler(&location, transport, true, false, proxy.NewErrorResponder(responder))
}

// AddOptions lets the options of the subresource be read from the query of a
// URL.
func AddOptions(s *runtime.Scheme) error {
	for _, c := range []struct {
		options runtime.Object
		path    func(any) *string
	}{
		{&corev1.PodProxyOptions{}, func(o any) *string { return &o.(*corev1.PodProxyOptions).Path }},
		{&corev1.ServiceProxyOptions{}, func(o any) *string { return &o.(*corev1.ServiceProxyOptions).Path }},
		{&corev1.NodeProxyOptions{}, func(o any) *string { return &o.(*corev1.NodeProxyOptions).Path }},
	} {
		err := s.AddConversionFunc((*url.Values)(nil), c.options, func(a, b any, _ conversion.Scope) error {
			*c.path(b) = a.(*url.Values).Get("path")
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
