package daemon

import (
	"context"
	"net"
	"net/netip"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/relay"
	"github.com/fairlead/fairlead/internal/hubble/tunnel"
)

// relayCommand is 'fairlead hubble-relay'.
type relayCommand struct {
	*base.Global
	client                        base.ClientFlags
	users, nodes, address, health string
	account                       string
}

// NewHubbleRelay returns 'fairlead hubble-relay'.
func NewHubbleRelay(g *base.Global) *cobra.Command {
	c := &relayCommand{Global: g}
	cmd := &cobra.Command{
		Use:   "hubble-relay",
		Short: "Answer Hubble's API for all nodes with 'fairlead proxy', on any Kubernetes API",
		Long: `Answer the hubble command for all nodes of a Kubernetes cluster on which 'fairlead proxy'
records flows. The proxies connect to it. Users reach it by 'hubble observe -P', or by
'kubectl port-forward': it has no authentication of its own, and listens for users only on
the loopback address. deploy/kubernetes/hubble-relay.yaml runs it; run one.

'fairlead server' and 'fairlead up' answer the hubble command themselves.`,
		Example: `  fairlead hubble-relay --advertise-address 10.244.1.7
  hubble observe -P --service my-service`,
		Args:    base.NoArgs,
		PreRunE: func(*cobra.Command, []string) error { return c.check() },
		RunE:    func(cmd *cobra.Command, _ []string) error { return c.run(cmd.Context()) },
	}
	c.client.Add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&c.users, "listen-address", "127.0.0.1:4245", "loopback IP:PORT at which users ask")
	flags.StringVar(&c.nodes, "node-listen-address", "0.0.0.0:4246",
		"IP:PORT at which proxies connect; 0.0.0.0 is every address of both families")
	flags.StringVar(&c.address, "advertise-address", "", "address of this machine or Pod at which proxies reach it")
	flags.StringVar(&c.account, "proxy-service-account", "fairlead-proxy", "ServiceAccount in kube-system that the proxies have")
	flags.StringVar(&c.health, "healthz-bind-address", "0.0.0.0:4247", "IP:PORT of /livez, /readyz and /metrics; empty for none")
	return cmd
}

// check rejects flags that are wrong on any machine.
func (c *relayCommand) check() error {
	users, err := netip.ParseAddrPort(c.users)
	if err != nil || !users.Addr().IsLoopback() {
		return base.Usagef("--listen-address is %q; want a loopback IP:PORT: who reaches it may see all flows", c.users)
	}
	if _, err := netip.ParseAddrPort(c.nodes); err != nil {
		return base.Usagef("--node-listen-address is %q; want IP:PORT", c.nodes)
	}
	if a, err := netip.ParseAddr(c.address); err != nil || a.IsUnspecified() || a.Zone() != "" {
		return base.Usagef("--advertise-address is %q; want the IP address at which proxies reach this relay", c.address)
	}
	if c.account == "" {
		return base.Usagef("--proxy-service-account is empty; want the name of a ServiceAccount in kube-system")
	}
	return base.CheckBind("healthz-bind-address", c.health)
}

// Requests to the API server, in a second and at once: reviews of tokens when all nodes of a large cluster connect.
const (
	relayQPS   = 50
	relayBurst = 100
)

func (c *relayCommand) run(ctx context.Context) error {
	log, err := c.Logger()
	if err != nil {
		return err
	}
	cfg, _, err := c.client.Load()
	if err != nil {
		return err
	}
	cfg.QPS, cfg.Burst, cfg.Timeout = relayQPS, relayBurst, base.RequestTimeout
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	nodes, err := tunnel.NewServer(client, metav1.NamespaceSystem, c.account, log)
	if err != nil {
		return err
	}
	users, err := net.Listen("tcp", c.users)
	if err != nil {
		return err
	}
	defer users.Close()
	listener, err := net.Listen("tcp", c.nodes)
	if err != nil {
		return err
	}
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		return err
	}
	answers := hubble.NewServer(relay.Over(nodes, client, base.Version, log))
	components := []lifecycle.Component{
		{Name: "connections of nodes", Run: func(ctx context.Context) error { return nodes.Serve(ctx, listener) }},
		{Name: "address of the relay", Run: func(ctx context.Context) error {
			return nodes.Publish(ctx, metav1.NamespaceSystem, net.JoinHostPort(c.address, port))
		}},
		{Name: "Hubble's API", Run: func(ctx context.Context) error {
			defer context.AfterFunc(ctx, answers.Stop)()
			if err := answers.Serve(users); ctx.Err() == nil {
				return err
			}
			return nil
		}},
	}
	if c.health != "" {
		components = append(components, lifecycle.HTTP("health", c.health, probes(nodes.Published)))
	}
	return lifecycle.RunAll(ctx, log, func() {}, components...)
}
