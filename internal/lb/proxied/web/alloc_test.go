package web

import (
	"testing"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// A request on a connection that is kept allocates next to nothing.
func TestKeptConnectionsAllocateLittle(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Pod(lbtest.AnswerAll))
	if n := r.AllocsPerRequest(); n > 3 {
		t.Errorf("%.1f allocations for a request, want at most 3", n)
	}
}
