package apiserver_test

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// as is the configuration of a client that acts for a user, with connections
// of its own.
func as(cfg *rest.Config, user string, groups ...string) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	return cfg
}

// A client that floods the server gets 429 with Retry-After, while others,
// probes and the heartbeats of nodes are answered.
func TestFlood(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t, func(o *apiserver.Options) { o.MaxRequests, o.MaxMutatingRequests = 40, 40 })
	ctx, cancel := context.WithTimeout(t.Context(), 4*waitTimeout)
	defer cancel()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "one"}}
	if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	flood := startFlood(ctx, t, as(cfg, "flooder"))
	defer flood.stop()
	refusedSince := func(before int64) bool {
		for begin := time.Now(); time.Since(begin) < waitTimeout; <-time.After(10 * time.Millisecond) {
			if flood.refused.Load() > before {
				return true
			}
		}
		return false
	}
	if !refusedSince(0) {
		t.Fatal("nothing of the flood was refused")
	}
	before := flood.refused.Load()
	get := func(who, user, path string, groups ...string) {
		t.Helper()
		client := kubernetes.NewForConfigOrDie(as(cfg, user, groups...)).RESTClient()
		for range 2 {
			step, cancel := context.WithTimeout(ctx, waitTimeout)
			begin := time.Now()
			var code int
			err := client.Get().AbsPath(path).MaxRetries(0).Do(step).StatusCode(&code).Error()
			cancel()
			if err != nil {
				t.Errorf("%s: %d, %v after %s", who, code, err, time.Since(begin))
			}
		}
	}
	get("another user", "calm", "/version")
	get("a probe", "prober", "/healthz")
	get("a node", "system:node:one", "/api", "system:nodes")
	leases := kubernetes.NewForConfigOrDie(as(cfg, "system:node:one", "system:nodes")).CoordinationV1().Leases("kube-node-lease")
	if _, err := leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "one"}}, metav1.CreateOptions{}); err != nil {
		t.Errorf("a node's lease: %v", err)
	}
	if !refusedSince(before) {
		t.Error("nothing of the flood was refused while the others were served")
	}
	if n := flood.ended.Load(); n > 0 {
		t.Errorf("%d streams of the flood had sent their share before the others were served", n)
	}
	flood.stop()
	if after := flood.wrong.Load(); after != nil {
		t.Errorf("429 with Retry-After %q", *after)
	}
}

type flood struct {
	refused atomic.Int64           // how many requests
	wrong   atomic.Pointer[string] // the last Retry-After that is no number of seconds
	ended   atomic.Int64           // how many streams have sent their share
	stop    func()
}

// startFlood sends requests over many connections until it is stopped, or ctx
// ends, or each of them has sent its share.
func startFlood(ctx context.Context, t *testing.T, cfg *rest.Config) *flood {
	t.Helper()
	const connections, streams, each = 6, 75, 20_000
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	f := &flood{stop: func() { cancel(); wg.Wait() }}
	for range connections {
		tls, err := rest.TLSConfigFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		transport := &http.Transport{TLSClientConfig: tls, ForceAttemptHTTP2: true}
		auth, err := rest.HTTPWrappersForConfig(cfg, transport)
		if err != nil {
			t.Fatal(err)
		}
		for range streams {
			wg.Go(func() {
				for range each {
					r, err := http.NewRequestWithContext(ctx, http.MethodGet, cfg.Host+"/openapi/v3", nil)
					if err != nil {
						return
					}
					resp, err := auth.RoundTrip(r)
					if err != nil {
						if ctx.Err() != nil {
							return
						}
						continue
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					if resp.StatusCode == http.StatusTooManyRequests {
						f.refused.Add(1)
						after := resp.Header.Get("Retry-After")
						if n, err := strconv.Atoi(after); err != nil || n < 1 {
							f.wrong.Store(&after)
						}
					}
				}
				f.ended.Add(1)
			})
		}
		t.Cleanup(transport.CloseIdleConnections)
	}
	return f
}
