package status

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/runner/api"
)

// topInterval is the time between two reports of 'fairlead top --watch'.
const topInterval = 3 * time.Second

// summaryPath is where an agent answers with api.Summary.
const summaryPath = "stats/summary"

// topCommand shows what nodes and Pods use.
type topCommand struct {
	*base.Global
	base.ClientFlags
	output   base.OutputFlag
	sortBy   string
	selector string
	all      bool
	watch    bool
}

// topReport is what 'fairlead top' shows. Its JSON form is meant for programs: fields are
// only ever added.
type topReport struct {
	Nodes []topRow `json:"nodes,omitempty"`
	Pods  []topRow `json:"pods,omitempty"`
	// Problems are why rows have no usage.
	Problems []string `json:"problems"`
}

// topRow is the usage of a node or Pod; nil is unknown.
type topRow struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	Node      string `json:"node,omitempty"`
	// CPUNanoCores are billionths of a processor, MemoryBytes the working set.
	CPUNanoCores *uint64 `json:"cpuNanoCores"`
	MemoryBytes  *uint64 `json:"memoryBytes"`
	// CPUPercent and MemoryPercent are of what the node has.
	CPUPercent    *int64 `json:"cpuPercent,omitempty"`
	MemoryPercent *int64 `json:"memoryPercent,omitempty"`
}

func topSorts() []string { return []string{"name", "cpu", "memory"} }

// NewTop returns 'fairlead top'.
func NewTop(g *base.Global) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the usage of nodes and Pods, and the connections to Services",
		Long: `Show what nodes and Pods use at this moment: processors in thousandths (m) and memory
without what the kernel would drop first. Nodes measure it by their control groups of
version 2. 'fairlead top services' shows the connections to Services, as nodes count them.
The server asks the nodes, which needs the right to get nodes/proxy.`,
		Example: `  fairlead top nodes
  fairlead top pods -A --sort-by memory
  fairlead top services -A --watch`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	nodes := &topCommand{Global: g}
	sub := &cobra.Command{
		Use: "nodes [NAME]", Aliases: []string{"node", "no"},
		Short: "Show the usage and the capacity of nodes",
		Example: `  fairlead top nodes
  fairlead top nodes -l zone=a --sort-by cpu --watch`,
		Args: oneName,
		RunE: func(cmd *cobra.Command, args []string) error { return nodes.run(cmd.Context(), nodes.nodes, args) },
	}
	nodes.addFlags(sub)
	cmd.AddCommand(sub)
	pods := &topCommand{Global: g}
	sub = &cobra.Command{
		Use: "pods [NAME]", Aliases: []string{"pod", "po"},
		Short: "Show the usage of Pods",
		Example: `  fairlead top pods
  fairlead top pods -n shop -l app=web
  fairlead top pods -A --sort-by memory -o json`,
		Args: oneName,
		RunE: func(cmd *cobra.Command, args []string) error { return pods.run(cmd.Context(), pods.pods, args) },
	}
	cmd.AddCommand(newTopServices(g))
	pods.addFlags(sub)
	pods.AddNamespace(sub)
	sub.Flags().BoolVarP(&pods.all, "all-namespaces", "A", false, "Pods of all namespaces")
	cmd.AddCommand(sub)
	return cmd
}

// oneName rejects more than one name.
func oneName(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return base.Usagef("%s takes one name at most, but got %q", cmd.CommandPath(), strings.Join(args, " "))
	}
	return nil
}

func (c *topCommand) addFlags(cmd *cobra.Command) {
	c.Add(cmd)
	c.output.Add(cmd)
	cmd.Flags().StringVar(&c.sortBy, "sort-by", "name", base.OneOf(topSorts())+"; the largest first")
	cmd.Flags().StringVarP(&c.selector, "selector", "l", "", "labels, such as app=web,tier!=back")
	cmd.Flags().BoolVarP(&c.watch, "watch", "w", false, "show it again every "+topInterval.String())
}

type topSource func(ctx context.Context, client kubernetes.Interface, namespace, name string) (*topReport, error)

func (c *topCommand) run(ctx context.Context, source topSource, args []string) error {
	if err := c.output.Check(); err != nil {
		return err
	}
	if !slices.Contains(topSorts(), c.sortBy) {
		return base.Usagef("--sort-by is %q; want %s", c.sortBy, base.Wanted(c.sortBy, topSorts()))
	}
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	if name != "" && (c.all || c.selector != "") {
		return base.Usagef("a name takes the place of --selector and --all-namespaces: give one or the other")
	}
	client, namespace, err := c.Client()
	if err != nil {
		return err
	}
	if c.all {
		namespace = metav1.NamespaceAll
	}
	for {
		if err := c.once(ctx, source, client, namespace, name); err != nil || !c.watch {
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

func (c *topCommand) once(ctx context.Context, source topSource, client kubernetes.Interface, namespace, name string) error {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	r, err := source(ctx, client, namespace, name)
	if err != nil {
		return err
	}
	rows := append(r.Nodes, r.Pods...)
	known := slices.ContainsFunc(rows, func(w topRow) bool { return w.CPUNanoCores != nil })
	slices.Sort(r.Problems)
	if len(rows) > 0 && !known && len(r.Problems) > 0 {
		return errors.New(strings.Join(r.Problems, "; "))
	}
	for _, rows := range [][]topRow{r.Nodes, r.Pods} {
		slices.SortFunc(rows, c.compare)
	}
	if c.output != "json" {
		for _, p := range r.Problems {
			fmt.Fprintln(c.Err, "!", p)
		}
	}
	return c.output.Write(c.Out, r, r.print)
}

func (c *topCommand) compare(a, b topRow) int {
	value := func(p *uint64) uint64 {
		if p == nil {
			return 0
		}
		return *p
	}
	byName := cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	switch c.sortBy {
	case "cpu":
		return cmp.Or(cmp.Compare(value(b.CPUNanoCores), value(a.CPUNanoCores)), byName)
	case "memory":
		return cmp.Or(cmp.Compare(value(b.MemoryBytes), value(a.MemoryBytes)), byName)
	}
	return byName
}

func (c *topCommand) nodes(ctx context.Context, client kubernetes.Interface, _, name string) (*topReport, error) {
	o := metav1.ListOptions{LabelSelector: c.selector}
	if name != "" {
		o.FieldSelector = "metadata.name=" + name
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, o)
	if err != nil {
		return nil, err
	}
	if name != "" && len(nodes.Items) == 0 {
		return nil, fmt.Errorf("there is no node %s", name)
	}
	var names []string
	for i := range nodes.Items {
		names = append(names, nodes.Items[i].Name)
	}
	stats, problems := askAgents[api.Summary](ctx, asking.New(client), names, summaryPath, nil)
	r := &topReport{Nodes: []topRow{}, Problems: problems}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		w := topRow{Name: n.Name}
		if s := stats[n.Name]; s != nil {
			w.set(s.Node.CPU, s.Node.Memory)
			w.CPUPercent = percent(w.CPUNanoCores, n.Status.Allocatable.Cpu().MilliValue()*1e6)
			w.MemoryPercent = percent(w.MemoryBytes, n.Status.Allocatable.Memory().Value())
		}
		r.Nodes = append(r.Nodes, w)
	}
	return r, nil
}

func (c *topCommand) pods(ctx context.Context, client kubernetes.Interface, namespace, name string) (*topReport, error) {
	o := metav1.ListOptions{LabelSelector: c.selector}
	if name != "" {
		o.FieldSelector = "metadata.name=" + name
	}
	pods, err := client.CoreV1().Pods(namespace).List(ctx, o)
	if err != nil {
		return nil, err
	}
	if name != "" && len(pods.Items) == 0 {
		return nil, fmt.Errorf("there is no Pod %s in namespace %s", name, namespace)
	}
	names := map[string]bool{}
	for i := range pods.Items {
		if p := &pods.Items[i]; p.Status.Phase == corev1.PodRunning {
			names[p.Spec.NodeName] = true
		}
	}
	stats, problems := askAgents[api.Summary](ctx, asking.New(client), slices.Collect(maps.Keys(names)), summaryPath, nil)
	used := map[string]api.PodStats{}
	for node, s := range stats {
		for _, p := range s.Pods {
			used[p.PodRef.Namespace+"/"+p.PodRef.Name] = p
		}
		if why := s.Node.PodsUnmeasured; why != "" {
			problems = append(problems, fmt.Sprintf("node %s does not measure Pods: %s", node, base.PlainLine(why)))
		}
	}
	r := &topReport{Pods: []topRow{}, Problems: problems}
	for i := range pods.Items {
		p := &pods.Items[i]
		if p.Status.Phase != corev1.PodRunning {
			continue
		}
		w := topRow{Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName}
		if s, ok := used[p.Namespace+"/"+p.Name]; ok {
			w.set(s.CPU, s.Memory)
		}
		r.Pods = append(r.Pods, w)
	}
	return r, nil
}

func (w *topRow) set(cpu *api.CPUStats, memory *api.MemoryStats) {
	if cpu != nil && memory != nil {
		w.CPUNanoCores, w.MemoryBytes = &cpu.UsageNanoCores, &memory.WorkingSetBytes
	}
}

// percent returns the part of whole, nil if one of both is unknown.
func percent(part *uint64, whole int64) *int64 {
	if part == nil || whole <= 0 {
		return nil
	}
	return new(int64(float64(*part) * 100 / float64(whole)))
}

// askAgents asks the agents, or the proxies, of nodes at a path, all at once, and returns their answers, and why
// there is none of others, sorted.
func askAgents[T any](ctx context.Context, from *asking.Nodes, nodes []string, path string, query url.Values) (map[string]*T, []string) {
	var mu sync.Mutex
	out, problems := map[string]*T{}, []string{}
	var group errgroup.Group
	group.SetLimit(askAtOnce)
	for _, name := range nodes {
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			text, err := from.Get(ctx, name, path, query)
			var answer T
			if err == nil {
				err = json.Unmarshal(text, &answer)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				problems = append(problems, fmt.Sprintf("node %s: %s", name, base.PlainLine(asking.WhyNot(err))))
				return nil
			}
			out[name] = &answer
			return nil
		})
	}
	_ = group.Wait() // the functions return no errors: they are in problems
	slices.Sort(problems)
	return out, problems
}

func (r *topReport) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	cpu := func(v *uint64) string {
		if v == nil {
			return "<unknown>"
		}
		return fmt.Sprintf("%dm", (*v+999_999)/1_000_000)
	}
	memory := func(v *uint64) string {
		if v == nil {
			return "<unknown>"
		}
		return fmt.Sprintf("%dMi", *v>>20)
	}
	part := func(v *int64) string {
		if v == nil {
			return "<unknown>"
		}
		return fmt.Sprintf("%d%%", *v)
	}
	if r.Pods != nil {
		fmt.Fprintln(w, "NAMESPACE\tNAME\tNODE\tCPU(cores)\tMEMORY(bytes)")
		for _, p := range r.Pods {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", p.Namespace, p.Name, p.Node, cpu(p.CPUNanoCores), memory(p.MemoryBytes))
		}
		return w.Flush()
	}
	fmt.Fprintln(w, "NAME\tCPU(cores)\tCPU(%)\tMEMORY(bytes)\tMEMORY(%)")
	for _, n := range r.Nodes {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", n.Name, cpu(n.CPUNanoCores), part(n.CPUPercent), memory(n.MemoryBytes), part(n.MemoryPercent))
	}
	return w.Flush()
}
