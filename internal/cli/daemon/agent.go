// Package daemon has the commands that run until they are stopped: up, server, agent, proxy,
// dns, controllers and lb.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/offline"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/servers"
)

type agentCommand struct {
	*base.Global
	agent   node.Flags
	joining node.Joining
	dataDir string
}

// NewAgent returns 'fairlead agent'.
func NewAgent(g *base.Global) *cobra.Command {
	a := &agentCommand{Global: g}
	f := &a.agent
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Make this machine a node: proxy, DNS and Pods",
		Long: `Make this machine a node of a server: it brings connections to Services to their
endpoints, answers DNS, and runs Pods as processes. What it wrote to the kernel and
the Pods it started stay when it stops, and are found again when it starts;
'fairlead cleanup' removes them.`,
		Example: `  fairlead agent --server https://192.0.2.10:6443 --token-file /root/node-token
  fairlead agent --kubeconfig /etc/fairlead/node.kubeconfig --node-ip 192.0.2.11`,
		Args: base.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if err := a.joining.Check(); err != nil {
				return err
			}
			return f.Check()
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return a.run(cmd) },
	}
	f.Add(cmd)
	f.Networks = node.DefaultNetworks()
	const same = "; taken from the server, which rejects others (the default is for a server that does not publish them)"
	f.Networks.AddNetworks(cmd, "ranges of ClusterIPs"+same, "ranges of the Pods' addresses"+same)
	a.joining.Add(cmd)
	cmd.Flags().StringVar(&a.dataDir, "data-dir", base.DefaultDataDir(), "directory for the state of this node")
	return cmd
}

// run makes this machine a node until the command's context ends.
func (a *agentCommand) run(cmd *cobra.Command) error {
	ctx, f := cmd.Context(), &a.agent
	log, err := a.Logger()
	if err != nil {
		return err
	}
	if err := a.checkMachine(log); err != nil {
		return err
	}
	setup := node.Setup{Log: log, StateDir: base.NodeState(a.dataDir), Early: true}
	if err := node.MakeState(setup.StateDir); err != nil { // before anything is written
		return err
	}
	cfg, identity, err := a.joining.Identity(ctx, log, f.Host.Name, setup.StateDir)
	if err != nil {
		return err
	}
	setup.Config = cfg
	stop, err := a.balance(ctx, &setup, identity)
	if err != nil {
		return err
	}
	defer stop()
	defer lifecycle.Beside(ctx, func(ctx context.Context) { parts.WarnOfInlineCertificate(ctx, log, cfg) })()
	if len(f.Host.IPs) == 0 {
		if f.Host.IPs, err = parts.MachineAddresses(parts.ServerAddrs(cfg, log)); err != nil {
			return err
		}
	}
	unlock, err := lockNode(ctx, log, f)
	if err != nil {
		return err
	}
	defer unlock()
	adoption := node.Adoption{Log: log, Config: cfg, StateDir: setup.StateDir, Given: cmd.Flags().Changed}
	if err := f.Adopt(ctx, adoption); err != nil {
		return err
	}
	machine := f.Machine(setup.StateDir, false)
	var warning sync.WaitGroup
	defer warning.Wait()
	warning.Go(func() { node.WarnOfMachine(ctx, log, machine, node.MachineTimeout) })
	if identity != nil {
		setup.CertChanged, setup.CertReplacing = identity.Changed(), identity.Replacing
	}
	spans, last, err := f.Spans.Open(log, "agent", f.Host.Name)
	if err != nil {
		return err
	}
	setup.Traces = spans
	n, err := f.Open(ctx, setup)
	if err != nil {
		return err
	}
	if err := f.WriteRecord(setup.StateDir, base.First(a.joining.Servers), a.joining.Kubeconfig); err != nil {
		return fmt.Errorf("the node's state directory: %w", err)
	}
	if identity != nil {
		n.Components = append(n.Components, lifecycle.Component{Name: "certificate", Run: identity.Run})
	}
	return lifecycle.RunAll(ctx, log, func() {
		fmt.Fprintf(a.Out, "node %s at %s is up; DNS answers on %s\n", f.Host.Name, base.ListOf(f.Host.IPs), n.DNSAddresses())
	}, append(last, n.Components...)...)
}

// checkMachine rejects a machine or a user that cannot run an agent with these flags.
func (a *agentCommand) checkMachine(log *slog.Logger) error {
	if os.Geteuid() != 0 {
		return errors.New("an agent changes this machine's network and needs root: run it with sudo, " +
			"or try 'fairlead up', which makes its own namespace")
	}
	if err := parts.CheckResolver(a.agent.DNS.ConfigureResolver); err != nil {
		return err
	}
	if len(a.agent.LB.Pools) > 0 {
		log.Warn("--lb-pool has no effect on a node: the server gives out addresses; give it --lb-pool, or make an IPAddressPool")
	}
	return nil
}

// lockNode takes the locks of the rules that a node writes.
func lockNode(ctx context.Context, log *slog.Logger, f *node.Flags) (unlock func(), err error) {
	proxyHeld, err := parts.ProxyLock.Wait(ctx, log)
	if err != nil {
		return nil, err
	}
	dnsHeld, err := f.LockDNS(ctx, log)
	if err != nil {
		proxyHeld.Close()
		return nil, err
	}
	return func() { dnsHeld.Close(); proxyHeld.Close() }, nil
}

// balance makes the clients of setup.Config, and the clients that renew the certificate, use whichever server
// answers, until stop is called. Clients of setup.Config use the last known state while no server answers.
func (a *agentCommand) balance(ctx context.Context, setup *node.Setup, identity *join.Node) (stop func(), err error) {
	if throughProxy(setup.Config) {
		return func() {}, nil // the proxy chooses the server
	}
	b, err := servers.New(servers.Options{
		Node: a.agent.Host.Name, Config: setup.Config, More: a.joining.Servers[min(1, len(a.joining.Servers)):],
		File: filepath.Join(a.dataDir, base.ServersRecord), Log: setup.Log,
	})
	if err != nil {
		return nil, err
	}
	if identity != nil {
		identity.Use(b.Use)
	}
	known, err := offline.Open(runner.KnownDir(setup.StateDir), setup.Log)
	if err != nil {
		return nil, err
	}
	b.Use(setup.Config)
	known.Use(setup.Config)
	setup.Balancer = b
	end := lifecycle.Beside(ctx, func(ctx context.Context) { _ = b.Run(ctx) })
	return func() { end(); known.Close() }, nil
}

// throughProxy reports whether the clients of cfg connect to a proxy, of HTTP or SOCKS.
func throughProxy(cfg *rest.Config) bool {
	server, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil || cfg.Proxy != nil {
		return cfg.Proxy != nil
	}
	at, err := http.ProxyFromEnvironment(&http.Request{URL: server})
	return err == nil && at != nil
}
