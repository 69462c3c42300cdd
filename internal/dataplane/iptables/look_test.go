package iptables

import (
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What is read back of single frontends is what the Table has, in every state.
func TestLook(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		for _, cfg := range []Config{{Variant: v}, {Variant: v, Balance: dataplane.RoundRobin}} {
			flows.Looks(t, flows.States(10), empty(cfg))
		}
	})
}
