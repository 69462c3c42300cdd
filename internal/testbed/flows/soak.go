package flows

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/table"
)

// SoakEnv is the environment variable that says how long Soak takes, for
// example 10m. Give the test a -timeout to match.
const SoakEnv = "FAIRLEAD_SOAK"

const (
	soakTime = time.Minute
	// soakPause is between two changes, soakAskPause between two questions of a
	// client: several modes at once must leave something of the machine to other
	// tests. (ChurnUnderLoad changes as fast as it goes.)
	soakPause    = 100 * time.Millisecond
	soakAskPause = 25 * time.Millisecond
)

// Soak asks a stable Service over and over while all others change, processes
// follow one another, and everything is compared in between. It fails for every
// question without an answer, and if in the end the kernel does not have what
// the last Table says.
func Soak(t *testing.T, create Factory) {
	total := soakTime
	if text := os.Getenv(SoakEnv); text != "" {
		var err error
		if total, err = time.ParseDuration(text); err != nil {
			t.Fatalf("$%s: %v", SoakEnv, err)
		}
	}
	e := NewEnv(t, create)
	var web *table.ServicePort
	for p := range e.Stable().All() {
		web = p
	}
	var tabs []*table.Table
	for _, s := range States(0) {
		next := table.New(append(slices.Collect(s.All()), web)...)
		next.NodePortAddrs, next.MasqueradeAll = s.NodePortAddrs, s.MasqueradeAll
		next.ClusterCIDRs, next.LocalCIDRs = s.ClusterCIDRs, s.LocalCIDRs
		tabs = append(tabs, next)
	}
	at, steps := tabs[0], 0
	e.Apply(t, at, nil)
	r := rand.New(rand.NewPCG(5, 6))
	full, restarts := 0, 0
	e.underLoad(t, total+time.Minute, soakAskPause, func() {
		for end := time.Now().Add(total); time.Now().Before(end) && !t.Failed(); steps++ {
			next := tabs[r.IntN(len(tabs))]
			how := Changes(at, next)
			switch r.IntN(20) {
			case 0:
				how = nil
				full++
			case 1:
				restarts++
				if err := e.Dataplane.Close(); err != nil {
					t.Error(err)
				}
				e.Node.Do(func() { e.Dataplane = create(t, e.Node) })
			}
			e.Apply(t, next, how)
			at = next
			wait(t, soakPause)
		}
	})
	t.Logf("%d Tables, %d of them compared in full, %d processes", steps, full, restarts+1)
	e.Apply(t, at, []table.Key{})
	e.Apply(t, at, nil)
	if r, ok := e.Dataplane.(repairer); ok && len(r.Repaired()) > 0 {
		t.Errorf("the last full comparison found %q", r.Repaired())
	}
}
