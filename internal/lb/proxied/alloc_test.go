package proxied

import (
	"testing"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// What is carried on a connection that is kept allocates nothing.
func TestKeptConnectionsAllocateNothing(t *testing.T) {
	r := newRig(t, nil)
	r.set(r.Pod(lbtest.AnswerAll))
	if n := r.AllocsPerRequest(); n > 0 {
		t.Errorf("%.1f allocations for a request", n)
	}
}
