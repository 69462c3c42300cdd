package filter

import (
	"cmp"
	"fmt"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/policy"
)

// Auth is how a server is asked whether a request may pass, and what its answer means.
type Auth struct {
	// Method, Host and Target, which is a path with a query, take the place of the request's; "" leaves that.
	Method, Host, Target string
	// Prefix is put before the path.
	Prefix string
	// Ask are the names of the fields that the server gets beside Authorization, in lower case; AskAll is for all.
	Ask    []string
	AskAll bool
	// Take are the names of the fields of the answer that the backend gets, and never from the client. TakeAll is for all fields that
	// the answer has.
	Take    []string
	TakeAll bool
	// Body lets the server have the body of a request, which must not be longer, in bytes; 0 for none.
	Body int
	// Nginx, if not nil, has the server asked as by ingress-nginx, and GRPC by Envoy's protocol.
	Nginx *policy.NginxAuth
	GRPC  bool
}

// ReadAuth reads a filter of type ExternalAuth. wrong names the first invalid field.
func ReadAuth(spec *gwv1.HTTPExternalAuthFilter) (a *Auth, wrong string) {
	a = &Auth{}
	if spec.ForwardBody != nil {
		a.Body = int(spec.ForwardBody.MaxSize)
	}
	switch spec.ExternalAuthProtocol {
	case gwv1.HTTPRouteExternalAuthGRPCProtocol:
		a.GRPC, a.Host, a.TakeAll = true, string(spec.BackendRef.Name), true
		if how := spec.GRPCAuthConfig; how != nil {
			wrong = a.asks("grpc", how.AllowedRequestHeaders)
		}
		a.AskAll = len(a.Ask) == 0
		return a, wrong
	case gwv1.HTTPRouteExternalAuthHTTPProtocol:
	default:
		return a, fmt.Sprintf("protocol: %.100q is not served here; want HTTP or GRPC", spec.ExternalAuthProtocol)
	}
	how := spec.HTTPAuthConfig
	if how == nil {
		how = &gwv1.HTTPAuthConfig{}
	}
	if how.Path != "" {
		prefix, ok := hostpath.Path(how.Path)
		if !ok {
			wrong = fmt.Sprintf("http.path: %.100q is no path that all servers read alike", how.Path)
		}
		a.Prefix = strings.TrimSuffix(prefix, "/")
	}
	wrong = cmp.Or(wrong, a.asks("http", how.AllowedRequestHeaders))
	for i, name := range how.AllowedResponseHeaders {
		if wrong == "" && !ValidField(name, "x") {
			wrong = fmt.Sprintf("http.allowedResponseHeaders[%d]: want the name of a field that belongs to no connection", i)
		}
		a.Take = append(a.Take, strings.ToLower(name))
	}
	a.TakeAll = len(a.Take) == 0
	return a, wrong
}

// asks reads the names of the fields that the server gets.
func (a *Auth) asks(protocol string, names []string) (wrong string) {
	for i, name := range names {
		if wrong == "" && !isToken(name) {
			wrong = fmt.Sprintf("%s.allowedHeaders[%d]: want the name of a field", protocol, i)
		}
		a.Ask = append(a.Ask, strings.ToLower(name))
	}
	return wrong
}

// isToken reports whether a text can be the name of a field, also of one that no rule may set.
func isToken(name string) bool { return name != "" && ValidField("x-"+name, "x") }
