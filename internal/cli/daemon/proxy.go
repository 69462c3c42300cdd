package daemon

import (
	"context"
	"log/slog"
	"maps"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/kubeproxy"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/runner/api"
)

// proxyCommand is 'fairlead proxy'.
type proxyCommand struct {
	global   *base.Global
	newRoot  func() *cobra.Command
	flags    parts.ProxyFlags
	prestop  prestopFlags
	client   base.ClientFlags
	networks base.NetworkFlags
	foreign  kubeproxy.Flags // kube-proxy's
	spans    lifecycle.SpanFlags
	nodeName string
}

// NewProxy returns 'fairlead proxy'. newRoot returns a new tree of all commands, by whose flags a changed configuration
// is checked.
func NewProxy(g *base.Global, newRoot func() *cobra.Command) *cobra.Command {
	p := &proxyCommand{global: g, newRoot: newRoot}
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Run the node proxy on any Kubernetes API, in place of kube-proxy",
		Long: `Run the node proxy on any Kubernetes API, in place of kube-proxy. It takes every flag of
kube-proxy v1.37, and --config takes kube-proxy's own file (KubeProxyConfiguration); see
docs/kubernetes.md.`,
		Example: `  fairlead proxy --kubeconfig /etc/kubernetes/proxy.conf --node-name node1
  fairlead proxy --config /var/lib/kube-proxy/config.conf --hostname-override node1
  fairlead proxy --kubeconfig F --cluster-cidr 10.244.0.0/16 --nodeport-addresses 192.0.2.0/24`,
		Args: base.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.foreign.Complete(cmd, g, &p.flags); err != nil || p.foreign.ShowsVersion() {
				return err
			}
			if err := base.CheckNodeName(p.nodeName); err != nil {
				return err
			}
			if err := p.prestop.check(); err != nil {
				return err
			}
			if err := p.spans.Check(); err != nil {
				return err
			}
			return p.flags.Check(p.networks)
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return p.run(cmd.Context()) },
	}
	p.client.Add(cmd)
	p.flags.Add(cmd)
	p.flags.AddRelay(cmd)
	p.prestop.add(cmd.Flags())
	p.spans.Add(cmd)
	p.networks.AddNetworks(cmd,
		"ranges of ClusterIPs, in which packets to an address without a Service are dropped; used if the API has no ServiceCIDRs",
		"ranges of the Pods' addresses: traffic to a ClusterIP from outside of them is masqueraded")
	cmd.Flags().StringVar(&p.client.Master, "master", "", "URL of the API server, in place of the kubeconfig's")
	cmd.Flags().StringVar(&p.flags.DetectLocal, "detect-local-mode", "",
		"how Pods of this node are told from other clients: only by --cluster-cidr (ClusterCIDR), only by the Node's podCIDRs (NodeCIDR),\n"+
			"or by where their packets come from (BridgeInterface with --pod-bridge-interface, InterfaceNamePrefix with\n"+
			"--pod-interface-name-prefix) (default: by the Node's podCIDRs, or --cluster-cidr without any)")
	cmd.Flags().StringVar(&p.nodeName, "node-name", base.Hostname(),
		"name of this machine's Node object; a Node with an address of this machine if this is not given and no Node has the default")
	p.foreign.Add(cmd)
	return cmd
}

func (p *proxyCommand) run(ctx context.Context) error {
	log, err := p.global.Logger()
	if err != nil {
		return err
	}
	if done, err := p.foreign.Instead(ctx, p.global.Out, log); done || err != nil {
		return err
	}
	p.foreign.Start(log)
	if p.foreign.InitOnly(log, &p.flags) {
		return nil
	}
	cfg, _, err := p.client.Load()
	if err != nil {
		return err
	}
	p.foreign.Config(cfg)
	defer lifecycle.Beside(ctx, func(ctx context.Context) { parts.WarnOfInlineCertificate(ctx, log, cfg) })()
	var reached parts.Dialed
	reached.Record(cfg)
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	if p.nodeName, err = p.foreign.NodeName(ctx, log, client, p.nodeName); err != nil {
		return nil //nolint:nilerr // the command was told to end
	}
	lock, err := parts.ProxyLock.Wait(ctx, log)
	if err != nil {
		return err
	}
	defer lock.Close()
	return p.serve(ctx, log, client, &reached)
}

// serve runs the proxy. It has the lock of its rules.
func (p *proxyCommand) serve(ctx context.Context, log *slog.Logger, client kubernetes.Interface, reached *parts.Dialed) error {
	opts, err := p.flags.Open(ctx, log, client, p.nodeName, p.networks)
	if err != nil {
		return err
	}
	opts.Servers = reached.Servers
	p.foreign.Options(&opts)
	if opts.Handlers, err = p.foreign.Pages(p.global, opts.Mode); err != nil {
		return err
	}
	lifecycle.KeepHeapSmall()
	spans, components, err := p.spans.Open(log, "proxy", p.nodeName)
	if err != nil {
		return err
	}
	opts.Traces = spans.Pending(p.nodeName, opts.Mode)
	opts.Progress = barrier.NewProgress(barrier.ProxyServices, barrier.ProxySlices)
	reporter := &barrier.Reporter{Client: client, NodeName: p.nodeName, Progress: opts.Progress, Log: log, Own: true}
	prestop, err := p.prestop.open(log, &opts, reporter.Controlled)
	if err != nil {
		return err
	}
	part, proxy, counts, err := parts.ProxyComponent(opts, false)
	if err != nil {
		return err
	}
	maps.Copy(opts.Handlers, api.OnLoopback(parts.Views(proxy, counts))) // the proxy has the map
	reporter.Node, reporter.Drains = proxy.Node, prestop != nil
	components = append(components, part, lifecycle.Component{Name: "report of what is programmed", Run: reporter.Run})
	if prestop != nil {
		proxy.Register(prestop)
		components = append(components, lifecycle.Component{Name: "answers to preStop requests", Run: prestop.Run})
	}
	flows, err := p.flags.Flows().Components(client, proxy, p.nodeName, true)
	if err != nil {
		return err
	}
	components = append(append(components, flows...), p.foreign.Watch(log, p.newRoot)...)
	return lifecycle.RunAll(ctx, log, func() {}, components...)
}
