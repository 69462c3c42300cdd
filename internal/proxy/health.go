package proxy

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// toBeDeletedTaint is the taint of a node that the cluster autoscaler is about to
// delete: load balancers shall leave it although its proxy is healthy.
const toBeDeletedTaint = "ToBeDeletedByClusterAutoscaler"

// proxyHealth answers /healthz and /livez. As in kube-proxy, the proxy is alive
// unless a change waits for longer than the timeout to be programmed.
//
// /healthz also fails until everything has been programmed once, while the rules
// in the kernel are known to have been changed by another program, and while
// there is no Node, or it is about to be deleted: a load balancer that asks sends
// its clients elsewhere. A service port that the mode rejects does not count,
// since otherwise the author of one Service could take every node out of every
// load balancer.
type proxyHealth struct {
	timeout time.Duration

	mu       sync.Mutex
	waiting  time.Time // since when the oldest change waits, zero if none
	last     time.Time // when everything was last programmed, zero before the first time
	tampered bool      // the rules were changed from outside and are not repaired yet
	eligible bool
	missing  bool // the API was asked and has no Node
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

// setTampered records that another program has changed the rules, or that they
// have been repaired.
func (h *proxyHealth) setTampered(tampered bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tampered = tampered
}

// setNode records the Node, nil if there is none.
func (h *proxyHealth) setNode(n *corev1.Node) {
	eligible := n != nil && n.DeletionTimestamp.IsZero()
	if n != nil {
		for _, t := range n.Spec.Taints {
			eligible = eligible && t.Key != toBeDeletedTaint
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.eligible, h.missing = eligible, n == nil
}

// healthState is what proxyHealth knows at a moment.
type healthState struct {
	alive    bool // no change waits for too long
	serving  bool // alive, and the kernel has what the API says as far as known
	eligible bool
	last     time.Time
	missing  bool
}

// noNodeMessage says what a proxy without its Node does not do, and why.
func noNodeMessage(name string) string {
	return "the API has no Node " + name + ", so Services with the policy Local drop connections here: give the name of this machine's Node " +
		"with --node-name"
}

func (h *proxyHealth) state(now time.Time) healthState {
	h.mu.Lock()
	defer h.mu.Unlock()
	alive := h.waiting.IsZero() || now.Sub(h.waiting) < h.timeout
	return healthState{alive, alive && !h.tampered && !h.last.IsZero(), h.eligible, h.last, h.missing}
}

// serving reports whether the kernel answers for Services, for health check node
// ports.
func (h *proxyHealth) serving() bool { return h.state(time.Now()).serving }

// healthBody is the body of /healthz and /livez as kube-proxy v1.37 has it, which
// cloud load balancers and scripts read.
type healthBody struct {
	LastUpdated  time.Time `json:"lastUpdated"`
	CurrentTime  time.Time `json:"currentTime"`
	NodeEligible *bool     `json:"nodeEligible,omitempty"`
	Healthy      bool      `json:"healthy"`
	// Message, which kube-proxy does not have, is what is wrong with the Node.
	Message string                           `json:"message,omitempty"`
	Status  map[corev1.IPFamily]familyHealth `json:"status,omitempty"`
}

// familyHealth is the health of one address family. Both are programmed together.
type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

func (p *Proxy) serveHealthz(w http.ResponseWriter, _ *http.Request) {
	now := time.Now()
	s := p.health.state(now)
	body := healthBody{LastUpdated: s.last, NodeEligible: &s.eligible, Healthy: s.serving}
	if s.missing {
		body.Message = noNodeMessage(p.opts.NodeName)
	}
	code := writeProxyHealth(w, s.serving && s.eligible, now, body)
	p.metrics.healthz.WithLabelValues(strconv.Itoa(code)).Inc()
}

func (p *Proxy) serveLivez(w http.ResponseWriter, _ *http.Request) {
	now := time.Now()
	s := p.health.state(now)
	code := writeProxyHealth(w, s.alive, now, healthBody{LastUpdated: s.last, Healthy: s.alive})
	p.metrics.livez.WithLabelValues(strconv.Itoa(code)).Inc()
}

// writeProxyHealth completes and writes body and returns the HTTP code. The time of
// the last update is now while ok.
func writeProxyHealth(w http.ResponseWriter, ok bool, now time.Time, body healthBody) int {
	if !body.LastUpdated.IsZero() {
		f := familyHealth{body.LastUpdated, body.Healthy}
		body.Status = map[corev1.IPFamily]familyHealth{corev1.IPv4Protocol: f, corev1.IPv6Protocol: f}
	}
	code := http.StatusServiceUnavailable
	if body.CurrentTime = now; ok {
		code, body.LastUpdated = http.StatusOK, now
	}
	text, _ := json.Marshal(&body) // only of times and booleans
	writeHealth(w, code, string(text))
	return code
}

func writeHealth(w http.ResponseWriter, code int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(body))
}
