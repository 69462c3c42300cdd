package gateway

import (
	"cmp"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
)

// callIndex finds the match of a call without a look at all matches of a host. The zero value has none.
type callIndex struct {
	exact   map[[2]string][]*match // by service and method, "" for every one
	regexes []*match
}

// add adds a match. They come in the order of compareMatches, and sort follows the last one.
func (x *callIndex) add(m *match) {
	if m.call.HasRegex() {
		x.regexes = append(x.regexes, m)
		return
	}
	if x.exact == nil {
		x.exact = map[[2]string][]*match{}
	}
	key := [2]string{m.call.Service, m.call.Method}
	x.exact[key] = append(x.exact[key], m)
}

// sort puts what was added in the order of its precedence.
func (x *callIndex) sort() { slices.SortStableFunc(x.regexes, compareCalls) }

// compareCalls orders matches of calls by the precedence of the specification: more characters of the service, then more of the
// method; then as compareMatches does, of which matches of calls use the header fields, the age and the place. A regular
// expression counts with the length of its text.
func compareCalls(a, b *match) int {
	return cmp.Or(
		cmp.Compare(len(b.call.Service), len(a.call.Service)),
		cmp.Compare(len(b.call.Method), len(a.call.Method)),
		compareMatches(a, b),
	)
}

// find returns the match with the highest precedence that is for a request.
func (x *callIndex) find(r *Request, path string) (best *match) {
	service, method, ok := filter.SplitCall(path)
	if !ok {
		return nil
	}
	keep := func(m *match) {
		if m != nil && (best == nil || compareCalls(m, best) < 0) {
			best = m
		}
	}
	if len(x.exact) > 0 {
		for _, key := range [...][2]string{{service, method}, {service, ""}, {"", method}, {"", ""}} {
			keep(first(x.exact[key], r, path))
		}
	}
	for _, m := range x.regexes {
		if m.call.Takes(service, method) && m.takes(r, path) {
			keep(m)
			break // those behind it have less
		}
	}
	return best
}

// calls returns the matches of a rule of a GRPCRoute.
func (b *ruleCompiler) calls(rule *Rule, specs []gwv1.GRPCRouteMatch) (out []*match) {
	if len(specs) == 0 {
		return []*match{{Rule: rule, kind: callMatch, call: &filter.Call{}}}
	}
	for i := range specs {
		m := &match{Rule: rule, kind: callMatch, order: i, call: &filter.Call{}}
		spec, at := &specs[i], fmt.Sprintf(".matches[%d]", i)
		for j, h := range spec.Headers {
			regex := valueOf(h.Type, gwv1.GRPCHeaderMatchExact) == gwv1.GRPCHeaderMatchRegularExpression
			b.value(&m.headers, strings.ToLower(string(h.Name)), h.Value, regex, fmt.Sprintf("%s.headers[%d]", at, j))
		}
		if b.call(m.call, spec.Method, at+".method") {
			out = append(out, m)
		}
	}
	return out
}

// call reads the method of a match. It reports false if the match is invalid: it then takes no call.
func (b *ruleCompiler) call(c *filter.Call, spec *gwv1.GRPCMethodMatch, at string) (ok bool) {
	wrong := ""
	if ok, wrong = c.Read(spec, func(text, field string) *regexp.Regexp { return b.regex(text, at+field) }); wrong != "" {
		b.fail("%s%s", at, wrong)
	}
	return ok
}

// refusal is the status of the answer if a rule has no valid backend. Clients of gRPC read 503 as the code UNAVAILABLE, which
// GRPCRoute's specification asks for (https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md).
func refusal(kind gwv1.Kind) int {
	if kind == kinds.GRPCRoute {
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// Refusal returns the status of an answer if Pick finds no valid backend.
func (r *Rule) Refusal() int { return refusal(gwv1.Kind(r.Route.Kind)) }
