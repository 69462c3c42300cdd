package front

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// The reasons of Events about endpoints that get no new clients, and that get some again.
const (
	endpointOut  = "EndpointOut"
	endpointBack = "EndpointBack"
)

// absentOf is what absentees have of a Front.
type absentOf struct {
	node     string
	mu       *sync.Mutex
	services map[svc.Name]*service // guarded by mu
	events   Recorder
	server   Server
}

// absentees are the endpoints that get no new clients, as they were reported last. Only Run changes them.
type absentees struct {
	front   absentOf
	changed func()      // after a report
	turned  loop.Signal // there may be something to report
	last    []pods.Absence
	list    []v1.AbsentEndpoint // guarded by the Front's mu
}

// Absent returns the endpoints that get no new clients. The list does not change.
func (a *absentees) Absent() []v1.AbsentEndpoint {
	a.front.mu.Lock()
	defer a.front.mu.Unlock()
	return a.list
}

// reportAbsent records Events about endpoints that get no new clients since the last time, or get some again, and has the
// status written. Another reason for one that is absent already changes only the status.
func (a *absentees) reportAbsent() {
	now := a.front.server.Absences()
	came, went := changes(a.last, now)
	sameReason := func(x, y pods.Absence) bool { return x.Reason == y.Reason }
	if len(came) == 0 && len(went) == 0 && slices.EqualFunc(a.last, now, sameReason) {
		return
	}
	a.last = now
	a.front.mu.Lock()
	a.list = a.statusLocked(now)
	a.eventsLocked(corev1.EventTypeWarning, endpointOut, "get no new clients", came, func(s *service, one *pods.Absence) string {
		return s.describe(one.Pod) + ": " + one.Reason
	})
	a.eventsLocked(corev1.EventTypeNormal, endpointBack, "get new clients again", went, func(s *service, one *pods.Absence) string {
		if !s.has(one.Pod) { // it has left
			return ""
		}
		return s.describe(one.Pod)
	})
	a.front.mu.Unlock()
	a.changed()
}

// changes returns which absences are new, and which have ended.
func changes(before, now []pods.Absence) (came, went []pods.Absence) {
	lacks := func(list []pods.Absence, a pods.Absence) bool {
		_, has := slices.BinarySearchFunc(list, a, func(x, y pods.Absence) int { return x.Compare(&y) })
		return !has
	}
	for _, a := range now {
		if lacks(before, a) {
			came = append(came, a)
		}
	}
	for _, a := range before {
		if lacks(now, a) {
			went = append(went, a)
		}
	}
	return came, went
}

// eventsLocked records one Event for each Service of a list, which has them in order. text may return "" for none.
func (a *absentees) eventsLocked(kind, reason, what string, list []pods.Absence, text func(*service, *pods.Absence) string) {
	for len(list) > 0 {
		n := list[0].Service
		end := slices.IndexFunc(list, func(one pods.Absence) bool { return one.Service != n })
		if end < 0 {
			end = len(list)
		}
		var texts []string
		s := a.front.services[n]
		for i := range list[:end] {
			if s == nil {
				break
			}
			if t := text(s, &list[i]); t != "" {
				texts = append(texts, t)
			}
		}
		if len(texts) > 0 {
			message := fmt.Sprintf("node %s: endpoints %s: %s", a.front.node, what, events.Abbreviate(texts))
			a.front.events.Event(s.object, kind, reason, message)
		}
		list = list[end:]
	}
}

// statusLocked returns the list for the status.
func (a *absentees) statusLocked(now []pods.Absence) (out []v1.AbsentEndpoint) {
	for _, one := range now[:min(len(now), v1.MaxAbsent)] {
		e := v1.AbsentEndpoint{
			Service: one.Service.Namespace + "/" + one.Service.Name, Endpoint: one.Pod.String(),
			Since: metav1.NewTime(one.Since.Truncate(time.Second)), Reason: one.Reason,
		}
		if s := a.front.services[one.Service]; s != nil {
			e.Pod = s.podAt(one.Pod)
		}
		out = append(out, e)
	}
	return out
}

// describe returns an endpoint with the name of its Pod.
func (s *service) describe(at netip.AddrPort) string {
	if pod := s.podAt(at); pod != "" {
		return at.String() + " (Pod " + pod + ")"
	}
	return at.String()
}

// has reports whether an endpoint is one of the Service, as it was built last.
func (s *service) has(at netip.AddrPort) bool {
	if s.built == nil { // it will be built again: until then the pools are as they were
		return true
	}
	for _, list := range s.built.Backends {
		if slices.Contains(list, at) {
			return true
		}
	}
	if s.built.Routes != nil {
		for _, list := range s.built.Routes.Targets {
			if slices.Contains(list, at) {
				return true
			}
		}
	}
	return false
}

// podAt returns the name of the Pod at an address, "" if none is known.
func (s *service) podAt(at netip.AddrPort) string {
	ip := at.Addr().String()
	for _, slice := range s.slices {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if e.TargetRef != nil && e.TargetRef.Kind == "Pod" && slices.Contains(e.Addresses, ip) {
				return e.TargetRef.Name
			}
		}
	}
	return ""
}
