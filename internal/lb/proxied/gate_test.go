package proxied

import (
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// A connection of TCP that nothing is done with has no goroutine here.
func TestRelayedWithoutGoroutines(t *testing.T) {
	r := newRig(t, nil)
	pods := r.Listener() // accepts nothing: the kernel does
	defer pods.Close()
	r.set(netip.MustParseAddrPort(pods.Addr().String()))
	before := runtime.NumGoroutine()
	const conns = 200
	for range conns {
		r.Dial()
	}
	for deadline := time.Now().Add(lbtest.Patience); r.connections() < conns; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections are open, want %d", r.connections(), conns)
		}
	}
	if n := runtime.NumGoroutine() - before; n > conns/4 {
		t.Errorf("%d more goroutines with %d connections", n, conns)
	}
}

func (r *rig) connections() int {
	r.server.admission.mu.Lock()
	defer r.server.admission.mu.Unlock()
	return len(r.server.admission.open)
}

// A listener passes from the relay to goroutines and back, as its settings change, and no connection fails.
func TestCarrierChangesUnderLoad(t *testing.T) {
	r := newRig(t, nil)
	pod := r.Pod(lbtest.Named("pod"))
	r.set(pod)
	long := r.Dial()
	if _, err := lbtest.Say(long, "hello"); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var served atomic.Int64
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := net.Dial("tcp", r.At.String())
				if err != nil {
					t.Error(err)
					return
				}
				_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
				if got, err := lbtest.Say(c, "x"); got != "pod x\n" || err != nil {
					t.Errorf("%q, %v", got, err)
				}
				_ = c.Close()
				served.Add(1)
			}
		})
	}
	for i := range 40 {
		r.service.Spec.BandwidthMbps = (i + 1) % 2 * 1000
		r.set(pod)
		l := r.server.listeners[r.At]
		if (l.relay != nil) != (i%2 == 1) || (l.socket != nil) != (i%2 == 0) {
			t.Errorf("with %d Mbit/s: %+v", r.service.Spec.BandwidthMbps, l)
		}
		for before, deadline := served.Load(), time.Now().Add(lbtest.Patience); served.Load() <= before; runtime.Gosched() {
			if t.Failed() || time.Now().After(deadline) {
				t.Fatalf("no connection is served with %d Mbit/s", r.service.Spec.BandwidthMbps)
			}
		}
	}
	close(stop)
	wg.Wait()
	if got, err := lbtest.Say(long, "still"); err != nil || !strings.HasSuffix(got, "still\n") {
		t.Errorf("the connection from before: %q, %v", got, err)
	}
}
