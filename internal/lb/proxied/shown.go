package proxied

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

// Watch has changed called when Absences may differ, with locks held: it must not wait. It is called before the first Set.
func (s *Server) Watch(changed func()) { s.absent.Store(&changed) }

// changed is called when a Pod turns absent, or returns.
func (s *Server) changed() {
	if f := s.absent.Load(); f != nil {
		(*f)()
	}
}

// Absences returns which Pods get no new clients, and why.
func (s *Server) Absences() []pods.Absence { return s.shared.Absences.List() }

// Collector returns the metrics of what Services and their endpoints carry.
func (s *Server) Collector() prometheus.Collector {
	return traffic.Collector{Book: s.book, States: s.states}
}

// states returns what Services have now.
func (s *Server) states() []traffic.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[svc.Name]*traffic.State, len(s.usages))
	for n := range s.usages {
		all[n] = &traffic.State{Service: n}
	}
	for key, p := range s.pools {
		if t := all[key.service]; t != nil {
			healthy, unhealthy, ejected := p.Count()
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

// certificateEnds returns when the certificates end that clients of a Service are shown, by the names of their Secrets.
func certificateEnds(v *Service) map[string]time.Time {
	out := map[string]time.Time{}
	for i, name := range v.Spec.Certificates {
		if i < len(v.Certificates) && v.Certificates[i].Leaf != nil {
			out[name] = v.Certificates[i].Leaf.NotAfter
		}
	}
	if v.Routes != nil {
		for n, c := range v.Routes.Certificates {
			if c != nil && c.Leaf != nil {
				out[n.Namespace+"/"+n.Name] = c.Leaf.NotAfter
			}
		}
	}
	return out
}
