package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/dataplane/handover"
	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/dns/resolvconf"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftrace"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/runner"
)

// cleanupTimeout bounds the whole clean-up, the end of running Pods included.
const cleanupTimeout = 2 * time.Minute

// NewCleanup returns 'fairlead cleanup'.
func NewCleanup(g *base.Global) *cobra.Command {
	var dataDir string
	var kubeProxy bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove a node's changes to the kernel, and end its Pods",
		Long: `Remove every trace of a node from this machine: the proxy's rules, the Pods' processes,
devices and routes, the changes of --configure-resolver, and the node's state. Kernel
parameters that were set since the machine started get their earlier values. Run it after
the agent, the proxy or 'dns --node-local' has been stopped for good. While one of them
runs, with any data directory, the command changes nothing. It keeps the server's data
('fairlead uninstall' removes all). Without root it ends the Pods of a killed 'fairlead up'
of this user, and removes their state.

With --kube-proxy it removes only the rules that a kube-proxy left on this machine;
do that after kube-proxy has been stopped, before or after fairlead is started.`,
		Example: `  fairlead cleanup
  fairlead cleanup --data-dir /srv/fairlead
  fairlead cleanup --kube-proxy`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root := os.Geteuid() == 0
			if kubeProxy && !root {
				return errors.New("removing rules changes this machine's network and needs root: run it with sudo")
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), cleanupTimeout)
			defer cancel()
			if kubeProxy {
				if err := handover.FromKubeProxy(ctx); err != nil {
					fmt.Fprintln(g.Out, "Warning:", err)
				}
				if err := parts.Removing("rules of kube-proxy", kubeproxy.Remove(ctx)); err != nil {
					return err
				}
				fmt.Fprintln(g.Out, "removed: rules of kube-proxy")
				if !iptables.Installed() {
					fmt.Fprintln(g.Out, "not looked at: chains of iptables, which is not installed; "+
						"if kube-proxy was in mode iptables or ipvs, install it and repeat the command")
				}
				return nil
			}
			if !root {
				// The network was that of a namespace, and went with it.
				if err := runner.Cleanup(ctx, base.NodeState(dataDir)); err != nil {
					return parts.Removing("pods", err)
				}
				fmt.Fprintln(g.Out, "removed: pods, the node's state")
				return nil
			}
			log, err := g.Logger()
			if err != nil {
				return err
			}
			if err := cleanUp(ctx, log, dataDir); err != nil {
				return err
			}
			fmt.Fprintln(g.Out, "removed: pods and their network, proxy rules, kernel parameters, the node's state")
			return nil
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", base.DefaultDataDir(), "directory of the node's state")
	cmd.Flags().BoolVar(&kubeProxy, "kube-proxy", false, "remove the rules that a kube-proxy left, and nothing else")
	return cmd
}

// cleanUp removes what nodes with state in dataDir have made in this network namespace, the
// state included. Beside a running one it changes nothing.
func cleanUp(ctx context.Context, log *slog.Logger, dataDir string) error {
	for _, l := range []parts.RuleLock{parts.ProxyLock, parts.DNSLock, parts.TraceLock} {
		held, err := l.Try(log)
		if err != nil {
			return fmt.Errorf("nothing was removed: %w; stop it first", err)
		}
		defer held.Close()
	}
	err := runner.Cleanup(ctx, base.NodeState(dataDir), runner.RemoveNetwork,
		func() error { return parts.CleanUpModes(ctx, "") },
		func() error { return parts.Removing("rules of a trace", nftrace.Remove(ctx)) },
		func() error { return parts.Removing("empty tables of iptables", iptables.RemoveEmptyTables()) },
		func() error { return parts.Removing("node-local DNS", nodelocal.Remove()) },
		func() error {
			return parts.Removing("addresses of load balancers", errors.Join(link.SetVIPs(nil, nil), link.SetClusterIPs(nil, nil), filter.Remove()))
		},
		func() error {
			return parts.Removing("cluster's DNS from "+resolvconf.Path, resolvconf.Restore(resolvconf.Path))
		},
		sysctl.Restore)
	if errors.Is(err, runner.ErrRunning) {
		return fmt.Errorf("nothing was removed: %w", err)
	}
	return parts.Removing("pods", err)
}
