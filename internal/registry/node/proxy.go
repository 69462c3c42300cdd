package node

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/proxy"
)

// proxyREST passes requests to nodes/[SCHEME:]NAME[:PORT]/proxy/PATH on to the
// node's agent, or to another port of the node.
type proxyREST struct {
	agents    *Agents
	transport *http.Transport
}

var _ rest.Connecter = (*proxyREST)(nil)

func (*proxyREST) New() runtime.Object { return &corev1.NodeProxyOptions{} }

// Destroy closes connections that no request uses.
func (r *proxyREST) Destroy() { r.transport.CloseIdleConnections() }

// ConnectMethods are the HTTP methods passed on.
func (*proxyREST) ConnectMethods() []string { return proxy.Methods() }

// NewConnectOptions says that the rest of the path is an option.
func (*proxyREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.NodeProxyOptions{}, true, "path"
}

// Connect returns the handler of one request.
func (r *proxyREST) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := options.(*corev1.NodeProxyOptions)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("wrong options: %T", options))
	}
	target, err := proxy.Parse("node", id)
	if err != nil {
		return nil, err
	}
	agent, err := r.agents.Find(ctx, target.Name)
	if err != nil {
		return nil, err
	}
	if target.Port == "" || target.Port == agent.Base.Port() {
		// The agent is known by its certificate, wherever it is.
		return proxy.Handler(agent.Base, o.Path, agent.Transport, responder), nil
	}
	host := agent.Base.Hostname()
	if err := proxy.CheckAddress(host); err != nil {
		return nil, err
	}
	location := url.URL{Scheme: target.Scheme, Host: net.JoinHostPort(host, target.Port)}
	return proxy.Handler(location, o.Path, r.transport, responder), nil
}
