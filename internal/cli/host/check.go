// Package host has the commands that look at this machine or undo what a node changed on it:
// check, cleanup and uninstall.
package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/preflight"
)

// NewCheck returns 'fairlead check'.
func NewCheck(g *base.Global) *cobra.Command {
	var f node.Flags
	var dataDir string
	var output base.OutputFlag
	cmd := &cobra.Command{
		Use:   "check",
		Short: "List what would stop this machine from being a node, and how to fix it",
		Long: `Check this machine before its agent starts for the first time: kernel features for the
modes of the proxy, for masquerading and node-local DNS, ports in use, forwarding, rules of
other programs (firewalld, ufw, docker, kube-proxy), the clock, addresses and devices,
control groups, the disk; with --encrypt WireGuard, its port and the remaining size of
packets. Each finding has a remedy. The command changes nothing. Ports of an agent that runs
here from the same --data-dir are its own. An agent logs the same warnings at its start.

The exit code is 1 if a node would not work here; with only warnings it is 0. The command
has the flags of 'fairlead agent', and uses the section agent of the configuration file.`,
		Example: `  fairlead check
  fairlead check --encrypt
  fairlead check --mode ipvs -o json`,
		Args: base.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			return errors.Join(output.Check(), f.Check())
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("looking at the kernel's rules needs root: run it with sudo")
			}
			m := f.Machine(base.NodeState(dataDir), true)
			m.Agent = runningAgent(cmd.Context(), dataDir)
			findings := m.Check(cmd.Context())
			err := output.Write(g.Out, findings, func(w io.Writer) error { return printFindings(w, findings) })
			if err == nil && preflight.Failed(findings) {
				err = errors.New("this machine cannot be a node: fix the findings of level error")
			}
			return err
		},
	}
	f.Add(cmd)
	f.Networks = node.DefaultNetworks()
	f.Networks.AddNetworks(cmd, "ranges of ClusterIPs", "ranges of the Pods' addresses")
	cmd.Flags().StringVar(&dataDir, "data-dir", base.DefaultDataDir(), "directory for the state of this node")
	output.Add(cmd)
	return cmd
}

// runningAgent returns the name of the node whose agent runs on this machine with a data directory, "" if none answers.
func runningAgent(ctx context.Context, dataDir string) string {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	a, err := base.ReadRecord(dataDir)
	if err != nil {
		return ""
	}
	for _, at := range []string{a.Healthz, a.Metrics} {
		if _, _, err := base.GetLocal(ctx, at, "/livez"); at != "" && err == nil {
			return a.Node
		}
	}
	return ""
}

// agentTimeout bounds the question whether an agent runs.
const agentTimeout = 3 * time.Second

func printFindings(w io.Writer, findings []preflight.Finding) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, x := range findings {
		fmt.Fprintf(t, "%s\t%s\t%s\n", x.Level, x.Check, x.Message)
		if x.Remedy != "" {
			fmt.Fprintf(t, "\t\t%s\n", x.Remedy)
		}
	}
	return t.Flush()
}
