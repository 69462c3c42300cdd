package uml

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A dummy device that another program made is left alone, our own one is removed.
func TestDummy(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		for range 2 {
			if err := link.EnsureDummy("virtual", "ours"); err != nil {
				t.Fatal(err)
			}
		}
		if err := link.EnsureDummy("virtual", "another's"); err == nil || !strings.Contains(err.Error(), "in the way") {
			t.Errorf("EnsureDummy = %v, want that a device is in the way", err)
		}
		if err := link.RemoveDevice("virtual", "another's"); err != nil {
			t.Error(err)
		}
		if err := link.EnsureDummy("virtual", "ours"); err != nil {
			t.Errorf("it is gone, or not ours any more: %v", err)
		}
		for range 2 {
			if err := link.RemoveDevice("virtual", "ours"); err != nil {
				t.Error(err)
			}
		}
	})
}
