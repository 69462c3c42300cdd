package migratecmd

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/coredns"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
)

// plans are what 'plan' shows: the fields of kube-proxy's plan, and one for each other component. Fields are only ever added.
type plans struct {
	*migrate.Plan
	DNS           *coredns.Plan `json:"dns,omitempty"`
	LoadBalancers *metallb.Plan `json:"loadBalancers,omitempty"`
	// Unseen is why other components could not be looked at.
	Unseen []string `json:"unseen,omitempty"`
}

// plans returns the plans of the components, and for how many reasons the component is refused. That is the proxy if none is named:
// 'apply' changes no other then.
func (w *walks) plans(component string) (p plans, refused int) {
	p.Unseen = w.unseen
	count := func(of string, list []string) {
		if component == of {
			refused = len(list)
		}
	}
	if w.proxy != nil {
		p.Plan = w.proxy.Plan()
		count(proxyComponent, p.Refused)
	}
	if w.dns != nil {
		p.DNS = w.dns.Plan()
		count(dnsComponent, p.DNS.Refused)
	}
	if w.lb != nil {
		p.LoadBalancers = w.lb.Plan()
		count(lbComponent, p.LoadBalancers.Refused)
	}
	return p, refused
}

// shows gives a sub-command its flags, and what it shows of the cluster. of is the default of --component.
func (c *command) shows(cmd *cobra.Command, of string, show func(walks) error) *cobra.Command {
	cmd.PreRunE = func(*cobra.Command, []string) error { return c.output.Check() }
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		w, err := c.look(cmd.Context())
		if err != nil {
			return err
		}
		return show(w)
	}
	c.output.Add(cmd)
	return c.add(cmd, of)
}

func (c *command) plan() *cobra.Command {
	return c.shows(&cobra.Command{
		Use: "plan", Short: "Show what will behave differently, and what is refused",
		Long: `Show what runs on the cluster, what will behave differently, and what keeps 'apply' from
working. It changes nothing. It exits with 1 if the component is refused, the proxy if none
is named.`,
		Example: "  fairlead migrate plan --kubeconfig ~/.kube/config -o json\n  fairlead migrate plan --component dns",
	}, "", func(w walks) error {
		component := cmp.Or(c.component, proxyComponent)
		p, refused := w.plans(component)
		if err := c.output.Write(c.Out, p, func(out io.Writer) error { return printPlans(out, p) }); err != nil {
			return err
		}
		if refused > 0 {
			return fmt.Errorf("a change of --component %s is refused for %d reasons", component, refused)
		}
		return nil
	})
}

// printer writes lines.
type printer struct{ strings.Builder }

func (b *printer) list(title string, lines []string) {
	if len(lines) > 0 {
		fmt.Fprintf(b, "%s:\n  - %s\n", title, strings.Join(lines, "\n  - "))
	}
}

func printPlans(out io.Writer, p plans) error {
	var b printer
	if p.Plan != nil {
		b.proxy(p.Plan)
	}
	if p.DNS != nil {
		if p.DNS.CoreDNS != "" {
			fmt.Fprintf(&b, "CoreDNS: %s; phase %s\n", p.DNS.CoreDNS, p.DNS.Phase)
		}
		b.list("refused of DNS", p.DNS.Refused)
		b.list("differs of DNS", p.DNS.Differs)
	}
	if lb := p.LoadBalancers; lb != nil {
		if lb.MetalLB == "" {
			fmt.Fprintln(&b, "MetalLB: none")
		} else {
			fmt.Fprintf(&b, "MetalLB: %s; phase %s; addresses of Services that are taken over: %d\n", lb.MetalLB, lb.Phase, lb.Addresses)
		}
		b.list("refused of load balancers", lb.Refused)
		b.list("differs of load balancers", lb.Differs)
		for _, k := range lb.KubeVIP {
			fmt.Fprintf(&b, "kube-vip: DaemonSet %s, %s; the change is by hand: docs/loadbalancer.md, \"From kube-vip\"\n", k.DaemonSet, k.Image)
			b.list("settings of kube-vip", k.Settings)
		}
	}
	b.list("not looked at", p.Unseen)
	_, err := io.WriteString(out, b.String())
	return err
}

func (b *printer) proxy(p *migrate.Plan) {
	if p.KubeProxy != "" {
		fmt.Fprintf(b, "kube-proxy: %s\n", p.KubeProxy)
	}
	b.list("refused", p.Refused)
	b.list("differs", p.Differs)
	var nodes []string
	for _, n := range p.Nodes {
		line := n.Name + ": " + n.Phase.String() + " -> " + migrate.After.String()
		if n.Skipped != "" {
			line = n.Name + ": left as it is: " + n.Skipped
		}
		nodes = append(nodes, line)
	}
	b.list("nodes, in this order", nodes)
}

// dnsStatus is what 'status --component dns' shows.
type dnsStatus struct {
	Deployment string        `json:"deployment"`
	Phase      coredns.Phase `json:"phase"`
	Failure    string        `json:"failure,omitempty"`
}

func (c *command) status() *cobra.Command {
	return c.shows(&cobra.Command{
		Use: "status", Short: "Show the phase of each node, of DNS, or of load balancers",
		Long: `Show the phase of each node: kube-proxy (not changed), beside (both run), switched (only
fairlead proxy runs, and kube-proxy's rules are not removed yet), fairlead (done), or
returning (only kube-proxy runs, and fairlead's rules are not removed yet).

With --component dns: coredns (not changed), beside (fairlead dns runs, the Service does not
select it), both (it selects both), switched (it selects only fairlead dns, CoreDNS still
runs), fairlead (done), or returning (it selects only CoreDNS, fairlead dns ends).

With --component lb: metallb (not changed), beside (fairlead lb runs without pools), both
(both announce the addresses, by BGP each on some nodes), fairlead (done), or returning
(MetalLB runs again, fairlead lb ends).`,
		Example: "  fairlead migrate status -o json\n  fairlead migrate status --component dns\n  fairlead migrate status --component lb",
	}, proxyComponent, func(w walks) error {
		switch {
		case w.dns != nil:
			return c.dnsStatus(w.dns.Plan())
		case w.lb != nil:
			return c.lbStatus(w.lb.Plan())
		}
		return c.proxyStatus(w.proxy.Plan().Nodes)
	})
}

func (c *command) proxyStatus(nodes []migrate.NodePlan) error {
	return c.output.Write(c.Out, nodes, func(out io.Writer) error {
		tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(tw, "NODE\tPHASE\tLAST FAILURE")
		for _, n := range nodes {
			fmt.Fprintf(tw, "%s\t%s\t%s\n", n.Name, n.Phase, base.PlainLine(n.Failure))
		}
		return tw.Flush()
	})
}

func (c *command) dnsStatus(p *coredns.Plan) error {
	if err := p.Broken(); err != nil {
		return err
	}
	d, _, _ := p.Theirs()
	s := dnsStatus{d.Name, p.Phase, p.Failure}
	return c.writeStatus(s, "DEPLOYMENT", s.Deployment, s.Phase.String(), s.Failure)
}

// lbStatus is what 'status --component lb' shows.
type lbStatus struct {
	DaemonSet string        `json:"daemonSet"`
	Phase     metallb.Phase `json:"phase"`
	Failure   string        `json:"failure,omitempty"`
}

func (c *command) lbStatus(p *metallb.Plan) error {
	if err := p.Broken(); err != nil {
		return err
	}
	d := p.Speaker()
	s := lbStatus{d.Namespace + "/" + d.Name, p.Phase, p.Failure}
	return c.writeStatus(s, "DAEMONSET", s.DaemonSet, s.Phase.String(), s.Failure)
}

// writeStatus writes the status of a component that has one phase.
func (c *command) writeStatus(status any, kind, name, phase, failure string) error {
	return c.output.Write(c.Out, status, func(out io.Writer) error {
		tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintf(tw, "%s\tPHASE\tLAST FAILURE\n%s\t%s\t%s\n", kind, name, phase, base.PlainLine(failure))
		return tw.Flush()
	})
}
