package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/preflight"
)

func newCheck(g *global) *cobra.Command {
	var f agentFlags
	var dataDir string
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Find what keeps this machine from being a node",
		Long: `Look at this machine before its agent starts for the first time: what the kernel has
for the modes of the proxy, for masquerading and node-local DNS, ports in use, forwarding,
rules of other programs (firewalld, ufw, docker, kube-proxy), the clock, addresses and
devices, control groups, the disk; with --encrypt WireGuard, its port and the size of
packets that is left. Each finding comes with what to do. It changes nothing, and is for
a machine on which no agent runs: an agent's own ports are in use. An agent logs such
warnings at its start.

The exit code is 1 if a node would not work here; warnings alone leave it 0. The flags
are those of 'fairlead agent', and what the section agent of the configuration file has
counts here, too.`,
		Example: `  fairlead check
  fairlead check --encrypt
  fairlead check --mode ipvs -o json`,
		Args: noArgs,
		PreRunE: func(*cobra.Command, []string) error {
			return errors.Join(output.check(), f.check())
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("looking at the kernel's rules needs root: run it with sudo")
			}
			f.stateDir = filepath.Join(dataDir, "agent")
			findings := f.machine(true).Check(cmd.Context())
			err := output.write(g.out, findings, func(w io.Writer) error { return printFindings(w, findings) })
			if err == nil && preflight.Failed(findings) {
				err = errors.New("this machine cannot be a node as it is: see the findings of level error")
			}
			return err
		},
	}
	f.add(cmd)
	f.networkFlags = defaultNetworks()
	f.addNetworks(cmd, "ranges of ClusterIPs", "ranges of the Pods' addresses")
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir(), "directory for the state of this node")
	output.add(cmd)
	return cmd
}

// machine is what preflight looks at for a node with these flags: before its first start
// also at what a start finds out by itself, the modes and the ports.
func (f *agentFlags) machine(first bool) preflight.Machine {
	m := preflight.Machine{Root: os.DirFS("/"), StateDir: f.stateDir}
	for _, r := range [][]netip.Prefix{f.serviceCIDRs, f.podCIDRs} {
		m.Ranges = append(m.Ranges, r...)
	}
	if !first {
		return m
	}
	if f.encrypt {
		m.Encryption = &preflight.Encryption{Port: f.wireguardPort, Addresses: f.nodeIPs}
		if len(f.nodeIPs) == 0 {
			// Without one there is a finding of its own.
			m.Encryption.Addresses, _ = machineAddresses(nil)
		}
	}
	setup := &modeSetup{flags: &f.proxyFlags, networks: f.networkFlags, log: slog.New(slog.DiscardHandler)}
	for _, mode := range candidateModes(f.mode) {
		m.Modes = append(m.Modes, preflight.Mode{Name: mode.name, Probe: func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, probeTimeout)
			defer cancel()
			return mode.probe(ctx, setup)
		}})
	}
	m.Features = f.features()
	addrs := []netip.Addr(f.nodeIPs)
	if len(addrs) == 0 {
		addrs = []netip.Addr{netip.IPv4Unspecified()}
	}
	for _, a := range addrs {
		m.Ports = append(m.Ports, preflight.Port{Network: "tcp", Address: netip.AddrPortFrom(a, f.agentPort), Flag: "--agent-port"})
		for _, network := range []string{"tcp", "udp"} {
			m.Ports = append(m.Ports, preflight.Port{Network: network, Address: netip.AddrPortFrom(a, f.dnsPort), Flag: "--dns-port"})
		}
	}
	for _, x := range []struct{ bind, flag string }{
		{f.healthz, "--healthz-bind-address"}, {f.metrics, "--metrics-bind-address"}, {f.dnsMetrics, "--dns-metrics-bind-address"},
	} {
		if at, err := netip.ParseAddrPort(x.bind); err == nil {
			m.Ports = append(m.Ports, preflight.Port{Network: "tcp", Address: at, Flag: x.flag})
		}
	}
	return m
}

// features are what a node does by nf_tables in each mode of the proxy.
func (f *agentFlags) features() []preflight.Feature {
	out := []preflight.Feature{{
		Name: "masquerading", Probe: link.ProbeMasquerade, Without: "Pods here get no answers from outside of the cluster",
		Remedy: "load nft_chain_nat and nft_masq, use a kernel with what is named, or have the routers outside lead to the Pods' ranges",
	}}
	if f.nodeLocalDNS {
		out = append(out, preflight.Feature{
			Name: "node-local DNS", Probe: nodelocal.Probe, Without: "questions to kube-dns go through the proxy, and are tracked",
			Remedy: "load nft_chain_nat, nft_nat, nft_ct and nft_numgen, use a kernel with what is named, or give --node-local-dns=false",
		})
	}
	return out
}

// machineTimeout bounds warnOfMachine: iptables may hang.
const machineTimeout = 30 * time.Second

// warnOfMachine logs what is wrong with the machine that a node runs on, within limit; nothing more
// when ctx ends.
func warnOfMachine(ctx context.Context, log *slog.Logger, m preflight.Machine, limit time.Duration) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, x := range m.Check(limited) {
		if x.Level != preflight.OK && ctx.Err() == nil {
			log.Warn("this machine may not do as a node: "+x.Message, "check", x.Check, "remedy", x.Remedy)
		}
	}
}

func printFindings(w io.Writer, findings []preflight.Finding) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, x := range findings {
		fmt.Fprintf(t, "%s\t%s\t%s\n", x.Level, x.Check, x.Message)
		if x.Remedy != "" {
			fmt.Fprintf(t, "\t\t%s\n", x.Remedy)
		}
	}
	return t.Flush()
}
