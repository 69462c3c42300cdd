package iptables

import (
	"flag"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) { testbed.Main(m) }

// inside makes an empty network namespace and runs f there, with an Applier.
func inside(t testing.TB, cfg Config, f func(p *Mode)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		p, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		f(p)
	})
}

// toolFor makes the tool of a variant.
func toolFor(v Variant, f svc.Family) (tool, error) {
	if v == Legacy {
		return iptables.New(iptables.Legacy, f)
	}
	return iptables.New(iptables.NFT, f)
}
