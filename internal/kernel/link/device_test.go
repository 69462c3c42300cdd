package link_test

import (
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

func TestHasDevice(t *testing.T) {
	for name, want := range map[string]bool{"lo": true, "kube-ipvs0": false} {
		if got, err := link.HasDevice(name); err != nil || got != want {
			t.Errorf("%s: %t, %v", name, got, err)
		}
	}
}
