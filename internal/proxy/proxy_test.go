package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/table"
)

func service(name string, n int) *corev1.Service {
	ip := fmt.Sprintf("10.96.%d.%d", n/250, n%250+1)
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "uid-of-" + "a"},
		Spec: corev1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
}

func slice(of string, hosts ...int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: of + "-a", Labels: map[string]string{discoveryv1.LabelServiceName: of}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}
	for _, h := range hosts {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.244.0.%d", h)}, NodeName: new("here")})
	}
	return s
}

// world is a Proxy on a fake API server and a fake kernel, in a synctest bubble:
// all waiting is over in no time.
type world struct {
	t      *testing.T
	client *fake.Clientset
	plane  *fakeDataplane
	proxy  *Proxy
	start  time.Time
}

// inBubble runs f beside a running Proxy and checks that it ends cleanly.
func inBubble(t *testing.T, change func(*Options), f func(*world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		// Field management, which fake.NewClientset adds, takes some 10 ms for each write.
		w := &world{t: t, client: fake.NewSimpleClientset(), plane: newFakeDataplane(), start: time.Now()}
		opts := Options{
			Client: w.client, NodeName: "here", Dataplane: w.plane, Mode: "fake",
			Log:       slog.New(slog.NewTextHandler(t.Output(), nil)),
			Addresses: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil },
		}
		if change != nil {
			change(&opts)
		}
		p, err := New(opts)
		if err != nil {
			t.Fatal(err)
		}
		w.proxy = p
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		synctest.Wait()
		f(w)
		stop()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("Run does not end")
		}
	})
}

func (w *world) setService(s *corev1.Service) {
	w.t.Helper()
	c := w.client.CoreV1().Services(s.Namespace)
	_, err := c.Update(w.t.Context(), s, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = c.Create(w.t.Context(), s, metav1.CreateOptions{})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) setSlice(s *discoveryv1.EndpointSlice) {
	w.t.Helper()
	c := w.client.DiscoveryV1().EndpointSlices(s.Namespace)
	_, err := c.Update(w.t.Context(), s, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = c.Create(w.t.Context(), s, metav1.CreateOptions{})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) events(reason string) []corev1.Event {
	w.t.Helper()
	list, err := w.client.CoreV1().Events("").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	var out []corev1.Event
	for _, e := range list.Items {
		if e.Reason == reason {
			out = append(out, e)
		}
	}
	return out
}

func (w *world) dump() string {
	d, _ := w.plane.Dump(w.t.Context())
	return d
}

// settle waits until nothing is left to do but what timers will start.
func (w *world) settle(d time.Duration) {
	time.Sleep(d) // in the bubble, which waits for nothing real
	synctest.Wait()
}

func TestChangeIsAppliedAtOnceAndAlone(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		w.setService(service("a", 1))
		w.setSlice(slice("a", 5))
		w.settle(10 * time.Millisecond)
		if got, want := w.dump(), "default/a TCP ClusterIP 10.96.0.2:80 -> 10.244.0.5:8080*\n"; got != want {
			t.Fatalf("kernel has %q, want %q", got, want)
		}
		w.settle(time.Second)
		before := len(w.plane.log())
		at := time.Now()
		w.setSlice(slice("a", 5, 6))
		synctest.Wait()
		calls := w.plane.log()[before:]
		if len(calls) != 1 || calls[0].full || calls[0].changed != 1 || !calls[0].at.Equal(at) {
			t.Fatalf("an idle node must apply one change at once and alone, got %+v", calls)
		}
		// What makes no difference here is not applied.
		s := slice("a", 5, 6)
		s.Annotations = map[string]string{"touched": "yes"}
		w.setSlice(s)
		w.settle(time.Second)
		if n := len(w.plane.log()); n != before+1 {
			t.Fatalf("%d Applies for a change that changes nothing", n-before-1)
		}
		st := w.proxy.Status()
		page := httptest.NewRecorder()
		w.proxy.Metrics().ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
		if !strings.Contains(page.Body.String(), "fairlead_service_ports 1\n") {
			t.Error("/metrics does not count the service port")
		}
		if !st.Programmed || st.ServicePorts != 1 || st.Frontends != 1 || st.Endpoints != 2 || st.Applies != before+1 {
			t.Errorf("status %+v", st)
		}
		if w.proxy.Table().Len() != 1 {
			t.Error("Table is not the applied one")
		}
	})
}

func TestBurstCoalesces(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		w.plane.set(func(p *fakeDataplane) { p.slow = 40 * time.Millisecond })
		const burst = 250
		first := len(w.plane.log())
		for i := range burst {
			w.setService(service(fmt.Sprintf("s%d", i), i))
			time.Sleep(4 * time.Millisecond) // in the bubble
		}
		end := time.Now()
		w.settle(time.Second)
		calls := w.plane.log()[first:]
		// One Apply of 40 ms, one pause of 40 ms: about 12 in the second.
		if len(calls) < 8 || len(calls) > 16 {
			t.Errorf("%d Applies for a burst of %d in a second", len(calls), burst)
		}
		if last := calls[len(calls)-1].at; last.Sub(end) > 130*time.Millisecond {
			t.Errorf("the last change was programmed %s after it came", last.Sub(end))
		}
		if got := strings.Count(w.dump(), "\n"); got != burst {
			t.Errorf("%d services in the kernel, want %d", got, burst)
		}
	})
}

func TestErrorsAreRetriedInFullWithBackOff(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		w.settle(time.Second)
		w.plane.set(func(p *fakeDataplane) { p.fail = func() error { return errors.New("netlink: out of memory") } })
		first := len(w.plane.log())
		start := time.Now()
		w.setService(service("a", 1))
		w.settle(25 * time.Second)
		calls := w.plane.log()[first:]
		var waits []string
		for _, c := range calls {
			waits = append(waits, c.at.Sub(start).Round(time.Millisecond).String())
		}
		if got, want := strings.Join(waits, " "), "0s 50ms 150ms 350ms 750ms 1.55s 3.15s 6.35s 12.75s 22.75s"; got != want {
			t.Errorf("tried after\n%s, want\n%s", got, want)
		}
		for i, c := range calls {
			if c.full != (i > 0) {
				t.Errorf("attempt %d: full comparison %v", i, c.full)
			}
		}
		st := w.proxy.Status()
		if st.Programmed || st.Reason != "ProgrammingFailed" || !strings.Contains(st.Message, "out of memory") || st.LastError == "" {
			t.Errorf("status %+v", st)
		}
		if n := len(w.events("FailedToProgramServices")); n != 1 {
			t.Errorf("%d events for one row of failures", n)
		}
		// A further change does not wait for ten seconds behind a failing one.
		at := time.Now()
		w.setService(service("b", 2))
		w.settle(1100 * time.Millisecond)
		if calls := w.plane.log(); calls[len(calls)-1].at.Before(at) {
			t.Error("a change waits behind a failing one")
		}
		w.plane.set(func(p *fakeDataplane) { p.fail = nil })
		w.settle(11 * time.Second)
		if st := w.proxy.Status(); !st.Programmed || st.LastError != "" {
			t.Errorf("status after the failure is over: %+v", st)
		}
		if got := strings.Count(w.dump(), "\n"); got != 2 {
			t.Errorf("%d services in the kernel, want 2", got)
		}
	})
}

func TestAuditRepairsAndSaysSo(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		w.setService(service("a", 1))
		w.setService(service("b", 2))
		w.settle(time.Minute)
		if n := len(w.events("ServiceRulesRepaired")); n != 0 {
			t.Fatalf("%d events though nothing was removed", n)
		}
		w.plane.set(func(p *fakeDataplane) {
			for k := range p.kernel {
				if k.ID.Name.Name == "a" {
					delete(p.kernel, k)
				}
			}
		})
		w.settle(30 * time.Second)
		if !strings.Contains(w.dump(), "default/a ") {
			t.Error("not repaired within one audit period")
		}
		events := w.events("ServiceRulesRepaired")
		if len(events) != 1 || !strings.Contains(events[0].Message, "service port default/a IPv4") ||
			strings.Contains(events[0].Message, "default/b") ||
			events[0].Type != "Warning" || events[0].InvolvedObject.Kind != "Node" || events[0].InvolvedObject.Name != "here" {
			t.Errorf("events %+v", events)
		}
		if st := w.proxy.Status(); len(st.Repaired) != 1 || st.RepairedAt.IsZero() || st.LastAudit.IsZero() {
			t.Errorf("status %+v", st)
		}
	})
}

func TestProblemsBecomeEventsOnce(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		w.setService(service("a", 1))
		s := slice("a", 5)
		s.Endpoints[0].Addresses = []string{"127.0.0.1"} // behaviour 24
		w.setSlice(s)
		w.settle(time.Second)
		w.setService(service("b", 2))
		w.settle(time.Minute)
		events := w.events("InvalidEndpoint")
		if len(events) != 1 || events[0].Count != 1 || events[0].InvolvedObject.Name != "a" || events[0].InvolvedObject.UID != "uid-of-a" {
			t.Errorf("events %+v", events)
		}
		if p := w.proxy.Status().Problems; len(p) != 1 || p[0].Service != "default/a" {
			t.Errorf("problems %+v", p)
		}
		w.setSlice(slice("a", 5))
		w.settle(time.Second)
		if p := w.proxy.Status().Problems; len(p) != 0 {
			t.Errorf("problems that are gone: %+v", p)
		}
		w.setSlice(s)
		w.settle(time.Second)
		if events := w.events("InvalidEndpoint"); len(events) != 1 || events[0].Count != 2 {
			t.Errorf("the same problem again must count on the same event: %+v", events)
		}
	})
}

func TestMachineAddressesAreFollowed(t *testing.T) {
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	fail := false
	inBubble(t, func(o *Options) {
		o.Addresses = func() ([]netip.Addr, error) {
			if fail {
				return nil, errors.New("no netlink")
			}
			return addrs, nil
		}
	}, func(w *world) {
		w.settle(time.Second)
		addrs = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.7")}
		w.settle(5 * time.Second)
		fail = true
		w.settle(time.Minute)
		if got := w.plane.addrs; got != "[192.0.2.1 192.0.2.7]" {
			t.Errorf("node ports on %s", got)
		}
	})
}

// TestRandomHistoryWithFaults changes Services and slices at random while one
// Apply in ten fails half-way; the end must be that of a fresh start.
func TestRandomHistoryWithFaults(t *testing.T) {
	for seed := range uint64(5) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, nil, func(w *world) {
				w.plane.set(func(p *fakeDataplane) { p.fail = oneInTen(seed) })
				r := rand.New(rand.NewPCG(seed, 1))
				ctx := t.Context()
				for range 200 {
					name := fmt.Sprintf("s%d", r.IntN(12))
					switch r.IntN(8) {
					case 0, 1:
						w.setService(service(name, r.IntN(12)))
					case 2:
						_ = w.client.CoreV1().Services("default").Delete(ctx, name, metav1.DeleteOptions{})
					case 3:
						_ = w.client.DiscoveryV1().EndpointSlices("default").Delete(ctx, name+"-a", metav1.DeleteOptions{})
					default:
						w.setSlice(slice(name, r.Perm(20)[:r.IntN(5)]...))
					}
					if r.IntN(3) == 0 {
						time.Sleep(time.Duration(r.IntN(40)) * time.Millisecond) // in the bubble
					}
				}
				w.plane.set(func(p *fakeDataplane) { p.fail = nil })
				w.settle(time.Minute)
				if got, want := w.dump(), w.fresh(); got != want {
					t.Errorf("kernel:\n%s\nwant:\n%s", got, want)
				}
				if got := w.proxy.Table().String(); !strings.HasSuffix(got, w.dump()) {
					t.Errorf("Table:\n%s\nkernel:\n%s", got, w.dump())
				}
				st, want := w.proxy.Status(), newStatus("", "")
				fresh, keys := w.freshBuilder().Build()
				want.built(nil, fresh, keys)
				if st.ServicePorts != want.s.ServicePorts || st.Frontends != want.s.Frontends || st.Endpoints != want.s.Endpoints {
					t.Errorf("status counts %+v, want %+v", st, want.s)
				}
			})
		})
	}
}

func (w *world) freshBuilder() *table.Builder {
	b := table.NewBuilder(table.Config{NodeName: "here"})
	services, _ := w.client.CoreV1().Services("").List(w.t.Context(), metav1.ListOptions{})
	for i := range services.Items {
		b.SetService(&services.Items[i])
	}
	all, _ := w.client.DiscoveryV1().EndpointSlices("").List(w.t.Context(), metav1.ListOptions{})
	for i := range all.Items {
		b.SetSlice(&all.Items[i])
	}
	return b
}

func (w *world) fresh() string {
	tab, _ := w.freshBuilder().Build()
	return tab.String()
}

// A Proxy alone writes no Node, whose registration is left to others.
func TestProxyWritesNoNode(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		w.settle(time.Minute)
		for _, a := range w.client.Actions() {
			if r := a.GetResource().Resource; a.GetVerb() != "list" && a.GetVerb() != "watch" {
				t.Errorf("%s %s", a.GetVerb(), r)
			}
		}
		synctest.Wait()
	})
}
