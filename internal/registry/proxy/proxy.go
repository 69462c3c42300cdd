// Package proxy passes requests on to Pods, to the Pods of Services, and to
// nodes: what the subresource "proxy" of all three has in common.
package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"syscall"
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

// newTransport returns the transport to processes. The certificates of
// processes are their own, so they are not checked, as in Kubernetes.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:         dial,
		TLSHandshakeTimeout: dialTimeout,
		IdleConnTimeout:     idleConnTimeout,
		MaxIdleConns:        maxIdleConns,
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
	}
}

// dial connects to a process. Its error names the process that does not answer.
func dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, address)
	if err != nil && !errors.Is(err, syscall.ECONNREFUSED) && ctx.Err() == nil {
		return nil, fmt.Errorf("cannot reach %s from the machine of the API server "+
			"(without an agent there, it needs a route to the Pods; kubectl port-forward needs none): %w", address, err)
	}
	return conn, err
}

// Target is what the name in the path of a request means: NAME, NAME:PORT or
// SCHEME:NAME:PORT.
type Target struct {
	// Scheme is "http", "https", or "".
	Scheme, Name string
	// Port is a number, a name, or "".
	Port string
}

func parse(kind, id string) (Target, error) {
	scheme, name, port, ok := utilnet.SplitSchemeNamePort(id)
	if !ok {
		return Target{}, apierrors.NewBadRequest(fmt.Sprintf(
			"invalid %s request %q: use NAME, NAME:PORT or SCHEME:NAME:PORT with the scheme http or https", kind, id))
	}
	return Target{scheme, name, port}, nil
}

// Locate returns the scheme and the host that the requests for t go to. A nil
// RoundTripper means that of processes, whose certificates are not checked.
type Locate func(ctx context.Context, t Target) (url.URL, http.RoundTripper, error)

// REST is the subresource "proxy" of one resource: it passes requests to
// RESOURCE/[SCHEME:]NAME[:PORT]/proxy/PATH on.
type REST struct {
	kind      string
	options   runtime.Object
	locate    Locate
	transport *http.Transport
}

var _ rest.Connecter = (*REST)(nil)

// New returns the subresource of a kind, which is named in errors. options is
// of the kind's type of options: PodProxyOptions and its like.
func New(kind string, options runtime.Object, locate Locate) *REST {
	return &REST{kind, options, locate, newTransport()}
}

// New returns empty options of the subresource.
func (r *REST) New() runtime.Object { return r.options.DeepCopyObject() }

// Destroy closes connections that no request uses.
func (r *REST) Destroy() { r.transport.CloseIdleConnections() }

// ConnectMethods are the HTTP methods passed on.
func (*REST) ConnectMethods() []string {
	return []string{"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
}

// NewConnectOptions makes the rest of the path an option.
func (r *REST) NewConnectOptions() (runtime.Object, bool, string) { return r.New(), true, "path" }

// Connect returns the handler of one request.
func (r *REST) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	path := pathOf(options)
	if path == nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("wrong options: %T", options))
	}
	target, err := parse(r.kind, id)
	if err != nil {
		return nil, err
	}
	location, transport, err := r.locate(ctx, target)
	if err != nil {
		return nil, err
	}
	if transport == nil {
		transport = r.transport
	}
	return handler(location, *path, transport, responder), nil
}

// CheckAddress rejects addresses that lead back to the server's own machine or
// nowhere in particular.
func CheckAddress(ip string) error {
	a, err := netip.ParseAddr(ip)
	if err != nil || !a.Unmap().IsGlobalUnicast() {
		return apierrors.NewBadRequest("address not allowed")
	}
	return nil
}

// handler passes one request on to location, with the rest of its path. In the
// answers, redirects and links of HTML pages lead through the proxy again; a
// request without any path is redirected to one that ends with a slash.
func handler(location url.URL, path string, transport http.RoundTripper, responder rest.Responder) http.Handler {
	location.Path = utilnet.JoinPreservingTrailingSlash(location.Path, path)
	return proxy.NewUpgradeAwareHandler(&location, transport, true, false, proxy.NewErrorResponder(responder))
}

// AddOptions lets the options of the subresource be read from the query of a
// URL.
func AddOptions(s *runtime.Scheme) error {
	for _, options := range []runtime.Object{&corev1.PodProxyOptions{}, &corev1.ServiceProxyOptions{}, &corev1.NodeProxyOptions{}} {
		err := s.AddConversionFunc((*url.Values)(nil), options, func(a, b any, _ conversion.Scope) error {
			*pathOf(b) = a.(*url.Values).Get("path")
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// pathOf returns the field Path of options; nil if they are of another kind.
func pathOf(options any) *string {
	switch o := options.(type) {
	case *corev1.PodProxyOptions:
		return &o.Path
	case *corev1.ServiceProxyOptions:
		return &o.Path
	case *corev1.NodeProxyOptions:
		return &o.Path
	}
	return nil
}
