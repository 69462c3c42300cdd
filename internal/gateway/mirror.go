package gateway

import (
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/filter"
)

// mirror reads a filter of type RequestMirror. ok is false if it leads to no backend: then requests go on without it, as the
// specification asks, and the route's status tells.
func (b *ruleCompiler) mirror(spec *gwv1.HTTPRequestMirrorFilter, at string) (m Mirror, ok bool) {
	wrong := ""
	if m.Share, wrong = filter.ReadShare(spec); wrong != "" {
		b.fail("%s%s", at, wrong)
		return m, false
	}
	m.Backend, ok = b.resolve(&spec.BackendRef, at+".backendRef", b.route.from.protocol())
	return m, ok
}
