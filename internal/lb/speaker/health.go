package speaker

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// health is what the node's proxy said last.
type health struct {
	mu     sync.Mutex
	ok     bool
	asked  bool
	reason string
}

func (h *health) get() (bool, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.asked {
		return false, "the node's proxy was not asked for its health yet"
	}
	return h.ok, h.reason
}

const (
	// healthPeriod is how often the proxy is asked, and how long it may take to answer.
	healthPeriod = time.Second
	// confirmAfter is how soon a proxy that was healthy is asked again, and confirmFor for how long it must answer that it is not,
	// until it counts as unhealthy. One that repairs its rules does so for some hundredths of a second, and on a busy machine for a second or
	// two; a node that withdraws its addresses for that breaks connections.
	confirmAfter = healthPeriod / 2
	confirmFor   = 3 * healthPeriod
)

// run asks until ctx ends.
func (h *health) run(ctx context.Context, ask func(context.Context) (bool, string), changed func()) {
	var doubt time.Time // since when a healthy proxy answers otherwise, zero if it does not
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, healthPeriod)
		ok, reason := ask(limited)
		cancel()
		now := time.Now()
		switch {
		case ok || !h.healthy():
			doubt = time.Time{}
		case doubt.IsZero():
			doubt = now
		case now.Sub(doubt) >= confirmFor:
			doubt = time.Time{}
		}
		wait := healthPeriod
		if !doubt.IsZero() {
			wait = confirmAfter
		} else if h.set(ok, reason) {
			changed()
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

func (h *health) healthy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked && h.ok
}

// set records an answer, and reports whether it differs from the one before.
func (h *health) set(ok bool, reason string) (different bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	different = !h.asked || h.ok != ok
	h.ok, h.reason, h.asked = ok, reason, true
	return different
}

var healthClient = &http.Client{Transport: &http.Transport{
	DisableKeepAlives: true, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
}}

// askHealthz asks the proxy of this machine, fairlead's or kube-proxy.
func askHealthz(ctx context.Context) (bool, string) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/healthz", svc.ProxyHealthPort), nil)
	if err != nil {
		return false, err.Error()
	}
	answer, err := healthClient.Do(r)
	if err != nil {
		return false, fmt.Sprintf("the node's proxy does not answer: %v", err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return false, "the node's proxy reports that it is not healthy: " + answer.Status
	}
	return true, ""
}
