// Package ipv4 runs the modes of the proxy on a kernel without IPv6.
package ipv4

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/ipvs"
	kiptables "github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

func TestMain(m *testing.M) { uml.MainWith(m, []string{"ipv6.disable=1"}) }

// Modes iptables and ipvs work, program what is IPv4 of Services of both families, find
// nothing to repair, and clean up. (The guest's kernel has no nf_tables of family
// ip, which the others need.)
func TestModes(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/ipv6"); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("this kernel has IPv6 (%v): the test shows nothing", err)
	}
	tab := flows.EveryField()
	tab.NodePortAddrs = tab.NodePortAddrs[:1]
	for name, m := range map[string]struct {
		probe   func() error
		open    func() (dataplane.Applier, error)
		cleanup func(context.Context) error
	}{
		"iptables": {func() error { return nil }, func() (dataplane.Applier, error) {
			return iptables.New(iptables.Config{Variant: iptables.Legacy})
		}, iptables.Cleanup},
		"ipvs": {func() error { return ipvs.Probe(t.Context(), ipvs.Config{Variant: kiptables.Legacy}) }, func() (dataplane.Applier, error) {
			return ipvs.New(ipvs.Config{Variant: kiptables.Legacy})
		}, ipvs.Cleanup},
	} {
		t.Run(name, func(t *testing.T) {
			if err := m.probe(); err != nil {
				t.Fatal(err)
			}
			p, err := m.open()
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := p.Apply(t.Context(), tab, nil); err != nil {
					t.Fatal(err)
				}
				if r := p.(interface{ Repaired() []string }).Repaired(); len(r) > 0 {
					t.Errorf("repaired %q", r)
				}
			}
			text, err := p.Dump(t.Context())
			if err != nil || !strings.Contains(text, "10.96.0.10") && !strings.Contains(text, "0a60000a") {
				t.Errorf("%v, it has\n%s", err, text)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			if err := m.cleanup(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
