package front

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// absentServer has the absences that a test wants.
type absentServer struct {
	*proxied.Server
	list []pods.Absence
}

func (s *absentServer) Absences() []pods.Absence { return s.list }

// taken keeps Events as text.
type taken struct{ list []string }

func (r *taken) Event(o runtime.Object, kind, reason, message string) {
	r.list = append(r.list, fmt.Sprintf("%s %s %s %s", o.(*corev1.Service).Name, kind, reason, message))
}

func (r *taken) take() string {
	defer func() { r.list = nil }()
	return strings.Join(r.list, "\n")
}

// An endpoint that gets no new clients is an Event, one for each Service, and stands in the status with its Pod; so is one that
// returns, but not one that has left. The same absence again says nothing.
func TestAbsentEndpoints(t *testing.T) {
	server := &absentServer{Server: proxied.New(proxied.Options{Log: slog.New(slog.DiscardHandler)})}
	defer server.Close(t.Context())
	events, woken := &taken{}, 0
	f := New(Options{NodeName: "n1", Server: server, Events: events, Served: func() { woken++ }})
	at := func(n int) netip.AddrPort { return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 80) }
	began := time.Date(2026, 11, 24, 10, 0, 0, 5e8, time.UTC)
	absence := func(service string, n int) pods.Absence {
		return pods.Absence{Service: svc.Name{Namespace: "default", Name: service}, Pod: at(n), Reason: fmt.Sprintf("reason %d", n), Since: began}
	}
	for _, name := range []string{"a", "b"} {
		o := &corev1.Service{}
		o.Namespace, o.Name = "default", name
		e := discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "web-1"}}
		f.services[svc.NameOf(o)] = &service{
			object: o, slices: map[string]*discoveryv1.EndpointSlice{"x": {Endpoints: []discoveryv1.Endpoint{e}}},
			built: &proxied.Service{Backends: map[uint16][]netip.AddrPort{80: {at(1), at(3)}}},
		}
	}
	server.list = []pods.Absence{absence("a", 1), absence("a", 2), absence("b", 3), absence("gone", 1)}
	f.reportAbsent()
	if got, want := events.take(), "a Warning EndpointOut node n1: endpoints get no new clients: 10.0.0.1:80 (Pod web-1): reason 1, "+
		"10.0.0.2:80: reason 2\nb Warning EndpointOut node n1: endpoints get no new clients: 10.0.0.3:80: reason 3"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	list := f.Absent()
	if len(list) != 4 || woken != 1 || list[0].Service != "default/a" || list[0].Pod != "web-1" ||
		list[0].Since.Unix() != began.Unix() {
		t.Errorf("%+v, woken %d times", list, woken)
	}
	f.reportAbsent()
	if got := events.take(); got != "" || woken != 1 {
		t.Errorf("nothing has changed: %s, woken %d times", got, woken)
	}
	server.list = slices.Clone(server.list)
	server.list[1].Reason = "another one"
	f.reportAbsent()
	if got := events.take(); got != "" || woken != 2 || f.Absent()[1].Reason != "another one" {
		t.Errorf("another reason: %s, woken %d times, %+v", got, woken, f.Absent())
	}
	server.list = []pods.Absence{absence("b", 3)}
	f.reportAbsent()
	if got, want := events.take(), "a Normal EndpointBack node n1: endpoints get new clients again: 10.0.0.1:80 (Pod web-1)"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	server.list = nil
	for i := range 1000 {
		server.list = append(server.list, absence("a", i%250))
		server.list[i].Pod = netip.AddrPortFrom(at(0).Addr(), uint16(i+1)) //nolint:gosec // at most 1000
	}
	f.reportAbsent()
	if got := events.take(); len(f.Absent()) != v1.MaxAbsent || len(got) > 2000 {
		t.Errorf("%d entries, and Events of %d bytes", len(f.Absent()), len(got))
	}
}
