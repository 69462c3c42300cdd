package ipvs

import (
	"context"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/ipvs"
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

// UDP flows are forgotten soon, since affinity lasts as long as any of a client's.
func TestStories(t *testing.T) {
	flows.Stories(t, func(t testing.TB, _ *testbed.Host) plane.Plane {
		t.Helper()
		p, err := New(Config{Variant: legacy, ServiceCIDRs: serviceCIDRs, Timeouts: ipvs.Timeouts{UDP: time.Second}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}, flows.Lingering)
}
