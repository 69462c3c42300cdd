package controller

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

// event is one change in the history of an API, as an informer brings it.
type event struct {
	old, now *discoveryv1.EndpointSlice // now nil: deleted
}

// history is an API with one writer on the view's side and others, and an
// informer that lags behind.
type history struct {
	view    *view[*discoveryv1.EndpointSlice]
	objects map[string]*discoveryv1.EndpointSlice
	events  []event
	at      int
	known   map[string]*discoveryv1.EndpointSlice // the informer's store
	version int
}

func (h *history) write(name, owner string) *discoveryv1.EndpointSlice {
	h.version++
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, ResourceVersion: strconv.Itoa(h.version), Labels: map[string]string{discoveryv1.LabelServiceName: owner},
	}}
	old := h.objects[name]
	if old != nil {
		s.UID = old.UID
	} else {
		s.UID = types.UID(fmt.Sprintf("%s-%d", name, h.version))
	}
	h.objects[name] = s
	h.events = append(h.events, event{old, s})
	return s
}

func (h *history) remove(name string) {
	h.version++
	h.events = append(h.events, event{old: h.objects[name]})
	delete(h.objects, name)
}

// deliver lets the informer bring the next event.
func (h *history) deliver() {
	e := h.events[h.at]
	h.at++
	switch {
	case e.now == nil:
		delete(h.known, e.old.Name)
		h.view.vanished(e.old)
	default:
		h.known[e.now.Name] = e.now
		h.view.observed(e.old, e.now, e.old != nil)
	}
}

// Whatever the order in which answers and events come: the view is never
// behind an own write, and when the informer has caught up, view and API are
// the same.
func TestViewIsNeverBehindItsOwnWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := &history{objects: map[string]*discoveryv1.EndpointSlice{}, known: map[string]*discoveryv1.EndpointSlice{}}
		h.view = newView(sliceOwner, func(name svc.Name) bool { return h.known[name.Name] != nil })
		for range 40 {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			owner := "web"
			switch rapid.SampledFrom([]string{"own", "own", "foreign", "delete", "foreign delete", "deliver", "deliver", "late answer"}).Draw(t, "step") {
			case "own":
				s := h.write(name, owner)
				h.view.wrote(s)
				h.wantHeld(t, s)
			case "late answer": // the event comes before the answer
				s := h.write(name, owner)
				for h.at < len(h.events) {
					h.deliver()
				}
				h.view.wrote(s)
				h.wantHeld(t, s)
			case "foreign":
				h.write(name, rapid.SampledFrom([]string{"web", "other"}).Draw(t, "owner"))
			case "delete":
				if s := h.objects[name]; s != nil {
					o, _ := sliceOwner(s)
					h.remove(name)
					h.view.deleted(nameOf(s), o, s.UID)
					for _, x := range h.view.list(o) {
						if x.UID == s.UID {
							t.Fatalf("%s is still there after its delete", name)
						}
					}
				}
			case "foreign delete":
				if h.objects[name] != nil {
					h.remove(name)
				}
			case "deliver":
				if h.at < len(h.events) {
					h.deliver()
				}
			}
		}
		for h.at < len(h.events) {
			h.deliver()
		}
		got := map[string]string{}
		for _, owner := range []string{"web", "other"} {
			for _, s := range h.view.list(svc.Name{Namespace: "ns", Name: owner}) {
				if got[s.Name] != "" {
					t.Fatalf("%s is in two groups", s.Name)
				}
				got[s.Name] = s.ResourceVersion
			}
		}
		if len(got) != len(h.objects) {
			t.Fatalf("view %v, API has %d", got, len(h.objects))
		}
		for name, s := range h.objects {
			if got[name] != s.ResourceVersion {
				t.Fatalf("%s: version %s, API has %s", name, got[name], s.ResourceVersion)
			}
		}
	})
}

func (h *history) wantHeld(t *rapid.T, s *discoveryv1.EndpointSlice) {
	t.Helper()
	owner, _ := sliceOwner(s)
	for _, x := range h.view.list(owner) {
		if x.Name == s.Name && x.ResourceVersion == s.ResourceVersion {
			return
		}
	}
	t.Fatalf("the view does not know its own write of %s", s.Name)
}

// An own write that somebody undoes while the informer lists anew leaves no
// event. It is forgotten after a while, and the Service planned again.
func TestViewForgetsWhatNeverComes(t *testing.T) {
	h := &history{objects: map[string]*discoveryv1.EndpointSlice{}, known: map[string]*discoveryv1.EndpointSlice{}}
	now := time.Unix(1000, 0)
	h.view = newView(sliceOwner, func(name svc.Name) bool { return h.known[name.Name] != nil })
	h.view.now = func() time.Time { return now }
	h.view.wrote(h.write("a", "web"))
	web := svc.Name{Namespace: "ns", Name: "web"}
	if got := h.view.forget(); len(got) != 0 || len(h.view.list(web)) != 1 {
		t.Fatalf("forgotten at once: %v", got)
	}
	now = now.Add(forgetAfter)
	if got := h.view.forget(); len(got) != 1 || got[0] != web || len(h.view.list(web)) != 0 {
		t.Fatalf("told %v, left %d", got, len(h.view.list(web)))
	}
}
