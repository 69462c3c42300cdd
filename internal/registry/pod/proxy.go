package pod

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/proxy"
)

// proxyREST passes requests to pods/[SCHEME:]NAME[:PORT]/proxy/PATH on to the
// Pod.
type proxyREST struct {
	*streams
	transport *http.Transport
}

var _ rest.Connecter = (*proxyREST)(nil)

func (*proxyREST) New() runtime.Object { return &corev1.PodProxyOptions{} }

// Destroy closes connections that no request uses.
func (r *proxyREST) Destroy() { r.transport.CloseIdleConnections() }

// ConnectMethods are the HTTP methods passed on.
func (*proxyREST) ConnectMethods() []string { return proxy.Methods() }

// NewConnectOptions says that the rest of the path is an option.
func (*proxyREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.PodProxyOptions{}, true, "path"
}

// Connect returns the handler of one request.
func (r *proxyREST) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := options.(*corev1.PodProxyOptions)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("wrong options: %T", options))
	}
	target, err := proxy.Parse("pod", id)
	if err != nil {
		return nil, err
	}
	p, err := r.get(ctx, target.Name)
	if err != nil {
		return nil, err
	}
	if err := proxy.CheckAddress(p.Status.PodIP); err != nil {
		return nil, err
	}
	if target.Port == "" {
		target.Port = firstPort(p)
	}
	location := url.URL{Scheme: target.Scheme, Host: net.JoinHostPort(p.Status.PodIP, target.Port)}
	return proxy.Handler(location, o.Path, r.transport, responder), nil
}

// firstPort is the first port that a container of p names, else that of HTTP.
func firstPort(p *corev1.Pod) string {
	for _, c := range p.Spec.Containers {
		if len(c.Ports) > 0 {
			return strconv.Itoa(int(c.Ports[0].ContainerPort))
		}
	}
	return "80"
}
