package daemon

import (
	"context"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/parts"
)

// NewProxy returns 'fairlead proxy'.
func NewProxy(g *base.Global) *cobra.Command {
	var f parts.ProxyFlags
	var c base.ClientFlags
	var networks base.NetworkFlags
	var nodeName string
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Run the node proxy on any Kubernetes API, in place of kube-proxy",
		Example: `  fairlead proxy --kubeconfig /etc/kubernetes/proxy.conf --node-name node1
  fairlead proxy --kubeconfig F --cluster-cidr 10.244.0.0/16 --nodeport-addresses 192.0.2.0/24`,
		Args: base.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if err := base.CheckNodeName(nodeName); err != nil {
				return err
			}
			return f.Check(networks)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := g.Logger()
			if err != nil {
				return err
			}
			cfg, _, err := c.Load()
			if err != nil {
				return err
			}
			defer lifecycle.Beside(cmd.Context(), func(ctx context.Context) { parts.WarnOfInlineCertificate(ctx, log, cfg) })()
			var reached parts.Dialed
			reached.Record(cfg)
			client, err := kubernetes.NewForConfig(cfg)
			if err != nil {
				return err
			}
			lock, err := parts.ProxyLock.Wait(cmd.Context(), log)
			if err != nil {
				return err
			}
			defer lock.Close()
			opts, err := f.Open(cmd.Context(), log, client, nodeName, networks)
			if err != nil {
				return err
			}
			opts.Servers = reached.Servers
			lifecycle.KeepHeapSmall()
			opts.Progress = barrier.NewProgress(barrier.ProxyServices, barrier.ProxySlices)
			part, p, err := parts.ProxyComponent(opts, false)
			if err != nil {
				return err
			}
			reporter := &barrier.Reporter{
				Client: client, NodeName: nodeName, Progress: opts.Progress, Log: log, Node: p.Node, Own: true,
			}
			return lifecycle.RunAll(cmd.Context(), log, func() {}, part,
				lifecycle.Component{Name: "report of what is programmed", Run: reporter.Run})
		},
	}
	c.Add(cmd)
	f.Add(cmd)
	networks.AddNetworks(cmd,
		"ranges of ClusterIPs, in which packets to an address without a Service are dropped; used if the API has no ServiceCIDRs",
		"ranges of the Pods' addresses: traffic to a ClusterIP from outside of them is masqueraded")
	cmd.Flags().StringVar(&f.DetectLocal, "detect-local-mode", "",
		"how Pods of this node are told from other clients: only by --cluster-cidr (ClusterCIDR), or only by the Node's podCIDRs (NodeCIDR)\n"+
			"(default: by the Node's podCIDRs, or --cluster-cidr without any)")
	cmd.Flags().StringVar(&nodeName, "node-name", base.Hostname(), "name of this machine's Node object")
	return cmd
}
