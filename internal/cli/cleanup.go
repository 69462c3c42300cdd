package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/kernel/nodelocal"
	"github.com/fairlead/fairlead/internal/runner"
)

// cleanupWithin bounds the whole clean-up, the end of running Pods included.
const cleanupWithin = 2 * time.Minute

func newCleanup(g *global) *cobra.Command {
	var dataDir string
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove what a node wrote to the kernel, and end its Pods",
		Long: `Remove every trace of a node from this machine: the proxy's rules, the Pods'
processes, devices and routes, and the node's state. Run it when the agent or the
proxy has been stopped for good. The server's data are not touched.`,
		Example: `  fairlead cleanup
  fairlead cleanup --data-dir /srv/fairlead`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("cleaning up changes this machine's network and needs root: run it with sudo")
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), cleanupWithin)
			defer cancel()
			state := filepath.Join(dataDir, "agent")
			if err := errors.Join(
				wrap("pods", runner.Cleanup(ctx, state)),
				cleanUpModes(ctx, ""),
				wrap("node-local DNS", nodelocal.Remove()),
			); err != nil {
				return err
			}
			fmt.Fprintln(g.out, "removed: pods and their network, proxy rules, the node's state")
			return nil
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir(), "directory of the node's state")
	return cmd
}

func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("remove the %s: %w", what, err)
	}
	return nil
}
