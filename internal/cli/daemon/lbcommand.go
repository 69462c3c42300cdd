package daemon

import (
	"context"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/runner/api"
)

// lbCommand is 'fairlead lb'.
type lbCommand struct {
	*base.Global
	parts.LBFlags
	client              base.ClientFlags
	nodeName, metrics   string
	nodeIP              base.Addrs
	controller, Speaker bool
}

// NewLB returns 'fairlead lb'.
func NewLB(g *base.Global) *cobra.Command {
	c := &lbCommand{Global: g}
	cmd := &cobra.Command{
		Use:   "lb",
		Short: "Give addresses to Services of type LoadBalancer and announce them, on any Kubernetes API",
		Long: `Give addresses of your own network to Services of type LoadBalancer, and announce
them from this node. Run one on each node: the controller of one of them works,
elected by a Lease, and the speakers of all decide which of them answers for an
address. It takes the place of MetalLB, kube-vip or cloud-provider-kind.`,
		Example: `  fairlead lb --kubeconfig /etc/kubernetes/lb.conf --node-name node1 --lb-pool 192.0.2.10-192.0.2.99
  fairlead lb --kubeconfig F --lb-pool public=198.51.100.0/24,2001:db8:1::/64 --lb-announce bgp
  fairlead lb status`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd.Context()) },
	}
	c.client.Add(cmd)
	c.LBFlags.Add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&c.nodeName, "node-name", base.Hostname(), "name of this machine's Node object")
	flags.Var(&c.nodeIP, "node-ip",
		"address of this node at which its speaker hears the others (default: the address from which it reaches the API server)")
	flags.BoolVar(&c.controller, "controller", true, "give out addresses, while this process holds the Lease")
	flags.BoolVar(&c.Speaker, "speaker", true, "announce addresses from this node")
	flags.StringVar(&c.metrics, "metrics-bind-address", "127.0.0.1:7472", "IP:PORT of /metrics and /livez; empty for none")
	return cmd
}

func (c *lbCommand) run(ctx context.Context) error {
	log, err := c.Logger()
	if err != nil {
		return err
	}
	if err := base.CheckNodeName(c.nodeName); err != nil {
		return err
	}
	if err := c.Check(base.NetworkFlags{}); err != nil {
		return err
	}
	if !c.controller && !c.Speaker {
		return base.Usagef("--controller=false and --speaker=false: there is nothing to do")
	}
	if err := base.CheckBind("metrics-bind-address", c.metrics); err != nil {
		return err
	}
	config, _, err := c.client.Load()
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	var components []lifecycle.Component
	if c.controller {
		controller, err := c.LBFlags.Controller(log, config)
		if err != nil {
			return err
		}
		registry.MustRegister(controller.Collector())
		components = append(components, lifecycle.Component{Name: "load balancers", Run: controller.Run})
	}
	if c.Speaker {
		if len(c.nodeIP) == 0 {
			if c.nodeIP, err = parts.MachineAddresses(parts.ServerAddrs(config, log)); err != nil {
				return err
			}
		}
		speaker, err := c.NewSpeaker(log, config, c.nodeName, c.nodeIP[0], nil, parts.NoMeshBesides(ctx, log))
		if err != nil {
			return err
		}
		registry.MustRegister(speaker.Collector())
		components = append(components, parts.SpeakerComponent(speaker))
	}
	if c.metrics != "" {
		components = append(components, lifecycle.OptionalHTTP(log, "the metrics of load balancers", c.metrics, c.pages(probes(nil, registry))))
	}
	return lifecycle.RunAll(ctx, log, func() {}, components...)
}

// pages adds what 'fairlead trace' asks for a request to other pages.
func (c *lbCommand) pages(others http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", others)
	views := map[string]api.View{api.RequestView: api.Requests(c.nodeName, c.Traced)}
	for path, h := range api.OnLoopback(views) {
		mux.Handle(path, h)
	}
	return mux
}
