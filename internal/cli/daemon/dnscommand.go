package daemon

import (
	"context"
	"log/slog"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/dns"
)

// dnsCommand is 'fairlead dns': a process with only a DNS server.
type dnsCommand struct {
	parts.DNSFlags
	client            base.ClientFlags
	networks          base.NetworkFlags
	nodeLocal         base.Addrs
	configureResolver bool
	metrics, corefile string
}

// NewDNS returns 'fairlead dns'.
func NewDNS(g *base.Global) *cobra.Command {
	c := dnsCommand{networks: node.DefaultNetworks()}
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "Run the cluster DNS on any Kubernetes API, in place of CoreDNS",
		Example: `  fairlead dns --kubeconfig /etc/kubernetes/dns.conf --listen 10.0.0.5:53
  fairlead dns --kubeconfig F --listen :53 --upstream 192.0.2.53 --cluster-domain cluster.local
  fairlead dns --kubeconfig F --node-local 10.96.0.10   # on every node, as NodeLocal DNSCache
  fairlead dns --kubeconfig F --corefile /etc/coredns/Corefile   # serves what CoreDNS's file asks for`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := g.Logger()
			if err != nil {
				return err
			}
			if c.corefile != "" {
				if err := checkCorefile(cmd); err != nil {
					return err
				}
				return c.runCorefile(cmd.Context(), log)
			}
			opts, err := c.serverOptions()
			if err != nil {
				return err
			}
			return c.run(cmd.Context(), log, opts)
		},
	}
	c.client.Add(cmd)
	cmd.Flags().StringVar(&c.corefile, "corefile", "",
		"CoreDNS's configuration file, which then decides everything but the API server (docs/dns.md, \"Corefile\")")
	c.Add(cmd)
	cmd.Flags().StringSliceVar(&c.Listen, "listen", []string{"127.0.0.1:53"}, "IP:PORT to answer on, UDP and TCP; may be repeated")
	cmd.Flags().Var(&c.nodeLocal, "node-local", "cluster IPs of kube-dns to answer for on this node itself, "+
		"on port 53, without connection tracking; needs root (default: none)")
	parts.AddConfigureResolver(cmd, &c.configureResolver)
	cmd.Flags().StringVar(&c.metrics, "metrics-bind-address", "127.0.0.1:9153", "IP:PORT of /metrics, /ready and /health; empty for none")
	c.networks.AddNetworks(cmd, "ranges whose reverse names are answered here and never asked of an upstream",
		"ranges of the Pods' addresses, likewise")
	return cmd
}

// serverOptions checks all flags and returns what the server needs of them. Its error is one of usage.
func (c *dnsCommand) serverOptions() (dns.Options, error) {
	opts, err := c.Options(c.networks)
	if err != nil {
		return opts, err
	}
	if len(c.nodeLocal) > 0 {
		opts.NodeLocal = &dns.NodeLocal{Addresses: c.nodeLocal}
	}
	if err := opts.Check(); err != nil {
		return opts, base.AsUsage(err)
	}
	if err := base.CheckBind("metrics-bind-address", c.metrics); err != nil {
		return opts, err
	}
	if c.configureResolver && len(c.nodeLocal) == 0 {
		return opts, base.Usagef("--configure-resolver needs --node-local: programs only ask on port 53 of an address of this machine")
	}
	return opts, parts.CheckResolver(c.configureResolver)
}

// run serves until ctx is done.
func (c *dnsCommand) run(ctx context.Context, log *slog.Logger, opts dns.Options) error {
	cfg, _, err := c.client.Load()
	if err != nil {
		return err
	}
	if len(c.nodeLocal) > 0 {
		held, err := parts.DNSLock.Wait(ctx, log)
		if err != nil {
			return err
		}
		defer held.Close()
	}
	defer lifecycle.Beside(ctx, func(ctx context.Context) { parts.WarnOfInlineCertificate(ctx, log, cfg) })()
	cfg = base.AgentConfig(cfg)
	cfg.UserAgent = "fairlead-dns/" + base.Version
	// Packing the first lists takes both sides longer than a network
	// takes to carry them.
	cfg.DisableCompression = true
	if opts.Client, err = kubernetes.NewForConfig(cfg); err != nil {
		return err
	}
	opts.Logger = log
	server, err := dns.New(opts)
	if err != nil {
		return err
	}
	return lifecycle.RunAll(ctx, log, func() {}, c.components(log, server)...)
}

// components returns the components of the process in the order in which they start; they stop in the reverse order.
func (c *dnsCommand) components(log *slog.Logger, server *dns.Server) []lifecycle.Component {
	var components []lifecycle.Component
	if c.metrics != "" { // first, so that /ready is 503 while the server stops
		components = append(components, lifecycle.HTTP("dns metrics", c.metrics, server.Handler()))
	}
	answers := lifecycle.Component{
		Name: "dns", Run: func(ctx context.Context) error { return runSmall(ctx, log, server) }, Drain: server.Drain,
	}
	if !c.configureResolver {
		return append(components, answers)
	}
	answers.Ready = func(ctx context.Context) error { return lifecycle.UntilTrue(ctx, server.Ready) }
	return append(components, answers, parts.ResolverComponent(log, c.nodeLocal[0]))
}

// runSmall runs the only server of a process, and releases memory when it is ready, which
// may be long after it was started.
func runSmall(ctx context.Context, log *slog.Logger, server *dns.Server) error {
	started := lifecycle.CollectLater()
	var releasing sync.WaitGroup
	defer releasing.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	releasing.Go(func() {
		if lifecycle.UntilTrue(ctx, server.Ready) == nil {
			started()
			lifecycle.ReleaseMemory(log)
		}
	})
	return server.Run(ctx)
}
