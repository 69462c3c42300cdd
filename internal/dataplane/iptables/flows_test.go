package iptables

import (
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/fairlead/fairlead/internal/testbed/questions"
)

// create makes Planes of a variant.
func create(v Variant) flows.Factory {
	return func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := New(Config{Variant: v, DropInvalid: true})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
}

// variants runs a test for each of them, at the same time: they have nothing in
// common.
func variants(t *testing.T, f func(*testing.T, Variant)) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			f(t, v)
		})
	}
}

func TestFlows(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) { flows.Run(t, "iptables", create(v)) })
}

func TestStories(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) { flows.Stories(t, create(v)) })
}

// The mode does not know where a client is kept. Both variants are read in the same words, so one is asked.
func TestExplanations(t *testing.T) { questions.Run(t, "iptables", create(NFT), explain.AffinityDead) }

func TestLostPacketsAreCounted(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) { flows.Counts(t, create(v)) })
}
