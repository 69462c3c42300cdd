package ipvs

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/plane"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// From row to row only what differs is changed, as in the life of a node:
// TestRandomWalk shows that a full comparison leads to the same.
func TestFlows(t *testing.T) {
	flows.Run(t, mode, func(t testing.TB, h *testbed.Host) plane.Plane {
		return &byChanges{Plane: create("")(t, h)}
	})
}

// byChanges tells a Plane what differs from the Table before.
type byChanges struct {
	plane.Plane
	last *table.Table
}

func (b *byChanges) Apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	if b.last != nil && changed == nil {
		changed = flows.Changes(b.last, t)
	}
	err := b.Plane.Apply(ctx, t, changed)
	if b.last = t; err != nil {
		b.last = nil
	}
	return err
}

// Affinity lasts as long as any flow of a client is known, so for the story of its
// end UDP flows are forgotten soon. With them goes what connection tracking
// knows, which other stories ask for.
func TestStories(t *testing.T) {
	flows.Stories(t, func(t testing.TB, _ *testbed.Host) plane.Plane {
		t.Helper()
		cfg := Config{Variant: legacy, ServiceCIDRs: serviceCIDRs}
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
