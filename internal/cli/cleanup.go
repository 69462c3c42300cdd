package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/dns/resolvconf"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/runner"
)

// cleanupTimeout bounds the whole clean-up, the end of running Pods included.
const cleanupTimeout = 2 * time.Minute

func newCleanup(g *global) *cobra.Command {
	var dataDir string
	var kubeProxy bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove what a node wrote to the kernel, and end its Pods",
		Long: `Remove every trace of a node from this machine: the proxy's rules, the Pods'
processes, devices and routes, what --configure-resolver wrote, and the node's state.
Kernel parameters that were set since the machine started get their earlier values.
Run it when the agent, the proxy or 'dns --node-local' has been stopped for good:
beside a running one, whatever its data directory, it changes nothing. The server's data
are not touched ('fairlead uninstall' removes all). Without root it ends the Pods of a 'fairlead up' of this user that was
killed, and removes their state.

With --kube-proxy it removes only the rules that a kube-proxy left on this machine;
do that after it has been stopped, and before or while fairlead takes its place.`,
		Example: `  fairlead cleanup
  fairlead cleanup --data-dir /srv/fairlead
  fairlead cleanup --kube-proxy`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root := os.Geteuid() == 0
			if kubeProxy && !root {
				return errors.New("removing rules changes this machine's network and needs root: run it with sudo")
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), cleanupTimeout)
			defer cancel()
			if kubeProxy {
				if err := wrap("rules of kube-proxy", kubeproxy.Remove(ctx)); err != nil {
					return err
				}
				fmt.Fprintln(g.out, "removed: rules of kube-proxy")
				return nil
			}
			if !root {
				// The network was that of a namespace, and went with it.
				if err := runner.Cleanup(ctx, nodeState(dataDir)); err != nil {
					return wrap("pods", err)
				}
				fmt.Fprintln(g.out, "removed: pods, the node's state")
				return nil
			}
			log, err := g.logger()
			if err != nil {
				return err
			}
			if err := cleanUp(ctx, log, dataDir); err != nil {
				return err
			}
			fmt.Fprintln(g.out, "removed: pods and their network, proxy rules, kernel parameters, the node's state")
			return nil
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir(), "directory of the node's state")
	cmd.Flags().BoolVar(&kubeProxy, "kube-proxy", false, "remove the rules that a kube-proxy left, and nothing else")
	return cmd
}

// nodeState is the directory of an agent's state.
func nodeState(dataDir string) string { return filepath.Join(dataDir, "agent") }

// nodePKI is the directory of a node's certificate.
func nodePKI(dataDir string) string { return filepath.Join(dataDir, "node-pki") }

// cleanUp removes what nodes with state in dataDir have made in this network namespace, the
// state included. Beside a running one it changes nothing.
func cleanUp(ctx context.Context, log *slog.Logger, dataDir string) error {
	for _, l := range []ruleLock{proxyLock, dnsLock} {
		held, err := l.try(log)
		if err != nil {
			return fmt.Errorf("nothing was removed: %w; stop it first", err)
		}
		defer held.Close()
	}
	err := runner.Cleanup(ctx, nodeState(dataDir), runner.RemoveNetwork,
		func() error { return cleanUpModes(ctx, "") },
		func() error { return wrap("empty tables of iptables", iptables.RemoveEmptyTables()) },
		func() error { return wrap("node-local DNS", nodelocal.Remove()) },
		func() error {
			return wrap("addresses of load balancers", errors.Join(link.SetVIPs(nil), filter.Remove()))
		},
		func() error { return wrap("cluster's DNS from "+resolvconf.Path, resolvconf.Restore(resolvconf.Path)) },
		sysctl.Restore)
	if errors.Is(err, runner.ErrRunning) {
		return fmt.Errorf("nothing was removed: %w", err)
	}
	return wrap("pods", err)
}

func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("remove the %s: %w", what, err)
	}
	return nil
}
