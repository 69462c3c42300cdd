package pod

import (
	"context"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/registry/rest"
)

var _ rest.Connecter = (*traceREST)(nil)

// traceREST serves pods/NAME/trace: the agent of the Pod's node sends one packet from the Pod, as the query says, and returns what
// became of it. Kubernetes has no such subresource.
type traceREST struct{ *streams }

func (*traceREST) New() runtime.Object { return &corev1.Pod{} }
func (*traceREST) Destroy()            {}

// ConnectMethods is only POST: a packet is sent.
func (*traceREST) ConnectMethods() []string { return []string{http.MethodPost} }

// NewConnectOptions returns none: the query goes to the agent as it is.
func (*traceREST) NewConnectOptions() (runtime.Object, bool, string) { return nil, false, "" }

// Connect returns the handler of one request.
func (r *traceREST) Connect(ctx context.Context, name string, _ runtime.Object, responder rest.Responder) (http.Handler, error) {
	p, err := r.get(ctx, name)
	if err != nil {
		return nil, err
	}
	u, transport, err := r.locate(ctx, p, nil, "podTrace", p.Namespace, p.Name)
	if err != nil {
		return nil, err
	}
	return proxy.NewUpgradeAwareHandler(u, transport, false, false, proxy.NewErrorResponder(responder)), nil
}
