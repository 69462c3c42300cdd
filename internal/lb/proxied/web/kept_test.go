package web

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
)

// Connections to Pods that wait for a request have one bound, whatever Services and Pods they are of: the oldest one goes.
func TestKeptConnectionsAreBounded(t *testing.T) {
	r := newSmallRig(t, map[string]string{lbProtocol: "http"}, 8)
	var pods []netip.AddrPort
	for range 10 {
		pods = append(pods, r.Web(func(http.ResponseWriter, *http.Request) {}))
	}
	client := r.Client()
	ask := func(to netip.AddrPort) {
		r.Helper()
		r.set(to)
		answer, err := client.Get("http://web/")
		r.Must(err)
		_ = answer.Body.Close()
	}
	r.set(pods[0])
	kept := &r.engine.kept
	state := func() (list []netip.AddrPort, count int) {
		kept.mu.Lock()
		defer kept.mu.Unlock()
		for u := kept.oldest; u != nil; u = u.newer {
			list = append(list, u.pod)
		}
		return list, kept.count
	}
	for i, pod := range pods {
		ask(pod)
		want := pods[max(0, i+1-4) : i+1]
		for deadline := time.Now().Add(lbtest.Patience); ; <-time.After(time.Millisecond) { // it is kept after the answer
			got, count := state()
			if len(got) == len(want) && count == len(want) && got[0] == want[0] && got[len(got)-1] == pod {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%v (%d) are kept, want %v", got, count, want)
			}
		}
	}
	ask(pods[7]) // one in the middle is used, and then the newest
	for deadline := time.Now().Add(lbtest.Patience); ; <-time.After(time.Millisecond) {
		if got, count := state(); count == 4 && got[3] == pods[7] && got[1] == pods[8] {
			break
		}
		if time.Now().After(deadline) {
			got, _ := state()
			t.Fatalf("%v", got)
		}
	}
	c := r.config
	transportOf(c).CloseIdleConnections()
	if got, count := state(); count != 0 || len(got) != 0 || len(transportOf(c).upstreams.pods) != 0 {
		t.Errorf("%v are kept by a transport that is closed", got)
	}
}

// written counts what is written to a connection.
type written struct {
	*net.TCPConn
	writes atomic.Int32
}

func (w *written) Write(p []byte) (int, error) {
	w.writes.Add(1)
	return w.TCPConn.Write(p)
}

// Connections by TLS are closed without a word: a Pod that reads nothing would hold the lock of all Services for 5 s with each.
func TestClosingWaitsForNoPod(t *testing.T) {
	r := newRig(t, nil)
	cert, _, _ := lbtest.Certificate(t, "pod")
	at := r.secureWeb(&tls.Config{Certificates: []tls.Certificate{cert}})
	for name, end := range map[string]func(*upstreams, *upstream){
		"in favor of others": func(p *upstreams, u *upstream) { p.most = func() int { return 0 }; p.put(u) },
		"with its transport": func(p *upstreams, u *upstream) { p.put(u); p.close() },
		"after a while": func(p *upstreams, u *upstream) {
			p.put(u)
			u.since = time.Now().Add(-2 * podIdle)
			p.all.sweep()
		},
		"by its session": func(_ *upstreams, u *upstream) { u.close() },
	} {
		raw, err := net.Dial("tcp", at.String())
		r.Must(err)
		below := &written{TCPConn: raw.(*net.TCPConn)}
		secure := tls.Client(below, pods.TLS{}.Config())
		r.Must(secure.HandshakeContext(t.Context()))
		before := below.writes.Load()
		end(&upstreams{all: &keptConns{}, most: func() int { return 1 }}, &upstream{wire: newWire(secure), pod: at})
		if n := below.writes.Load() - before; n != 0 {
			t.Errorf("closed %s: %d writes", name, n)
		}
		if err := raw.SetDeadline(time.Time{}); err == nil {
			t.Errorf("not closed %s", name)
		}
	}
}
