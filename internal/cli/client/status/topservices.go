package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/flows"
)

// topServices shows the connections to Services.
type topServices struct {
	*base.Global
	base.ClientFlags
	output base.OutputFlag
	sortBy string
	all    bool
	watch  bool
	node   string
}

// topServicesReport is what 'fairlead top services' shows. Its JSON form is meant for programs: fields are only ever added.
type topServicesReport struct {
	Services []topService `json:"services"`
	// Problems are the nodes whose counts are missing, and why.
	Problems []string `json:"problems"`
	// Nodes are the nodes that have answered, sorted; NotAsked is how many were left out.
	Nodes    []string `json:"nodes"`
	NotAsked int      `json:"notAsked,omitempty"`
	// At is when they had answered; zero for a command, which shows it at once.
	At time.Time `json:"at,omitzero"`

	answers map[string]*flows.Report // by node
}

// topService is the sum of all nodes for one port of a Service.
type topService struct {
	flows.Port
	// PerSecond are the connections a second since the report before, of the nodes that are in both; nil without such nodes.
	PerSecond *float64 `json:"connectionsPerSecond,omitempty"`
}

func topServicesSorts() []string {
	return []string{"connections", "open", "bytes", "refused", "dropped", "name"}
}

func newTopServices(g *base.Global) *cobra.Command {
	c := &topServices{Global: g}
	cmd := &cobra.Command{
		Use: "services [NAME]", Aliases: []string{"service", "svc"},
		Short: "Show the connections to Services, and the packets that reached no endpoint",
		Long: `Show how many connections nodes have sent to the endpoints of each Service port, and how many
packets they refused (no endpoint) or dropped (source ranges, policy Local). Nodes count in
the kernel. Connections of a port are added up while the agent runs; a count of packets begins
again after a day without such packets. Endpoints that left the Service before the agent began
are not counted. With --watch the column CONN/S is the rate since the report before. The server
asks the nodes, which needs the right to get nodes/proxy. Only mode nft counts connections.

OPEN, SENT and RECEIVED are of the connections that nodes track now: how many, and the bytes
from clients and to clients, with the headers of IP packets. Nodes count bytes with
--conntrack-accounting.`,
		Example: `  fairlead top services
  fairlead top services -A --watch
  fairlead top services web -n shop -o json`,
		Args: oneName,
		RunE: func(cmd *cobra.Command, args []string) error { return c.run(cmd.Context(), args) },
	}
	c.Add(cmd)
	c.AddNamespace(cmd)
	c.output.Add(cmd)
	cmd.Flags().StringVar(&c.sortBy, "sort-by", "connections", base.OneOf(topServicesSorts())+"; the largest first")
	cmd.Flags().StringVar(&c.node, "node", "", "only the counts of this node")
	cmd.Flags().BoolVarP(&c.all, "all-namespaces", "A", false, "Services of all namespaces")
	cmd.Flags().BoolVarP(&c.watch, "watch", "w", false, "show it again every "+topInterval.String())
	return cmd
}

func (c *topServices) run(ctx context.Context, args []string) error {
	if err := c.output.Check(); err != nil {
		return err
	}
	if !slices.Contains(topServicesSorts(), c.sortBy) {
		return base.Usagef("--sort-by is %q; want %s", c.sortBy, base.Wanted(c.sortBy, topServicesSorts()))
	}
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	if name != "" && c.all {
		return base.Usagef("a name takes the place of --all-namespaces: give one or the other")
	}
	cfg, namespace, err := c.Load()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	if c.all {
		namespace = metav1.NamespaceAll
	}
	var before map[string]*flows.Report
	var at time.Time
	for {
		r, err := c.read(ctx, asking.FromHere(client, cfg), namespace, name)
		if err != nil {
			return err
		}
		now := time.Now()
		if !at.IsZero() {
			r.rates(before, now.Sub(at))
		}
		before, at = r.answers, now
		if c.output != "json" {
			for _, p := range r.Problems {
				fmt.Fprintln(c.Err, "!", p)
			}
		}
		if err := c.output.Write(c.Out, r, r.print); err != nil || !c.watch {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(topInterval):
		}
		fmt.Fprintln(c.Out)
	}
}

// read asks the nodes and adds up their answers.
func (c *topServices) read(ctx context.Context, from *asking.Nodes, namespace, name string) (*topServicesReport, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	names := []string{c.node}
	if c.node == "" {
		var err error
		if names, err = base.NodeNames(ctx, from.Client()); err != nil {
			return nil, err
		}
	}
	return connectionsOf(ctx, from, names, namespace, name, false, c.sortBy)
}

// maxNodes bounds the nodes that are asked for a page.
const maxNodes = 200

// ConnectionsOf shows what nodes count of connections to the Services of a namespace, or of all if it is empty, with the clients that have
// them: what 'fairlead top services -o json' prints.
func ConnectionsOf(ctx context.Context, from *asking.Nodes, namespace string) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	names, err := base.NodeNames(ctx, from.Client())
	if err != nil {
		return nil, err
	}
	n := min(len(names), maxNodes)
	r, err := connectionsOf(ctx, from, names[:n], namespace, "", true, "connections")
	if err == nil {
		r.NotAsked, r.At, r.answers = len(names)-n, time.Now().UTC(), nil
	}
	return r, err
}

func connectionsOf(ctx context.Context, from *asking.Nodes, names []string, namespace, name string, clients bool, sortBy string) (
	*topServicesReport, error) {
	var query url.Values
	if clients {
		query = url.Values{"clients": {"true"}}
	}
	answers, problems := askAgents[flows.Report](ctx, from, names, "services", query)
	if len(answers) == 0 && len(problems) > 0 {
		return nil, errors.New(strings.Join(problems, "; "))
	}
	for _, node := range slices.Sorted(maps.Keys(answers)) {
		if !answers[node].CountsConnections {
			problems = append(problems, fmt.Sprintf("node %s counts no connections, only refused and dropped packets: mode nft does", node))
		}
	}
	problems = append(problems, uncounted(answers)...)
	r := &topServicesReport{Services: []topService{}, Problems: problems, answers: answers, Nodes: slices.Sorted(maps.Keys(answers))}
	if r.Nodes == nil {
		r.Nodes = []string{}
	}
	for _, p := range sum(answers) {
		if (namespace == "" || p.Namespace == namespace) && (name == "" || p.Service == name) {
			r.Services = append(r.Services, topService{Port: p})
		}
	}
	slices.SortFunc(r.Services, func(a, b topService) int { return compareServices(sortBy, &a.Port, &b.Port) })
	return r, nil
}

// uncounted names the nodes that do not count the bytes of open connections.
func uncounted(answers map[string]*flows.Report) (problems []string) {
	for _, node := range slices.Sorted(maps.Keys(answers)) {
		switch a := answers[node]; {
		case a.Problem != "":
			problems = append(problems, fmt.Sprintf("node %s: open connections are not known: %s", node, base.PlainLine(a.Problem)))
		case !a.CountsBytes:
			problems = append(problems, fmt.Sprintf("node %s counts no bytes: --conntrack-accounting of its agent or proxy does, "+
				"for connections that begin after that", node))
		}
	}
	return problems
}

func openOf(p *flows.Port) uint64 {
	if p.Open == nil {
		return 0
	}
	return p.Open.Connections
}

func compareServices(by string, a, b *flows.Port) int {
	first := 0
	switch by {
	case "connections":
		first = cmp.Compare(b.Connections, a.Connections)
	case "open":
		first = cmp.Compare(openOf(b), openOf(a))
	case "bytes":
		first = cmp.Compare(b.Open.Bytes(), a.Open.Bytes())
	case "refused":
		first = cmp.Compare(b.Refused, a.Refused)
	case "dropped":
		first = cmp.Compare(b.Dropped, a.Dropped)
	}
	return cmp.Or(first, a.Compare(b))
}

// sum adds up the counts of nodes, sorted.
func sum(answers map[string]*flows.Report) []flows.Port {
	type key [4]string
	ports, endpoints, clients := map[key]*flows.Port{}, map[key]map[string]flows.Endpoint{}, map[key]map[string]*flows.Open{}
	for _, r := range answers {
		for _, p := range r.Ports {
			k := key{p.Namespace, p.Service, p.Port, p.Protocol}
			if ports[k] == nil {
				ports[k] = &flows.Port{Namespace: p.Namespace, Service: p.Service, Port: p.Port, Protocol: p.Protocol}
				endpoints[k], clients[k] = map[string]flows.Endpoint{}, map[string]*flows.Open{}
			}
			ports[k].Connections += p.Connections
			ports[k].Refused += p.Refused
			ports[k].Dropped += p.Dropped
			ports[k].Open = ports[k].Open.Add(p.Open)
			for _, e := range p.Endpoints {
				has := endpoints[k][e.Address]
				endpoints[k][e.Address] = flows.Endpoint{Address: e.Address, Connections: has.Connections + e.Connections, Open: has.Open.Add(e.Open)}
			}
			for i := range p.Clients {
				c := &p.Clients[i]
				clients[k][c.Address] = clients[k][c.Address].Add(&c.Open)
			}
		}
	}
	out := make([]flows.Port, 0, len(ports))
	for k, p := range ports {
		p.Endpoints = []flows.Endpoint{}
		for _, a := range slices.Sorted(maps.Keys(endpoints[k])) {
			p.Endpoints = append(p.Endpoints, endpoints[k][a])
		}
		for a, o := range clients[k] {
			p.Clients = append(p.Clients, flows.Client{Address: a, Open: *o})
		}
		p.Clients = flows.TopClients(p.Clients)
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b flows.Port) int { return a.Compare(&b) })
	return out
}

// rates fills in the connections a second since the earlier answers of nodes. A count that began again counts from 0. A node that is
// missing in one of them has no difference.
func (r *topServicesReport) rates(before map[string]*flows.Report, since time.Duration) {
	type key [4]string
	keyOf := func(p *flows.Port) key { return key{p.Namespace, p.Service, p.Port, p.Protocol} }
	came, known := map[key]uint64{}, false
	for node, now := range r.answers {
		earlier := before[node]
		if earlier == nil {
			continue
		}
		known = true
		was := map[key]uint64{}
		for i := range earlier.Ports {
			was[keyOf(&earlier.Ports[i])] = earlier.Ports[i].Connections
		}
		for i := range now.Ports {
			k, n := keyOf(&now.Ports[i]), now.Ports[i].Connections
			if was[k] <= n {
				n -= was[k]
			}
			came[k] += n
		}
	}
	for i := range r.Services {
		if s := &r.Services[i]; known {
			s.PerSecond = new(float64(came[keyOf(&s.Port)]) / since.Seconds())
		}
	}
}

func (r *topServicesReport) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	fmt.Fprintln(w, "NAMESPACE\tNAME\tPORT\tPROTOCOL\tCONN/S\tCONNECTIONS\tOPEN\tSENT\tRECEIVED\tREFUSED\tDROPPED\tENDPOINTS")
	for _, s := range r.Services {
		rate := "-"
		if s.PerSecond != nil {
			rate = fmt.Sprintf("%.1f", *s.PerSecond)
		}
		open, sent, received := "-", "-", "-"
		if o := s.Open; o != nil {
			open = strconv.FormatUint(o.Connections, 10)
			if o.Connections == 0 || o.Bytes() > 0 {
				sent, received = size(o.Sent.Bytes), size(o.Received.Bytes)
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%d\t%d\t%d\n", base.PlainLine(s.Namespace), base.PlainLine(s.Service),
			base.PlainLine(cmp.Or(s.Port.Port, "-")), base.PlainLine(s.Protocol),
			rate, s.Connections, open, sent, received, s.Refused, s.Dropped, len(s.Endpoints))
	}
	return w.Flush()
}

// size is a number of bytes for people.
func size(n uint64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%dB", n)
	}
	value, unit := float64(n)/(1<<10), 0
	for value >= 1<<10 && unit < 3 {
		value /= 1 << 10
		unit++
	}
	return fmt.Sprintf("%.1f%ciB", value, "KMGT"[unit])
}
