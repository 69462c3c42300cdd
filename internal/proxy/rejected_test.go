package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// One Service that is rejected costs the others nothing: no full comparison, no
// waiting, and the node stays healthy.
func TestRejectedServiceDelaysNoOther(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		bad := table.Key{ID: svc.PortName{Name: svc.Name{Namespace: "default", Name: "bad"}}, Family: svc.IPv4}
		w.setService(service("a", 1))
		w.settle(time.Second)
		w.plane.set(func(p *fakeDataplane) { p.reject = map[table.Key]error{bad: errors.New("the kernel does not like it")} })
		w.setService(service("bad", 2))
		w.settle(time.Second)
		events := w.events("FailedToProgramService")
		if len(events) != 1 || events[0].InvolvedObject.Name != "bad" || !strings.Contains(events[0].Message, "does not like it") {
			t.Errorf("events %+v, want one about Service bad", events)
		}
		if st := w.proxy.Status(); st.Programmed || !strings.Contains(st.Message, "does not like it") || !w.proxy.health.serving() {
			t.Errorf("status %+v; the node itself is healthy", st)
		}
		first := len(w.plane.log())
		var late time.Duration
		for i := range 50 {
			at := time.Now()
			w.setService(service(fmt.Sprintf("s%d", i), 10+i))
			w.settle(10 * time.Millisecond)
			calls := w.plane.log()
			late = max(late, calls[len(calls)-1].at.Sub(at))
		}
		if st := w.proxy.Status(); st.Programmed || st.LastError == "" {
			t.Errorf("status %+v after others were programmed; one is still rejected", st)
		}
		if late > 5*time.Millisecond {
			t.Errorf("a change waited %s because of another Service", late)
		}
		tries := 0
		for _, c := range w.plane.log()[first:] {
			if c.full || c.changed > 2 {
				t.Errorf("an Apply of %d keys, full %v, because one Service is rejected", c.changed, c.full)
			}
			if c.err != nil {
				tries++
			}
		}
		if tries > 3 {
			t.Errorf("the rejected Service was tried %d times in half a second", tries)
		}
		if w.proxy.Table().Get(bad) != nil || w.proxy.Table().Len() != 51 {
			t.Error("Table differs from what is programmed")
		}
		// It is retried after a while, and at once when it changes.
		w.settle(time.Minute)
		calls := w.plane.log()
		if last := calls[len(calls)-1]; time.Since(last.at) > 20*time.Second {
			t.Errorf("the last try was %s ago", time.Since(last.at))
		}
		if n := len(w.events("FailedToProgramService")); n != 1 {
			t.Errorf("%d events for one rejection", n)
		}
		w.plane.set(func(p *fakeDataplane) { p.reject = nil })
		at := time.Now()
		changed := service("bad", 3)
		w.setService(changed)
		synctest.Wait()
		calls = w.plane.log()
		if !strings.Contains(w.dump(), "default/bad") || !calls[len(calls)-1].at.Equal(at) {
			t.Error("a change of the rejected Service waits")
		}
		w.settle(time.Minute)
		if st := w.proxy.Status(); !st.Programmed || w.proxy.Table().Len() != 52 {
			t.Errorf("status after the rejection ended: %+v", st)
		}
	})
}

func TestTakenNodePortsAreReported(t *testing.T) {
	asked := map[string]int{}
	inBubble(t, func(o *Options) {
		o.PortTaken = func(p svc.Protocol, at netip.AddrPort) bool {
			asked[fmt.Sprintf("%s %s", p, at)]++
			return at.Port() == 30080
		}
	}, func(w *world) {
		for i, port := range []int32{30080, 30081} {
			s := service(fmt.Sprintf("s%d", i), i)
			s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, port
			w.setService(s)
		}
		w.settle(time.Second)
		w.setSlice(slice("s0", 5)) // the port is not new any more
		w.settle(time.Minute)
		events := w.events("NodePortInUse")
		if len(events) != 1 || events[0].InvolvedObject.Name != "s0" || !strings.Contains(events[0].Message, "192.0.2.1:30080/TCP") {
			t.Errorf("events %+v, want one about s0", events)
		}
		if len(asked) != 2 || asked["TCP 192.0.2.1:30080"] != 1 {
			t.Errorf("asked %v, want each port once", asked)
		}
	})
}
