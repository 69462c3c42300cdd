package proxy

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// toBeDeletedTaint is the taint of a node that the cluster autoscaler is about to
// delete: load balancers shall leave it although its proxy is healthy.
const toBeDeletedTaint = "ToBeDeletedByClusterAutoscaler"

// proxyHealth answers /healthz and /livez as kube-proxy does: the proxy is healthy
// unless a change waits for longer than the timeout to be programmed. /healthz
// also fails while the node is about to be deleted.
type proxyHealth struct {
	timeout time.Duration

	mu       sync.Mutex
	waiting  time.Time // since when the oldest change waits, zero if none
	last     time.Time // when everything was last programmed
	eligible bool
}

func (h *proxyHealth) queued(since time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waiting.IsZero() {
		h.waiting = since
	}
}

func (h *proxyHealth) updated(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting, h.last = time.Time{}, now
}

func (h *proxyHealth) setNode(n *corev1.Node) {
	eligible := n == nil || n.DeletionTimestamp.IsZero()
	if n != nil {
		for _, t := range n.Spec.Taints {
			eligible = eligible && t.Key != toBeDeletedTaint
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.eligible = eligible
}

func (h *proxyHealth) state(now time.Time) (healthy, eligible bool, last time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.waiting.IsZero() || now.Sub(h.waiting) < h.timeout, h.eligible, h.last
}

func (h *proxyHealth) healthy() bool {
	ok, _, _ := h.state(time.Now())
	return ok
}

// serveHealthz and serveLivez have kube-proxy's codes and bodies, which cloud load
// balancers and scripts read.
func (p *Proxy) serveHealthz(w http.ResponseWriter, _ *http.Request) {
	now := time.Now()
	healthy, eligible, last := p.health.state(now)
	code, last := healthCode(healthy && eligible, now, last)
	p.metrics.healthz.WithLabelValues(strconv.Itoa(code)).Inc()
	writeHealth(w, code, fmt.Sprintf(`{"lastUpdated": %q,"currentTime": %q, "nodeEligible": %v}`, last, now, eligible))
}

func (p *Proxy) serveLivez(w http.ResponseWriter, _ *http.Request) {
	now := time.Now()
	healthy, _, last := p.health.state(now)
	code, last := healthCode(healthy, now, last)
	p.metrics.livez.WithLabelValues(strconv.Itoa(code)).Inc()
	writeHealth(w, code, fmt.Sprintf(`{"lastUpdated": %q,"currentTime": %q}`, last, now))
}

// healthCode returns the HTTP code and the time to show as last update, which is
// now while ok.
func healthCode(ok bool, now, last time.Time) (int, time.Time) {
	if ok {
		return http.StatusOK, now
	}
	return http.StatusServiceUnavailable, last
}

func writeHealth(w http.ResponseWriter, code int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(body))
}
