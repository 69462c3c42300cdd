// Package migratecmd has 'fairlead migrate'.
package migratecmd

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/nodecheck"
	"github.com/fairlead/fairlead/internal/migrate/walk"
)

// command is the state of 'fairlead migrate' and its sub-commands.
type command struct {
	*base.Global
	client  base.ClientFlags
	nodes   []string
	image   string
	timeout time.Duration
	output  base.OutputFlag
}

// NewMigrate returns 'fairlead migrate'.
func NewMigrate(g *base.Global) *cobra.Command {
	c := &command{Global: g}
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Change a Kubernetes cluster from kube-proxy to fairlead proxy, node by node, and back",
		Long: `Change a Kubernetes cluster from kube-proxy to fairlead proxy, node by node, and back. The
proxy gets the flags and the file that kube-proxy has. On each node both run beside each
other until the new rules are in the kernel and equal to what the API has; then kube-proxy
ends, and its rules are removed. Established connections stay.

The phase of a node is its label fairlead.dev/proxy. So an interrupted command is continued
by the next one, and 'apply' and 'rollback' lead on from every phase. Both stop at the first
node that fails, and change no other.`,
		Example: `  fairlead migrate plan --kubeconfig ~/.kube/config
  fairlead migrate apply --nodes node1      # one node first
  fairlead migrate apply                    # all others
  fairlead migrate verify
  fairlead migrate rollback`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(c.plan(), c.apply(), c.verify(), c.rollback(), c.status(), c.checkNode())
	return cmd
}

const defaultTimeout = 3 * time.Minute

// add adds a sub-command's flags.
func (c *command) add(cmd *cobra.Command) *cobra.Command {
	c.client.Add(cmd)
	cmd.Args = base.NoArgs
	cmd.Flags().StringSliceVar(&c.nodes, "nodes", nil, "names of the nodes (default: all)")
	_ = cmd.RegisterFlagCompletionFunc("nodes", base.CompleteNames(base.NodeNames))
	return cmd
}

// addWalk adds the flags of a sub-command that runs Pods.
func (c *command) addWalk(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVar(&c.image, "image", "", "image of fairlead (default: the one in use, else that of deploy/kubernetes/proxy.yaml)")
	cmd.Flags().DurationVar(&c.timeout, "timeout", defaultTimeout, "how long to wait for each step of a node")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if c.timeout <= 0 {
			return base.Usagef("--timeout is %s; want more than 0", c.timeout)
		}
		return nil
	}
	return c.add(cmd)
}

func (c *command) walk(ctx context.Context) (*walk.Walk, error) {
	cfg, _, err := c.client.Load()
	if err != nil {
		return nil, err
	}
	// A client with a limit would refuse the last request of a step before its deadline, and that would hide what the step waits for.
	client, err := kubernetes.NewForConfig(apiclient.Tuned(cfg, "fairlead-migrate/"+base.Version))
	if err != nil {
		return nil, err
	}
	return walk.New(ctx, walk.Options{Client: client, Out: c.Out, Nodes: c.nodes, Image: c.image, Timeout: c.timeout})
}

// run returns the RunE of a sub-command that walks.
func (c *command) run(do func(*walk.Walk, context.Context) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		w, err := c.walk(cmd.Context())
		if err != nil {
			return err
		}
		return do(w, cmd.Context())
	}
}

func (c *command) apply() *cobra.Command {
	return c.addWalk(&cobra.Command{
		Use: "apply", Short: "Change nodes to fairlead proxy, one by one",
		Example: "  fairlead migrate apply --nodes node1 --image registry.example.com/fairlead:0.1.0",
		RunE:    c.run((*walk.Walk).Apply),
	})
}

func (c *command) rollback() *cobra.Command {
	return c.addWalk(&cobra.Command{
		Use: "rollback", Short: "Change nodes back to kube-proxy, one by one",
		Long: `Change nodes back to kube-proxy, one by one. With the last node, fairlead's objects are
removed from the cluster and kube-proxy's DaemonSet is as it was before.`,
		Example: "  fairlead migrate rollback\n  fairlead migrate rollback --nodes node1",
		RunE:    c.run((*walk.Walk).Rollback),
	})
}

func (c *command) verify() *cobra.Command {
	return c.addWalk(&cobra.Command{
		Use: "verify", Short: "Check the rules of every node against the API",
		Long: `Check every node with a Pod that runs there once. With fairlead proxy it compares every
frontend in the kernel with the API and asks the proxy's health; with kube-proxy it asks
for its health, and when it wrote its rules.`,
		Example: "  fairlead migrate verify --nodes node1",
		RunE:    c.run((*walk.Walk).Verify),
	})
}

func (c *command) plan() *cobra.Command {
	cmd := c.add(&cobra.Command{
		Use: "plan", Short: "Show what will behave differently, and what is refused",
		Long: `Show what runs on the cluster, what will behave differently, and what keeps 'apply' from
working. It changes nothing. It exits with 1 if something is refused.`,
		Example: "  fairlead migrate plan --kubeconfig ~/.kube/config -o json",
		PreRunE: func(*cobra.Command, []string) error { return c.output.Check() },
		RunE: c.run(func(w *walk.Walk, _ context.Context) error {
			p := w.Plan()
			if err := c.output.Write(c.Out, p, func(out io.Writer) error { return printPlan(out, p) }); err != nil {
				return err
			}
			if n := len(p.Refused); n > 0 {
				return fmt.Errorf("'fairlead migrate apply' refuses this cluster for %d reasons", n)
			}
			return nil
		}),
	})
	c.output.Add(cmd)
	return cmd
}

func printPlan(out io.Writer, p *migrate.Plan) error {
	var b strings.Builder
	list := func(title string, lines []string) {
		if len(lines) > 0 {
			fmt.Fprintf(&b, "%s:\n  - %s\n", title, strings.Join(lines, "\n  - "))
		}
	}
	if p.KubeProxy != "" {
		fmt.Fprintf(&b, "kube-proxy: %s\n", p.KubeProxy)
	}
	list("refused", p.Refused)
	list("differs", p.Differs)
	list("not changed", p.Beside)
	var nodes []string
	for _, n := range p.Nodes {
		line := n.Name + ": " + n.Phase.String() + " -> " + migrate.After.String()
		if n.Skipped != "" {
			line = n.Name + ": left as it is: " + n.Skipped
		}
		nodes = append(nodes, line)
	}
	list("nodes, in this order", nodes)
	_, err := io.WriteString(out, b.String())
	return err
}

func (c *command) status() *cobra.Command {
	cmd := c.add(&cobra.Command{
		Use: "status", Short: "Show the phase of each node",
		Long: `Show the phase of each node: kube-proxy (not changed), beside (both run), switched (only
fairlead proxy runs, and kube-proxy's rules are not removed yet), fairlead (done), or
returning (only kube-proxy runs, and fairlead's rules are not removed yet).`,
		Example: "  fairlead migrate status -o json",
		PreRunE: func(*cobra.Command, []string) error { return c.output.Check() },
		RunE: c.run(func(w *walk.Walk, _ context.Context) error {
			nodes := w.Plan().Nodes
			return c.output.Write(c.Out, nodes, func(out io.Writer) error {
				tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
				fmt.Fprintln(tw, "NODE\tPHASE\tLAST FAILURE")
				for _, n := range nodes {
					fmt.Fprintf(tw, "%s\t%s\t%s\n", n.Name, n.Phase, base.PlainLine(n.Failure))
				}
				return tw.Flush()
			})
		}),
	})
	c.output.Add(cmd)
	return cmd
}

// checkNode is what the Pods that check a node run.
func (c *command) checkNode() *cobra.Command {
	var o nodecheck.Options
	var program, healthz, metrics string
	cmd := &cobra.Command{
		Use: "check-node", Hidden: true, Args: base.NoArgs, Short: "Check the rules of this node (run by 'fairlead migrate')",
		Example: "  fairlead migrate check-node --node node1 --program fairlead",
		PreRunE: func(*cobra.Command, []string) error {
			if o.Kernel = program == string(migrate.Fairlead); !o.Kernel && program != string(migrate.KubeProxy) {
				return base.Usagef("--program is %q; want fairlead or kube-proxy", program)
			}
			for flag, to := range map[string]struct {
				text string
				at   *netip.AddrPort
			}{"healthz": {healthz, &o.Healthz}, "metrics": {metrics, &o.Metrics}} {
				if to.text == "" {
					continue
				}
				at, err := netip.ParseAddrPort(to.text)
				if err != nil {
					return base.Usagef("--%s is %q; want IP:PORT", flag, to.text)
				}
				*to.at = at
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Client, _, err = c.client.Client(); err != nil {
				return err
			}
			n, err := nodecheck.Check(cmd.Context(), o)
			if err != nil {
				return err
			}
			switch {
			case o.Kernel:
				fmt.Fprintf(c.Out, "%d frontends in the kernel, as the API has them\n", n)
			default:
				fmt.Fprintln(c.Out, "kube-proxy is healthy and has written its rules")
			}
			return nil
		},
	}
	c.client.Add(cmd)
	cmd.Flags().StringVar(&o.Node, "node", "", "name of this node")
	cmd.Flags().StringVar(&program, "program", "", "whose rules: fairlead or kube-proxy")
	cmd.Flags().StringVar(&healthz, "healthz", "", "IP:PORT of the proxy's health checks")
	cmd.Flags().StringVar(&metrics, "metrics", "", "IP:PORT of the proxy's metrics")
	cmd.Flags().DurationVar(&o.Within, "within", time.Minute, "how long differences may last")
	return cmd
}
