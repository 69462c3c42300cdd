package ipvs

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/fairlead/fairlead/internal/testbed/questions"
)

// From row to row only what differs is changed, as in the life of a node:
// TestRandomWalk shows that a full comparison leads to the same.
func TestFlows(t *testing.T) {
	flows.Run(t, mode, func(t testing.TB, h *testbed.Host) dataplane.Applier {
		return &byChanges{Mode: create("")(t, h).(*Mode)}
	})
}

// byChanges tells an Applier what differs from the Table before. The connections of
// the row before, which clients have closed, have ended by then: a Service with
// open ones would leave its address behind.
type byChanges struct {
	*Mode
	last *table.Table
}

func (b *byChanges) Apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	for b.last != nil && b.open() && ctx.Err() == nil {
		<-time.After(time.Millisecond)
	}
	if b.last != nil && changed == nil {
		changed = flows.Changes(b.last, t)
	}
	err := b.Mode.Apply(ctx, t, changed)
	if b.last = t; err != nil {
		b.last = nil
	}
	return err
}

// open reports whether there are open connections through servers that would stay
// for them.
func (b *byChanges) open() bool {
	open := false
	for _, f := range b.targets {
		for key, v := range f.stored.servers {
			if drains(v.Scheduler, v.proto) {
				_ = b.kernel.servers.Dests(key, func(d ipvs.Dest) { open = open || d.Active > 0 })
			}
		}
	}
	return open
}

// The mode does not know where a client is kept.
func TestExplanations(t *testing.T) { questions.Run(t, mode, create(""), explain.AffinityDead) }

// Affinity lasts as long as any flow of a client is known, so for the story of its
// end UDP flows are forgotten soon. With them goes what connection tracking
// knows, which other stories ask for.
func TestStories(t *testing.T) {
	flows.Stories(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		cfg := Config{Variant: legacy}
		if strings.Contains(t.Name(), "affinity_ends_with_its_time") {
			cfg.Timeouts.UDP = time.Second
		}
		p, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}, flows.Balanced)
}

func TestLostPacketsAreCounted(t *testing.T) { flows.Counts(t, create(""), flows.Balanced) }
