package proxied

import (
	"crypto/tls"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

// shown is what a Server shows of its traffic and endpoints.
type shown struct {
	server *Server
	absent atomic.Pointer[func()] // see Watch
}

// Watch has changed called when Absences may differ, with locks held: it must not wait. It is called before the first Set.
func (o *shown) Watch(changed func()) { o.absent.Store(&changed) }

// changed is called when a Pod turns absent, or returns.
func (o *shown) changed() {
	if f := o.absent.Load(); f != nil {
		(*f)()
	}
}

// Absences returns which Pods get no new clients, and why.
func (o *shown) Absences() []pods.Absence { return o.server.shared.Absences.List() }

// DroppedLines returns how many lines of access logs the standard output did not get.
func (o *shown) DroppedLines() uint64 {
	if o.server.logs == nil {
		return 0
	}
	return o.server.logs.DroppedLines()
}

// Collector returns the metrics of what Services and their endpoints carry.
func (o *shown) Collector() prometheus.Collector {
	return traffic.Collector{Book: o.server.book, States: o.states}
}

// states returns what Services have now.
func (o *shown) states() []traffic.State {
	s := o.server
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[svc.Name]*traffic.State, len(s.usages))
	for n := range s.usages {
		all[n] = &traffic.State{Service: n}
	}
	for key, p := range s.pools {
		if t := all[key.service]; t != nil {
			healthy, unhealthy, ejected := p.CountEach(func(at netip.AddrPort, healthy bool) {
				if !healthy { // at one of its ports
					t.Absent = append(t.Absent, at)
				}
			})
			t.Healthy, t.Unhealthy, t.Ejected = t.Healthy+healthy, t.Unhealthy+unhealthy, t.Ejected+ejected
		}
	}
	for n, v := range s.services {
		if t := all[n]; t != nil {
			t.Certificates = certificateEnds(v)
		}
	}
	out := make([]traffic.State, 0, len(all))
	a := &s.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	for n, t := range all {
		t.Connections = s.usages[n].active
		out = append(out, *t)
	}
	return out
}

// certificateEnds returns when the certificates end that clients of a Service are shown, by the names of their Secrets. One that stands in
// for a certificate that was never issued has no end that matters.
func certificateEnds(v *Service) map[string]time.Time {
	out := map[string]time.Time{}
	for i, name := range v.Spec.Certificates {
		if i < len(v.Certificates) && counts(&v.Certificates[i]) {
			out[name] = v.Certificates[i].Leaf.NotAfter
		}
	}
	if v.Routes == nil {
		return out
	}
	for _, p := range v.Routes.Ports { // all fronts share the certificates of all
		for _, l := range p.Listeners {
			for _, n := range l.Certificates {
				if c := v.Routes.Certificates[n]; c != nil && counts(c) {
					out[n.Namespace+"/"+n.Name] = c.Leaf.NotAfter
				}
			}
		}
	}
	return out
}

// counts reports whether a certificate is one that clients may trust.
func counts(c *tls.Certificate) bool {
	return c.Leaf != nil && c.Leaf.Subject.CommonName != svc.ACMEStandInName
}
