package ipvs

import (
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

func TestFlows(t *testing.T) { flows.Run(t, mode, create("")) }

func TestStories(t *testing.T) { flows.Stories(t, create("")) }

// The mode works on this kernel, says so by itself, and leaves nothing behind.
func TestProbe(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		if err := Probe(t.Context(), Config{Variant: legacy}); err != nil {
			t.Error(err)
		}
	})
}
