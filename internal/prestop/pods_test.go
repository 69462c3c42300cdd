package prestop

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/reflector"
)

// madePod is a running Pod of the node "here".
func madePod(name string, addrs ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)},
		Spec:       corev1.PodSpec{NodeName: "here"}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	p.CreationTimestamp = metav1.NewTime(time.Unix(1000, 0))
	for _, a := range addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a})
	}
	return p
}

// ends returns a Pod that is being deleted.
func ends(p *corev1.Pod, grace int64) *corev1.Pod {
	p = p.DeepCopy()
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &metav1.Time{Time: time.Now()}, &grace
	return p
}

func hasDrained(p *corev1.Pod) *corev1.Pod {
	p = p.DeepCopy()
	p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: barrier.Drained, Status: corev1.ConditionTrue})
	return p
}

func isDone(p *pod) bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func TestPods(t *testing.T) {
	s := newPods()
	sink := s.sink()
	owner := func(address string) string {
		p, _, _ := s.enter(netip.MustParseAddr(address))
		if p == nil {
			return ""
		}
		s.leave(p)
		return p.name.Name
	}
	check := func(address, want string) {
		t.Helper()
		if got := owner(address); got != want {
			t.Errorf("%s is the address of %q, want %q", address, got, want)
		}
	}
	host := madePod("host", "192.0.2.1")
	host.Spec.HostNetwork = true
	ended := madePod("ended", "10.244.1.9")
	ended.Status.Phase = corev1.PodSucceeded
	odd := madePod("odd", "127.0.0.1", "::", "224.0.0.1", "fe80::1", "no address", "::ffff:10.244.1.8")
	young := madePod("young", "10.244.1.5")
	young.CreationTimestamp = metav1.NewTime(time.Unix(2000, 0))
	sink.Replace([]*corev1.Pod{young, madePod("old", "10.244.1.5", "fd00:10:244:1::5"), host, ended, odd})
	check("10.244.1.5", "young") // the old one has ended, which its object does not tell yet
	check("fd00:10:244:1::5", "old")
	check("192.0.2.1", "")
	check("10.244.1.9", "")
	check("10.244.1.8", "odd")
	if got := s.addrs(); len(got) != 3 {
		t.Errorf("the addresses are %v", got)
	}
	select {
	case <-s.moved:
	default:
		t.Error("that addresses have changed is not told")
	}
	sink.Set(ends(young, 30))
	select {
	case <-s.moved:
		t.Error("addresses are written again though they stay")
	default:
	}
	first := s.byName[stateOf(young).name]
	sink.Delete(young)
	check("10.244.1.5", "old")
	if !isDone(first) {
		t.Error("requests of a Pod that is gone wait")
	}
	// Another Pod of the same name.
	again := madePod("old", "10.244.1.6")
	again.UID = "again"
	before := s.byName[stateOf(again).name]
	sink.Set(again)
	check("10.244.1.5", "")
	if !isDone(before) || isDone(s.byName[stateOf(again).name]) {
		t.Error("the requests of one Pod follow those of another one with its name")
	}
	sink.Set(hasDrained(ends(again, 30)))
	if !isDone(s.byName[stateOf(again).name]) {
		t.Error("a drained Pod waits")
	}
	sink.Replace(nil)
	if len(s.addrs()) != 0 || len(s.byName) != 0 {
		t.Errorf("after an empty list there are %v", s.addrs())
	}
}

// A Pod has as many requests at a time as a kubelet may send, and no more.
func TestRequestsOfAPodAreBounded(t *testing.T) {
	s := newPods()
	s.sink().Set(madePod("web", "10.244.1.5"))
	at := netip.MustParseAddr("10.244.1.5")
	for range maxAsking {
		if _, _, ok := s.enter(at); !ok {
			t.Fatal("a request is refused")
		}
	}
	p, _, ok := s.enter(at)
	if ok {
		t.Fatal("one more request is let in")
	}
	s.leave(p)
	if _, _, ok := s.enter(at); !ok {
		t.Error("after one request's end another one is refused")
	}
}

func slice(name string, ready bool, pods ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	for _, p := range pods {
		node := "here"
		if p == "remote" {
			node = "there"
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", UID: types.UID(p)},
		})
	}
	s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{}) // made by hand
	return s
}

// Which Pods have a Service follows the slices, and the proxy gets them all.
func TestLeads(t *testing.T) {
	var passed []string
	sink := newLeads("here")
	next := sink.follow(reflector.Sink[*discoveryv1.EndpointSlice]{
		Replace: func(l []*discoveryv1.EndpointSlice) { passed = append(passed, "replace") },
		Set:     func(s *discoveryv1.EndpointSlice) { passed = append(passed, "set "+s.Name) },
		Delete:  func(s *discoveryv1.EndpointSlice) { passed = append(passed, "delete "+s.Name) },
	})
	check := func(pod types.UID, want bool) {
		t.Helper()
		if sink.to(pod) != want {
			t.Errorf("a Service leads to %s: %t, want %t", pod, !want, want)
		}
	}
	next.Replace([]*discoveryv1.EndpointSlice{slice("x", true, "a", "b", "remote")})
	check("a", true)
	check("remote", false) // the proxy of its own node is asked
	next.Set(slice("y", false, "a"))
	next.Set(slice("x", true, "b"))
	check("a", true) // by y, though it is not ready
	next.Delete(slice("y", false))
	check("a", false)
	check("b", true)
	next.Replace(nil)
	check("b", false)
	if len(sink.count)+len(sink.pods) != 0 {
		t.Errorf("it keeps %v and %v", sink.count, sink.pods)
	}
	if want := []string{"replace", "set y", "set x", "delete y", "replace"}; !slices.Equal(passed, want) {
		t.Errorf("the proxy gets %v, want %v", passed, want)
	}
}

// slowAPI answers a request for a Pod with it after a while.
type slowAPI struct {
	pod   *corev1.Pod
	after time.Duration
}

func (a *slowAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	select {
	case <-r.Context().Done():
		return nil, r.Context().Err()
	case <-time.After(a.after):
	}
	p := a.pod.DeepCopy()
	p.APIVersion, p.Kind = "v1", "Pod"
	text, err := json.Marshal(p)
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Request: r,
		Body: io.NopCloser(bytes.NewReader(text)),
	}, err
}

// Half of the grace period bounds an answer, with the time that the API takes.
func TestOneBound(t *testing.T) {
	const second = time.Second
	for name, c := range map[string]struct {
		spec, deletion int64
		api, took      time.Duration
		want           outcome
	}{
		"the API answers at once":     {2, 2, 0, second, late},
		"the API takes most of it":    {2, 2, 800 * time.Millisecond, second, late},
		"the API takes more":          {2, 2, 10 * second, second, failed},
		"a long grace period":         {60, 60, 10 * second, 2 * second, failed},
		"the deletion has a shorter":  {60, 2, 1500 * time.Millisecond, 1500 * time.Millisecond, late},
		"the deletion has a long one": {2, 60, 500 * time.Millisecond, 5 * second, late},
	} {
		synctest.Test(t, func(t *testing.T) {
			web := madePod("web", "10.244.1.7")
			web.Spec.TerminationGracePeriodSeconds = &c.spec
			client, err := kubernetes.NewForConfigAndClient(&rest.Config{Host: "http://api"},
				&http.Client{Transport: &slowAPI{pod: ends(web, c.deletion), after: c.api}})
			if err != nil {
				t.Fatal(err)
			}
			s := New(Options{
				Client: client, NodeName: "here", Wait: 5 * second, Controlled: func() bool { return true },
				Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			})
			s.pods.set(stateOf(web)) // the watch does not know of the deletion yet
			s.leads.set(slice("x", true, "web"))
			begin := time.Now()
			got := s.answer(t.Context(), netip.MustParseAddr("10.244.1.7"), begin)
			if took := time.Since(begin); got != c.want || took != c.took {
				t.Errorf("%s: %s after %s, want %s after %s", name, got, took, c.want, c.took)
			}
		})
	}
}
