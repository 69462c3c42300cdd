package kit

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

// history is an API with one writer on the cache's side and others, and an
// informer that lags behind.
type history struct {
	cache   *AssumeCache[*discoveryv1.EndpointSlice]
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
		h.cache.observeDelete(e.old)
	default:
		h.known[e.now.Name] = e.now
		h.cache.observe(e.old, e.now, e.old != nil)
	}
}

// Whatever the order in which answers and events come: the cache is never
// behind an own write, and when the informer has caught up, cache and API are
// the same.
func TestAssumeCacheIsNeverBehindItsOwnWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := &history{objects: map[string]*discoveryv1.EndpointSlice{}, known: map[string]*discoveryv1.EndpointSlice{}}
		h.cache = NewAssumeCache(ServiceOf, func(name svc.Name) bool { return h.known[name.Name] != nil })
		for range 40 {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			owner := "web"
			switch rapid.SampledFrom([]string{"own", "own", "foreign", "delete", "foreign delete", "deliver", "deliver", "late answer"}).Draw(t,
				"step") {
			case "own":
				s := h.write(name, owner)
				h.cache.Assume(s)
				h.wantCached(t, s)
			case "late answer": // the event comes before the answer
				s := h.write(name, owner)
				for h.at < len(h.events) {
					h.deliver()
				}
				h.cache.Assume(s)
				h.wantCached(t, s)
			case "foreign":
				h.write(name, rapid.SampledFrom([]string{"web", "other"}).Draw(t, "owner"))
			case "delete":
				if s := h.objects[name]; s != nil {
					o, _ := ServiceOf(s)
					h.remove(name)
					h.cache.AssumeDeleted(svc.NameOf(s), o, s.UID)
					for _, x := range h.cache.List(o) {
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
			for _, s := range h.cache.List(svc.Name{Namespace: "ns", Name: owner}) {
				if got[s.Name] != "" {
					t.Fatalf("%s is in two groups", s.Name)
				}
				got[s.Name] = s.ResourceVersion
			}
		}
		if len(got) != len(h.objects) {
			t.Fatalf("cache %v, API has %d", got, len(h.objects))
		}
		for name, s := range h.objects {
			if got[name] != s.ResourceVersion {
				t.Fatalf("%s: version %s, API has %s", name, got[name], s.ResourceVersion)
			}
		}
	})
}

func (h *history) wantCached(t *rapid.T, s *discoveryv1.EndpointSlice) {
	t.Helper()
	owner, _ := ServiceOf(s)
	for _, x := range h.cache.List(owner) {
		if x.Name == s.Name && x.ResourceVersion == s.ResourceVersion {
			return
		}
	}
	t.Fatalf("the cache does not have its own write of %s", s.Name)
}

// An own write that another client undoes while the informer lists again leaves
// no event. It is dropped after writeTimeout, and the Service planned again; not
// before, for a watch may stall.
func TestAssumeCacheDropsWhatIsNeverConfirmed(t *testing.T) {
	h := &history{objects: map[string]*discoveryv1.EndpointSlice{}, known: map[string]*discoveryv1.EndpointSlice{}}
	now := time.Unix(1000, 0)
	h.cache = NewAssumeCache(ServiceOf, func(name svc.Name) bool { return h.known[name.Name] != nil })
	h.cache.now = func() time.Time { return now }
	h.cache.Assume(h.write("a", "web"))
	web := svc.Name{Namespace: "ns", Name: "web"}
	if got := h.cache.expire(); len(got) != 0 || len(h.cache.List(web)) != 1 {
		t.Fatalf("dropped at once: %v", got)
	}
	now = now.Add(writeTimeout - time.Second)
	if got := h.cache.expire(); len(got) != 0 || len(h.cache.List(web)) != 1 {
		t.Fatalf("dropped while a watch stalls: %v", got)
	}
	now = now.Add(time.Second)
	if got := h.cache.expire(); len(got) != 1 || got[0] != web || len(h.cache.List(web)) != 0 {
		t.Fatalf("changed %v, left %d", got, len(h.cache.List(web)))
	}
}
