package controller

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// A leader that the API no longer recognizes makes /readyz fail, also when it has lost
// its Lease by that, until it is recognized again; one that waits for the Lease never.
func TestHealthOfTheLeader(t *testing.T) {
	t.Parallel()
	leader, other := &Health{Timeout: 3 * time.Second}, &Health{Timeout: 3 * time.Second}
	s := apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.ReadyzChecks = []apiserver.ReadyzCheck{{Name: "leader", Check: leader.Check}, {Name: "other", Check: other.Check}}
	})
	client := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	readyz := func(want string) {
		t.Helper()
		var got string
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-time.After(50 * time.Millisecond) {
			text, err := client.RESTClient().Get().AbsPath("/readyz").DoRaw(t.Context())
			if got = string(text); (err == nil) == (want == "ok") && strings.Contains(got, want) {
				return
			}
		}
		t.Fatalf("/readyz is %q, want %q", got, want)
	}
	var unknown atomic.Bool
	started := make(chan struct{}, 10)
	run := func(h *Health, identity string, started func()) {
		config := s.LoopbackConfig()
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return impostor{next, &unknown} })
		o := Options{Config: config, Controllers: []string{NodeIPAMName}, LeaderElect: true, LeaseName: "health",
			Identity: identity, Health: h, Started: started}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- Run(ctx, o) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	run(leader, "leader", func() { started <- struct{}{} })
	<-started
	run(other, "other", func() {})
	readyz("ok")

	unknown.Store(true)
	readyz("[-]leader failed")
	if err := leader.Check(); !strings.Contains(fmt.Sprint(err), "401") {
		t.Errorf("the leader: %v", err)
	}
	if err := other.Check(); err != nil {
		t.Errorf("the one that waits: %v", err)
	}
	unknown.Store(false)
	readyz("ok")
}

// impostor presents a token of no user while unknown is set.
type impostor struct {
	next    http.RoundTripper
	unknown *atomic.Bool
}

func (i impostor) RoundTrip(r *http.Request) (*http.Response, error) {
	if i.unknown.Load() {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer of-an-impostor")
	}
	return i.next.RoundTrip(r)
}
