package uml

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/testbed"
)

// The guest's kernel has nf_tables without family inet. What needs it is told so, by the probes as
// by the attempt.
func TestKernelWithoutInetTables(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		m, err := link.NewMasquerade(func() {})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = m.Close() }()
		pods := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
		dns := nodelocal.Config{Addrs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, Port: 53}
		for name, err := range map[string]error{
			"masquerading": m.Set(pods, pods), "its probe": link.ProbeMasquerade(),
			"node-local DNS": nodelocal.Install(dns), "the probe of that": nodelocal.Probe(),
		} {
			var lacking *nftables.UnsupportedError
			if !errors.As(err, &lacking) || !strings.Contains(err.Error(), "CONFIG_NF_TABLES_INET") {
				t.Errorf("%s: %v; want that the kernel lacks family inet", name, err)
			}
		}
		// The source addresses of Pods are checked by tables of both families instead.
		s, err := link.NewSources(func() {})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		if err := errors.Join(link.ProbeSources(), s.Add("fltest", []netip.Addr{netip.MustParseAddr("10.244.1.2")})); err != nil {
			t.Error(err)
		}
		if repaired, err := s.Repair(); repaired || err != nil {
			t.Errorf("the sources of Pods: repaired %v, %v", repaired, err)
		}
		if err := link.RemoveSources(); err != nil {
			t.Error(err)
		}
		if err := nodelocal.Remove(); err != nil {
			t.Error(err)
		}
	})
}
