package front

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
)

// The reasons of Events about endpoints that get no new clients, and that get some again.
const (
	endpointOut  = "EndpointOut"
	endpointBack = "EndpointBack"
)

// absent are the endpoints that get no new clients, as they were reported last. Only Run changes it; the Front's mu guards list.
type absent struct {
	wake loop.Signal
	last []pods.Absence
	list []v1.AbsentEndpoint
}

// Absent returns the endpoints that get no new clients. The list does not change.
func (f *Front) Absent() []v1.AbsentEndpoint {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.absent.list
}

// reportAbsent records Events about endpoints that get no new clients since the last time, or get some again, and has the
// status written.
func (f *Front) reportAbsent() {
	now := f.server.Absences()
	came, went := changes(f.absent.last, now)
	if len(came) == 0 && len(went) == 0 {
		return
	}
	f.absent.last = now
	f.mu.Lock()
	f.absent.list = f.statusLocked(now)
	f.eventsLocked(corev1.EventTypeWarning, endpointOut, "get no new clients", came, func(s *service, a *pods.Absence) string {
		return s.describe(a.Pod) + ": " + a.Reason
	})
	f.eventsLocked(corev1.EventTypeNormal, endpointBack, "get new clients again", went, func(s *service, a *pods.Absence) string {
		if !s.has(a.Pod) { // it has left
			return ""
		}
		return s.describe(a.Pod)
	})
	f.mu.Unlock()
	f.served()
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
func (f *Front) eventsLocked(kind, reason, what string, list []pods.Absence, text func(*service, *pods.Absence) string) {
	for len(list) > 0 {
		n := list[0].Service
		end := slices.IndexFunc(list, func(a pods.Absence) bool { return a.Service != n })
		if end < 0 {
			end = len(list)
		}
		var texts []string
		if s := f.services[n]; s != nil {
			for i := range list[:end] {
				if t := text(s, &list[i]); t != "" {
					texts = append(texts, t)
				}
			}
			if len(texts) > 0 {
				f.events.Event(s.object, kind, reason, fmt.Sprintf("node %s: endpoints %s: %s", f.node, what, events.Abbreviate(texts)))
			}
		}
		list = list[end:]
	}
}

// statusLocked returns the list for the status.
func (f *Front) statusLocked(now []pods.Absence) (out []v1.AbsentEndpoint) {
	for _, a := range now[:min(len(now), v1.MaxAbsent)] {
		e := v1.AbsentEndpoint{
			Service: a.Service.Namespace + "/" + a.Service.Name, Endpoint: a.Pod.String(), Since: metav1.NewTime(a.Since.Truncate(1e9)), Reason: a.Reason,
		}
		if s := f.services[a.Service]; s != nil {
			e.Pod = s.podAt(a.Pod)
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
			if e.TargetRef != nil && e.TargetRef.Kind == "Pod" && slices.ContainsFunc(e.Addresses, func(a string) bool { return strings.EqualFold(a, ip) }) {
				return e.TargetRef.Name
			}
		}
	}
	return ""
}
