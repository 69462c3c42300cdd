package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/controller"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/mount"
)

type upCommand struct {
	*global
	server serverFlags
	agent  agentFlags
	given  func(flag string) bool // reports whether a flag was set
}

func newUp(g *global) *cobra.Command {
	u := &upCommand{global: g}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run everything on this machine: API, controllers and a node",
		Long: `Run everything on this machine until it is interrupted: the API server with an etcd
of its own, the controllers, and a node with proxy, DNS and Pods.

As root it uses the machine's own network. Without root it makes a user and a
network namespace of its own, says how to enter it, and serves the API on the
machine's loopback as well; nothing outside of that namespace is changed. Pods end
with it; the API's objects stay in the data directory.`,
		Example: `  fairlead up
  KUBECONFIG=$(fairlead kubeconfig --path) kubectl get nodes`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			g.quiet(cmd)
			u.given = cmd.Flags().Changed
			return u.run(cmd.Context())
		},
	}
	u.server.add(cmd)
	u.agent.add(cmd)
	return cmd
}

func (u *upCommand) run(ctx context.Context) error {
	if err := u.server.complete(); err != nil {
		return err
	}
	u.agent.networkFlags = u.server.networkFlags
	if err := u.agent.check(); err != nil {
		return err
	}
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if os.Geteuid() != 0 {
		return u.enterNamespace(ctx, os.Args[1:], netip.AddrPortFrom(loopback, u.server.SecurePort))
	}
	log, err := u.logger()
	if err != nil {
		return err
	}
	if inside() {
		if err := u.prepareNamespace(); err != nil {
			return err
		}
	}
	if len(u.agent.nodeIPs) == 0 {
		if u.agent.nodeIPs, err = machineAddresses(nil); err != nil {
			return err
		}
	}
	if err := checkResolver(u.agent.configureResolver); err != nil {
		return err
	}
	keepHeapSmall()
	begin := time.Now()
	u.server.Log, u.server.Domains = log, u.agent.domains
	u.server.BindAddresses = append([]netip.Addr{loopback}, u.agent.nodeIPs...)
	health := addControllersCheck(&u.server.Options)
	server, err := apiserver.New(u.server.Options)
	if err != nil {
		return err
	}
	defer server.Close()
	lock, err := proxyLock.wait(ctx, log)
	if err != nil {
		return err
	}
	defer lock.Close()
	dnsHeld, err := u.agent.lockDNS(ctx, log)
	if err != nil {
		return err
	}
	defer dnsHeld.Close()
	parts := []component{u.announce("API server", serverComponent(server), begin)}
	controllers, err := controllersComponent(log, server.ControllersConfig, controller.Options{
		ClusterCIDRs: u.server.podCIDRs, Health: health, PeerWatch: u.agent.peerWatch, UnreachableToleration: u.server.unreachable,
	})
	if err != nil {
		return err
	}
	parts = append(parts, u.announce("controllers", controllers, begin), u.agent.lb.controllerComponent(log, server.ControllersConfig))
	u.agent.stateDir = filepath.Join(u.server.DataDir, "agent")
	u.agent.stopPods = true
	u.agent.registrar = server.LoopbackConfig()
	cfg, err := server.NodeConfig(u.agent.nodeName)
	if err != nil {
		return err
	}
	n, err := u.agent.open(ctx, log, cfg)
	if err != nil {
		return err
	}
	for _, c := range n.components {
		parts = append(parts, u.announce(c.name, c, begin))
	}
	return runAll(ctx, log, func() { u.summary(server, n, begin) }, parts...)
}

// announce prints a line when the component is ready, if others wait for it.
func (u *upCommand) announce(name string, c component, begin time.Time) component {
	wait := c.ready
	if wait == nil {
		return c
	}
	c.ready = func(ctx context.Context) error {
		if err := wait(ctx); err != nil {
			return err
		}
		fmt.Fprintf(u.err, "%-12s ready after %s\n", name, time.Since(begin).Round(time.Millisecond))
		return nil
	}
	return c
}

// summary prints where everything is, and the commands to type next.
func (u *upCommand) summary(s *apiserver.Server, n *node, begin time.Time) {
	fmt.Fprintf(u.out, `
fairlead is up after %s

API server   %s
kubeconfig   %s
node         %s at %s
DNS          %s

next         export KUBECONFIG=%[3]s
             kubectl get svc,pods
             fairlead run -l app=MyApp -p http=9376 -- COMMAND
`, time.Since(begin).Round(time.Millisecond), s.URL(), s.Kubeconfig(), u.agent.nodeName, listOf(u.agent.nodeIPs), n.dnsAddresses())
	if inside() {
		fmt.Fprintf(u.out, `
It runs in a network namespace of its own. kubectl works from anywhere on this
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
	if len(u.agent.nodeIPs) == 0 {
		u.agent.nodeIPs = ownAddrs()
	}
	file := os.NewFile(apiFD, "api")
	defer file.Close()
	l, err := net.FileListener(file)
	if err != nil {
		return fmt.Errorf("take over the API's listener: %w", err)
	}
	u.server.Listeners = append(u.server.Listeners, l.(*net.TCPListener))
	dns, err := u.server.clusterDNS()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(u.server.DataDir, 0o700); err != nil {
		return err
	}
	resolv, err := writeResolvConf(u.server.DataDir, dns, u.agent.domains[0])
	if err != nil {
		return err
	}
	// For processes that enter the namespace.
	if err := mount.Over(resolv, "/etc/resolv.conf"); err != nil {
		return err
	}
	u.agent.inNamespace(u.given)
	return nil
}

// inNamespace adapts the flags of a node in a network namespace of its own, whose resolver
// is mounted. given reports whether a flag was set.
func (f *agentFlags) inNamespace(given func(flag string) bool) {
	// There is no way out of the namespace, so no resolver to forward to.
	f.upstream, f.newNamespace, f.configureResolver = nil, true, false
	if !given("pod-manifest-dir") {
		f.manifestDir = "" // the default has those of the machine's own agent
	}
}

// machineAddresses returns the addresses that this machine is reached at, one of
// each family: those that packets to server, if there is one, leave from.
func machineAddresses(server []netip.Addr) ([]netip.Addr, error) {
	var peer netip.Addr
	if len(server) > 0 {
		peer = server[0]
	}
	out, err := link.MachineAddrs(peer)
	if err == nil && len(out) == 0 {
		err = errors.New("this machine has no address that others reach (those of loopback, bridges, docker and fairlead do not count): " +
			"give one to an interface, or name it with --node-ip")
	}
	return out, err
}
