package uml

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/trace"
	packet "github.com/fairlead/fairlead/internal/trace/follow"
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
		// It has no families ip and ip6 either.
		s, err := link.NewSources(func() {})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		for name, err := range map[string]error{
			"source addresses of Pods": s.Add("fltest", []netip.Addr{netip.MustParseAddr("10.244.1.2")}), "the probe of these": link.ProbeSources(),
		} {
			var lacking *nftables.UnsupportedError
			if !errors.As(err, &lacking) || !strings.Contains(err.Error(), "CONFIG_NF_TABLES_IPV4") {
				t.Errorf("%s: %v; want that the kernel lacks family ip", name, err)
			}
		}
		if err := link.RemoveSources(); err != nil {
			t.Error(err)
		}
		if err := nodelocal.Remove(); err != nil {
			t.Error(err)
		}
	})
}

// Where the kernel cannot trace, a packet is sent all the same, and the answer says what is missing.
func TestTraceWithoutTables(t *testing.T) {
	node := testbed.NewNetwork(t).Host("node")
	endpoint := node.Pod("endpoint")
	endpoint.Serve(svc.TCP, 80)
	for port, want := range map[uint16]trace.Answer{80: trace.Accepted, 81: trace.Reset} {
		seen, err := packet.Send(t.Context(), &packet.Packet{
			Spaces: []packet.Space{{Name: "node", Path: node.NSPath()}}, Protocol: svc.TCP, To: netip.AddrPortFrom(endpoint.Addr4(), port),
		})
		if err != nil || seen.Answer != want || !strings.Contains(seen.Untraced, "the kernel cannot trace") || len(seen.Steps) > 0 {
			t.Errorf("port %d: %v, %+v", port, err, seen)
		}
	}
}
