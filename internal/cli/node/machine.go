package node

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/preflight"
	"github.com/fairlead/fairlead/internal/svc"
)

// packets are what a node with these flags has to let pass. The node-local DNS server answers Pods at the address and port of the
// Service, the others at --dns-port, where the proxy sends what Pods ask.
func (f *Flags) packets() preflight.Packets {
	p := preflight.Packets{
		Ranges: slices.Concat(f.Networks.ServiceCIDRs, f.Networks.PodCIDRs), Pods: f.Networks.PodCIDRs, DNSPort: f.DNS.port,
	}
	if f.DNS.nodeLocal {
		p.DNSPort = svc.DNSPort
	}
	return p
}

// Machine returns what preflight checks for a node with these flags. Before the first start that includes the
// modes and the ports, which a start checks by itself.
func (f *Flags) Machine(stateDir string, first bool) preflight.Machine {
	p := f.packets()
	m := preflight.Machine{Root: os.DirFS("/"), StateDir: stateDir, Ranges: p.Ranges, Pods: p.Pods, DNSPort: p.DNSPort}
	if !first {
		return m
	}
	if f.Pods.network.encrypt != encryptOff {
		m.Encryption = &preflight.Encryption{Port: f.Pods.network.wireguardPort, Addresses: f.Host.IPs}
		if len(f.Host.IPs) == 0 {
			// Another check reports that there is none.
			m.Encryption.Addresses, _ = parts.MachineAddresses(nil)
		}
	}
	m.Modes = f.Proxy.Probes(f.Networks)
	m.Features = append(f.features(), f.Proxy.Features()...)
	addrs := []netip.Addr(f.Host.IPs)
	if len(addrs) == 0 {
		addrs = []netip.Addr{netip.IPv4Unspecified()}
	}
	for _, a := range addrs {
		m.Ports = append(m.Ports, preflight.Port{Network: "tcp", Address: netip.AddrPortFrom(a, f.Host.port), Flag: "--agent-port"})
		for _, network := range []string{"tcp", "udp"} {
			m.Ports = append(m.Ports, preflight.Port{Network: network, Address: netip.AddrPortFrom(a, f.DNS.port), Flag: "--dns-port"})
		}
	}
	for _, x := range []struct{ bind, flag string }{
		{f.Proxy.Healthz, "--healthz-bind-address"}, {f.Proxy.Metrics, "--metrics-bind-address"}, {f.DNS.metrics, "--dns-metrics-bind-address"},
	} {
		if at, err := netip.ParseAddrPort(x.bind); err == nil {
			m.Ports = append(m.Ports, preflight.Port{Network: "tcp", Address: at, Flag: x.flag})
		}
	}
	return m
}

// features are what a node does by nf_tables in each mode of the proxy.
func (f *Flags) features() []preflight.Feature {
	out := []preflight.Feature{{
		Name: "masquerading", Probe: link.ProbeMasquerade, Without: "Pods here get no answers from outside of the cluster",
		Remedy: "load nft_chain_nat and nft_masq, use a kernel that has them, or make the routers outside route to the Pods' ranges",
	}}
	out = append(out, preflight.Feature{
		Name: "source addresses of Pods", Probe: link.ProbeSources, Without: "Pods can send with source addresses that are not their own",
		Remedy: "use a kernel with nf_tables (CONFIG_NF_TABLES, CONFIG_NF_TABLES_IPV4 and CONFIG_NF_TABLES_IPV6)",
	})
	if f.DNS.nodeLocal {
		out = append(out, preflight.Feature{
			Name: "node-local DNS", Probe: nodelocal.Probe, Without: "questions to kube-dns go through the proxy, and are tracked",
			Remedy: "load nft_chain_nat, nft_nat, nft_ct and nft_numgen, use a kernel that has them, or give --node-local-dns=false",
		})
	}
	return out
}

// MachineTimeout bounds WarnOfMachine: iptables may hang.
const MachineTimeout = 30 * time.Second

// WarnOfMachine logs what is wrong with the machine that a node runs on, within limit; nothing more
// when ctx ends.
func WarnOfMachine(ctx context.Context, log *slog.Logger, m preflight.Machine, limit time.Duration) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, x := range m.Check(limited) {
		if x.Level != preflight.OK && ctx.Err() == nil {
			log.Warn("this machine may not work as a node: "+x.Message, "check", x.Check, "remedy", x.Remedy)
		}
	}
}
