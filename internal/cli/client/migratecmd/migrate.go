// Package migratecmd has 'fairlead migrate'.
package migratecmd

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dataplane/handover"
	lbv1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate"
	dnswalk "github.com/fairlead/fairlead/internal/migrate/coredns/walk"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
	lbwalk "github.com/fairlead/fairlead/internal/migrate/metallb/walk"
	"github.com/fairlead/fairlead/internal/migrate/nodecheck"
	"github.com/fairlead/fairlead/internal/migrate/walk"
)

// command is the state of 'fairlead migrate' and its sub-commands.
type command struct {
	*base.Global
	client    base.ClientFlags
	component string
	nodes     []string
	image     string
	timeout   time.Duration
	end       bool
	output    base.OutputFlag
}

// The components of --component.
const (
	proxyComponent = "proxy"
	dnsComponent   = "dns"
	lbComponent    = "lb"
)

func components() []string { return []string{proxyComponent, dnsComponent, lbComponent} }

// NewMigrate returns 'fairlead migrate'.
func NewMigrate(g *base.Global) *cobra.Command {
	c := &command{Global: g}
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Change a Kubernetes cluster from kube-proxy, CoreDNS and MetalLB to fairlead, and back",
		Long: `Change a Kubernetes cluster from kube-proxy to fairlead proxy, from CoreDNS to fairlead dns,
or from MetalLB to fairlead lb, and back.

With --component proxy, the default, nodes are changed one by one. The proxy gets the flags
and the file that kube-proxy has. On each node both run beside each other until the new rules
are in the kernel and equal to what the API has; then kube-proxy ends, and its rules are
removed. Established connections stay; rules of mode ipvs stay as long as connections go through
them. The phase of a node is its label fairlead.dev/proxy.

With --component dns, fairlead dns gets the Corefile, ports, probes and nodes of CoreDNS. When
its answers equal CoreDNS's, the Service kube-dns selects the Pods of both, then only the ones
of fairlead dns, and CoreDNS is scaled to 0. The Service keeps its address. The phase is the annotation
fairlead.dev/dns of CoreDNS's Deployment.

With --component lb, fairlead lb gets the nodes and the pools of MetalLB, whose Services keep
their addresses. MetalLB's speakers end when the nodes of fairlead lb announce every address.
Where pools are announced by BGP, nodes change their sessions one by one, while others have
routes. The phase is the annotation fairlead.dev/lb of the DaemonSet of MetalLB's speakers,
and of a node with BGP the label fairlead.dev/lb.

An interrupted command is continued by the next one, and 'apply' and 'rollback' lead on from
every phase. Both stop at the first failure.`,
		Example: `  fairlead migrate plan --kubeconfig ~/.kube/config
  fairlead migrate apply --nodes node1      # one node first
  fairlead migrate apply                    # all others
  fairlead migrate apply --component dns
  fairlead migrate apply --component lb
  fairlead migrate verify
  fairlead migrate rollback`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(c.plan(), c.apply(), c.verify(), c.rollback(), c.status(), c.checkNode(), c.drainNode(), c.compareDNS(),
		c.checkSessions())
	return cmd
}

const defaultTimeout = 3 * time.Minute

// add adds a sub-command's flags. of is the default of --component.
func (c *command) add(cmd *cobra.Command, of string) *cobra.Command {
	c.client.Add(cmd)
	cmd.Args = base.NoArgs
	known := components()
	usage := base.OneOf(known)
	if of == "" {
		usage += " (default: all)"
	}
	cmd.Flags().StringVar(&c.component, "component", of, usage)
	cmd.Flags().StringSliceVar(&c.nodes, "nodes", nil, "names of the nodes, for --component proxy (default: all)")
	_ = cmd.RegisterFlagCompletionFunc("nodes", base.CompleteNames(base.NodeNames))
	_ = cmd.RegisterFlagCompletionFunc("component", cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp))
	check := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if !slices.Contains(known, c.component) && (c.component != "" || of != "") {
			return base.Usagef("--component is %q; want %s", c.component, base.Wanted(c.component, known))
		}
		if len(c.nodes) > 0 && c.component != proxyComponent && c.component != "" {
			return base.Usagef("--nodes is for --component proxy; %s has no nodes to choose", c.component)
		}
		if c.end && c.component != proxyComponent {
			return base.Usagef("--end-connections is for --component proxy; %s has no rules with connections of their own", c.component)
		}
		return check(cmd, args)
	}
	return cmd
}

// addWalk adds the flags of a sub-command that runs Pods.
func (c *command) addWalk(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVar(&c.image, "image", "", "image of fairlead (default: the one in use, else that of deploy/kubernetes)")
	cmd.Flags().DurationVar(&c.timeout, "timeout", defaultTimeout, "how long to wait for each step")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if c.timeout <= 0 {
			return base.Usagef("--timeout is %s; want more than 0", c.timeout)
		}
		return nil
	}
	return c.add(cmd, proxyComponent)
}

// walks are the components that a command is about.
type walks struct {
	proxy *walk.Walk
	dns   *dnswalk.Walk
	lb    lbWalker
	// unseen is why components that nobody named could not be looked at.
	unseen []string
}

// lbWalker is a walker with a plan of load balancers.
type lbWalker interface {
	walker
	Plan() *metallb.Plan
}

// look looks at the cluster.
func (c *command) look(ctx context.Context) (w walks, err error) {
	cfg, _, err := c.client.Load()
	if err != nil {
		return w, err
	}
	// A client with a limit would refuse the last request of a step before its deadline, and that would hide what the step waits for.
	client, err := kubernetes.NewForConfig(apiclient.Tuned(cfg, "fairlead-migrate/"+base.Version))
	if err != nil {
		return w, err
	}
	if c.component == proxyComponent || c.component == "" {
		w.proxy, err = walk.New(ctx, walk.Options{Client: client, Out: c.Out, Nodes: c.nodes, Image: c.image, Timeout: c.timeout,
			EndConnections: c.end})
	}
	if err == nil && (c.component == lbComponent || c.component == "") {
		lb, lookErr := c.lookAtLB(ctx, cfg, client)
		if lookErr == nil {
			w.lb = lb
		}
		err = c.unlooked(&w, lbComponent, lookErr)
	}
	if err == nil && (c.component == dnsComponent || c.component == "") {
		dns, lookErr := dnswalk.New(ctx, dnswalk.Options{Client: client, Out: c.Out, Image: c.image, Timeout: c.timeout})
		if lookErr == nil {
			w.dns = dns
		}
		err = c.unlooked(&w, dnsComponent, lookErr)
	}
	return w, err
}

func (c *command) lookAtLB(ctx context.Context, cfg *rest.Config, client kubernetes.Interface) (*lbwalk.Walk, error) {
	lb, err := lbv1.NewClient(apiclient.Tuned(cfg, "fairlead-migrate/"+base.Version))
	if err != nil {
		return nil, err
	}
	return lbwalk.New(ctx, lbwalk.Options{Client: client, LB: lb, Out: c.Out, Image: c.image, Timeout: c.timeout})
}

// unlooked returns the error of a look at a component if it was asked for by name. Otherwise the plan of the others is shown with it.
func (c *command) unlooked(w *walks, component string, err error) error {
	if err == nil || c.component != "" {
		return err
	}
	w.unseen = append(w.unseen, fmt.Sprintf("--component %s: %v", component, err))
	return nil
}

// walker changes one component.
type walker interface {
	Apply(ctx context.Context) error
	Rollback(ctx context.Context) error
	Verify(ctx context.Context) error
}

// run returns the RunE of a sub-command that walks.
func (c *command) run(do func(walker, context.Context) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		w, err := c.look(cmd.Context())
		if err != nil {
			return err
		}
		switch {
		case w.dns != nil:
			return do(w.dns, cmd.Context())
		case w.lb != nil:
			return do(w.lb, cmd.Context())
		}
		return do(w.proxy, cmd.Context())
	}
}

func (c *command) apply() *cobra.Command {
	cmd := &cobra.Command{
		Use: "apply", Short: "Change nodes to fairlead proxy, one by one, DNS to fairlead dns, or load balancers to fairlead lb",
		Long: `Change nodes to fairlead proxy, one by one, DNS to fairlead dns, or load balancers to
fairlead lb.

Where kube-proxy is in mode ipvs, a node keeps its last rules while connections go through
them, and the command goes on with the next node and ends with exit code 0. 'status' shows
these nodes as switched. Run it again later to remove the rules, or end the connections with
--end-connections.`,
		Example: `  fairlead migrate apply --nodes node1 --image registry.example.com/fairlead:0.1.0
  fairlead migrate apply --component dns
  fairlead migrate apply --component lb
  fairlead migrate apply --end-connections  # of nodes that still keep rules of mode ipvs`,
		RunE: c.run(walker.Apply),
	}
	cmd.Flags().BoolVar(&c.end, "end-connections", false,
		"remove the rules of kube-proxy's mode ipvs although connections go through them")
	return c.addWalk(cmd)
}

func (c *command) rollback() *cobra.Command {
	return c.addWalk(&cobra.Command{
		Use: "rollback", Short: "Change nodes back to kube-proxy, one by one, DNS back to CoreDNS, or load balancers back to MetalLB",
		Long: `Change nodes back to kube-proxy, one by one. With the last node, fairlead's objects are
removed from the cluster and kube-proxy's DaemonSet is as it was before.

With --component dns, CoreDNS gets as many Pods as before. When the Service selects them,
fairlead's objects are removed.

With --component lb, MetalLB's controller and speakers start again, with BGP node by node.
When they have had the time to announce, fairlead lb ends, and its objects are removed.`,
		Example: "  fairlead migrate rollback\n  fairlead migrate rollback --nodes node1\n  fairlead migrate rollback --component dns\n" +
			"  fairlead migrate rollback --component lb",
		RunE: c.run(walker.Rollback),
	})
}

func (c *command) verify() *cobra.Command {
	return c.addWalk(&cobra.Command{
		Use: "verify", Short: "Check the rules of every node against the API, the answers of DNS, or the announced addresses",
		Long: `Check every node with a Pod that runs there once. With fairlead proxy it compares every
frontend in the kernel with the API and asks the proxy's health; with kube-proxy it asks
for its health, and looks for its rules for the endpoints that the API has.

With --component dns, a Pod compares the answers of fairlead dns and of CoreDNS while both
run. Afterwards it compares the answers at the Service's addresses and at fairlead's Pods.`,
		Example: "  fairlead migrate verify --nodes node1\n  fairlead migrate verify --component dns",
		RunE:    c.run(walker.Verify),
	})
}

// checkNode is what the Pods that check a node run.
func (c *command) checkNode() *cobra.Command {
	var o nodecheck.Options
	var program, healthz, metrics string
	var takeClients bool
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
				fmt.Fprintf(c.Out, "kube-proxy is healthy and has rules for %d endpoints, as the API has them\n", n)
			}
			if takeClients {
				if err := handover.FromKubeProxy(cmd.Context()); err != nil {
					fmt.Fprintln(c.Out, "Warning:", err) // no connection fails for that
				}
			}
			return nil
		},
	}
	c.client.Add(cmd)
	cmd.Flags().StringVar(&o.Node, "node", "", "name of this node")
	cmd.Flags().StringVar(&program, "program", "", "whose rules: fairlead or kube-proxy")
	cmd.Flags().StringVar(&o.KubeProxy, "mode", "", "mode of kube-proxy, to compare its rules, too: iptables, ipvs or nftables")
	cmd.Flags().StringVar(&healthz, "healthz", "", "IP:PORT of the proxy's health checks")
	cmd.Flags().StringVar(&metrics, "metrics", "", "IP:PORT of the proxy's metrics")
	cmd.Flags().DurationVar(&o.Within, "within", time.Minute, "how long differences may last")
	cmd.Flags().BoolVar(&takeClients, "take-clients", false, "keep clients with session affinity where kube-proxy keeps them")
	return cmd
}
