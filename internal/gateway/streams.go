package gateway

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// addStreams adds the routes of connections and of datagrams that name the Gateway.
func (f *Front) addStreams(o *Objects) {
	known := map[Target]bool{}
	for _, key := range slices.SortedFunc(o.Index().Routes(f.gateway), kinds.Route.Compare) {
		s := o.Streams[key]
		if s == nil { // of requests
			continue
		}
		c := f.compileStream(o, s)
		attached := map[*listener]map[string]bool{}
		for i := range s.Parents {
			p := &s.Parents[i]
			if f.selects(p, key.Namespace) {
				reason, message := f.attachBy(o, p, subject{key.Kind, key.Namespace, hostpath.All(s.Hostnames)}, attached)
				f.streams[key] = append(f.streams[key], c.status(p, reason, message))
			}
		}
		for l, hosts := range attached {
			l.connected++
			rule := c.rule
			if l.mode() == Terminated {
				rule = c.decrypted
			}
			for h := range hosts {
				if have := l.streams[h]; have == nil || rule.Route.Compare(have.Route) < 0 {
					l.streams[h] = rule
				}
			}
			for i := range rule.Backends {
				w := &rule.Backends[i]
				if t := rule.Target(w); w.Valid && !known[t] {
					known[t] = true
					f.Targets = append(f.Targets, t)
				}
			}
		}
	}
}

// compiledStream is a route of connections or of datagrams as a table has it.
type compiledStream struct {
	object metav1.Object
	rule   *Rule
	// decrypted is the rule at listeners that end TLS: backends with a BackendTLSPolicy get TLS again.
	decrypted  *Rule
	reason     gwv1.RouteConditionReason
	unresolved string
}

func (f *Front) compileStream(o *Objects, s *kinds.Stream) *compiledStream {
	key := s.Route()
	c := &compiledStream{object: s.Object, reason: gwv1.RouteReasonResolvedRefs, rule: &Rule{
		Route: kinds.Object{Kind: string(key.Kind), Created: s.Object.GetCreationTimestamp().Time, Name: key.Name},
	}}
	protocol := TCP
	if key.Kind == kinds.UDPRoute {
		protocol = UDP
	}
	for i := range s.Backends {
		ref := &s.Backends[i]
		to := svc.Name{Namespace: string(valueOf(ref.Namespace, gwv1.Namespace(key.Namespace))), Name: string(ref.Name)}
		f.Connected[to] = true
		w := Weighted{Weight: uint32(max(0, valueOf(ref.Weight, 1)))} //nolint:gosec // the definition of the kind bounds it
		backend, reason, wrong := o.resolve(key.Kind, key.Namespace, &ref.BackendObjectReference, protocol)
		if w.Backend, w.Valid = backend, wrong == ""; wrong != "" && c.unresolved == "" {
			c.reason, c.unresolved = reason, fmt.Sprintf("rules[0].backendRefs[%d]: %s", i, wrong)
		}
		if reason == gwv1.RouteReasonRefNotPermitted {
			f.Revoked[Revocation{key, to}] = true
		}
		c.rule.Backends = append(c.rule.Backends, w)
		c.rule.total += uint64(w.Weight)
	}
	decrypted := *c.rule
	c.decrypted, decrypted.Backends = &decrypted, slices.Clone(c.rule.Backends)
	for i := range c.rule.Backends {
		c.rule.Backends[i].Backend.Policy = svc.Name{}
	}
	return c
}

// status returns the status of a route for one of its parents.
func (c *compiledStream) status(p *gwv1.ParentReference, reason gwv1.RouteConditionReason, message string) gwv1.RouteParentStatus {
	generation := c.object.GetGeneration()
	return gwv1.RouteParentStatus{
		ParentRef: *p, ControllerName: names.ControllerName,
		Conditions: []metav1.Condition{
			condition(gwv1.RouteConditionAccepted, message == "", reason, generation, message),
			condition(gwv1.RouteConditionResolvedRefs, c.unresolved == "", c.reason, generation, c.unresolved),
		},
	}
}
