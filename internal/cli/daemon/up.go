package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/controller"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/mount"
)

type upCommand struct {
	*base.Global
	server serverFlags
	agent  node.Flags
	given  func(flag string) bool // reports whether a flag was set
}

// NewUp returns 'fairlead up'.
func NewUp(g *base.Global) *cobra.Command {
	u := &upCommand{Global: g}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run everything on this machine: API, controllers and a node",
		Long: `Run everything on this machine until it is interrupted: the API server with its own
etcd, the controllers, and a node with proxy, DNS and Pods.

As root it uses the machine's own network. Without root it runs in its own user and
network namespaces, prints the command to enter them, and also serves the API on the
machine's loopback; nothing outside of the namespaces is changed. Pods end with it;
the API's objects stay in the data directory.`,
		Example: `  fairlead up
  KUBECONFIG=$(fairlead kubeconfig --path) kubectl get nodes`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			g.Quiet(cmd)
			u.given = cmd.Flags().Changed
			return u.run(cmd.Context())
		},
	}
	u.server.add(cmd)
	u.agent.Add(cmd)
	return cmd
}

// loopback is where the API server of this machine always listens.
var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

func (u *upCommand) run(ctx context.Context) error {
	if err := u.server.complete(); err != nil {
		return err
	}
	u.agent.Networks = u.server.NetworkFlags
	if err := u.agent.Check(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return enterNamespace(ctx, u.Streams, os.Args[1:], netip.AddrPortFrom(loopback, u.server.SecurePort))
	}
	log, err := u.Logger()
	if err != nil {
		return err
	}
	if inside() {
		if err := u.prepareNamespace(); err != nil {
			return err
		}
	}
	if len(u.agent.Host.IPs) == 0 {
		if u.agent.Host.IPs, err = parts.MachineAddresses(nil); err != nil {
			return err
		}
	}
	if err := parts.CheckResolver(u.agent.DNS.ConfigureResolver); err != nil {
		return err
	}
	lifecycle.KeepHeapSmall()
	return u.serve(ctx, log, time.Now())
}

// serve runs the server, the controllers and the node until ctx ends.
func (u *upCommand) serve(ctx context.Context, log *slog.Logger, begin time.Time) error {
	u.server.Log, u.server.Domains = log, u.agent.DNS.Domains
	u.server.BindAddresses = append([]netip.Addr{loopback}, u.agent.Host.IPs...)
	of := controller.Options{
		Health: addControllersCheck(&u.server.Options), PeerWatch: u.agent.Host.PeerWatch, UnreachableToleration: u.server.unreachable,
	}
	if err := u.server.masks.ranges(&of, u.server.NetworkFlags.PodCIDRs); err != nil {
		return err
	}
	u.server.Definitions = u.agent.LB.Definitions()
	traces, components, err := u.agent.Spans.Open(log, "up", u.agent.Host.Name)
	if err != nil {
		return err
	}
	u.server.Traces, of.Traces = traces, traces
	server, err := apiserver.New(u.server.Options)
	if err != nil {
		return err
	}
	defer server.Close()
	unlock, err := lockNode(ctx, log, &u.agent)
	if err != nil {
		return err
	}
	defer unlock()
	controllers, err := controllersComponent(log, server.ControllersConfig, of)
	if err != nil {
		return err
	}
	components = append(components,
		u.announce("API server", serverComponent(server), begin),
		u.announce("controllers", controllers, begin),
		u.agent.LB.ControllerComponent(log, server.ControllersConfig))
	cfg, err := server.NodeConfig(u.agent.Host.Name)
	if err != nil {
		return err
	}
	state := base.NodeState(u.server.DataDir)
	n, err := u.agent.Open(ctx, node.Setup{
		Log: log, Config: cfg, StateDir: state, StopPods: true,
		Registrar: server.LoopbackConfig(), NewNamespace: inside(), Traces: traces,
	})
	if err != nil {
		return err
	}
	if err := u.agent.WriteRecord(state, "", server.Kubeconfig()); err != nil {
		return fmt.Errorf("the node's state directory: %w", err)
	}
	for _, c := range n.Components {
		components = append(components, u.announce(c.Name, c, begin))
	}
	return lifecycle.RunAll(ctx, log, func() { u.summary(server, n, begin) }, components...)
}

// announce prints a line when the component is ready, if others wait for it.
func (u *upCommand) announce(name string, c lifecycle.Component, begin time.Time) lifecycle.Component {
	wait := c.Ready
	if wait == nil {
		return c
	}
	c.Ready = func(ctx context.Context) error {
		if err := wait(ctx); err != nil {
			return err
		}
		fmt.Fprintf(u.Err, "%-12s ready after %s\n", name, time.Since(begin).Round(time.Millisecond))
		return nil
	}
	return c
}

// summary prints where everything is, and the commands to type next.
func (u *upCommand) summary(s *apiserver.Server, n *node.Node, begin time.Time) {
	fmt.Fprintf(u.Out, `
fairlead is up after %s

API server   %s
kubeconfig   %s
node         %s at %s
DNS          %s

next         export KUBECONFIG=%[3]s
             kubectl get svc,pods
             fairlead run -l app=MyApp -p http=9376 -- COMMAND
`, time.Since(begin).Round(time.Millisecond), s.URL(), s.Kubeconfig(), u.agent.Host.Name, base.ListOf(u.agent.Host.IPs), n.DNSAddresses())
	if inside() {
		fmt.Fprintf(u.Out, `
It runs in its own network namespace. kubectl works from anywhere on this
machine; to reach Services, enter it:
             nsenter --preserve-credentials -U -n -m -t %d
`, os.Getpid())
	}
}

// prepareNamespace gives the new namespaces addresses and a resolver, and takes
// over the listener that the process outside has opened.
func (u *upCommand) prepareNamespace() error {
	if err := mount.MakePrivate(); err != nil {
		return err
	}
	if err := link.Up("lo"); err != nil {
		return err
	}
	if err := link.EnsureNode(ownDevice, ownAddrs()); err != nil {
		return err
	}
	if err := link.DefaultTo(ownDevice); err != nil {
		return err
	}
	if len(u.agent.Host.IPs) == 0 {
		u.agent.Host.IPs = ownAddrs()
	}
	file := os.NewFile(apiFD, "api")
	defer file.Close()
	l, err := net.FileListener(file)
	if err != nil {
		return fmt.Errorf("take over the API's listener: %w", err)
	}
	u.server.Listeners = append(u.server.Listeners, l.(*net.TCPListener))
	dns, err := u.server.ClusterDNS()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(u.server.DataDir, 0o700); err != nil {
		return err
	}
	resolv, err := writeResolvConf(u.server.DataDir, dns, u.agent.DNS.Domains[0])
	if err != nil {
		return err
	}
	// For processes that enter the namespace.
	if err := mount.Over(resolv, "/etc/resolv.conf"); err != nil {
		return err
	}
	u.agent.InNamespace(u.given)
	return nil
}
