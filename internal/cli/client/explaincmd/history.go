package explaincmd

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
)

// MaxSince is how long an agent remembers.
const MaxSince = time.Hour

// History is what 'fairlead history' shows. Its JSON form is meant for programs: fields are only ever added.
type History struct {
	Service string        `json:"service"`
	Since   time.Time     `json:"since"`
	Changes []nodeHistory `json:"changes"`
	// Problems are of nodes that could not be asked.
	Problems []string `json:"problems,omitempty"`
	// NotAsked is how many nodes were left out.
	NotAsked int `json:"notAsked,omitempty"`
}

type nodeHistory struct {
	Node string `json:"node"`
	proxy.Past
}

// NewHistory returns 'fairlead history'.
func NewHistory(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output base.OutputFlag
	var node string
	var since time.Duration
	cmd := &cobra.Command{
		Use:   "history SERVICE",
		Short: "Show what the nodes had for a Service in the last hour, and when that changed",
		Long: `Show when the nodes programmed another state of a Service: its addresses, and the endpoints
of each. A node remembers an hour, and less when very much changes; what was before the start
of its agent is not known.`,
		Example: `  fairlead history my-service
  fairlead history shop/my-service --node node2 --since 10m`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return base.Usagef("fairlead history takes one Service, but got %q", args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.Check(); err != nil {
				return err
			}
			if since <= 0 || since > MaxSince {
				return base.Usagef("--since is %s; want a time of at most %s, such as 10m", since, MaxSince)
			}
			nodes, namespace, err := userNodes(&f)
			if err != nil {
				return err
			}
			q, err := parseQuestion(args[0], "", cmp.Or(namespace, metav1.NamespaceDefault))
			if err != nil {
				return err
			}
			if q.Service == (svc.Name{}) {
				return base.Usagef("%q is not a SERVICE or NAMESPACE/SERVICE", args[0])
			}
			r, err := Past(cmd.Context(), nodes, q.Service, node, since)
			if err != nil {
				return err
			}
			return output.Write(g.Out, r, r.print)
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	output.Add(cmd)
	cmd.Flags().StringVar(&node, "node", "", "only this node (default: all nodes)")
	cmd.Flags().DurationVar(&since, "since", MaxSince, "how far back")
	return cmd
}

// Past asks nodes for what they had for a Service, with the rights of their user; an empty node is for all of them.
func Past(ctx context.Context, from *asking.Nodes, service svc.Name, node string, since time.Duration) (*History, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	c := &cluster{nodes: map[string]*corev1.Node{}}
	c.readNodes(ctx, from.Client())
	nodes, left, err := c.choose(node, &explain.Question{Service: service})
	if err != nil {
		return nil, err
	}
	r := &History{Service: service.String(), Since: time.Now().Add(-since).UTC(), Changes: []nodeHistory{}, NotAsked: left}
	lists, problems := make([][]proxy.Past, len(nodes)), make([]string, len(nodes))
	atOnce(nodes, func(i int, n string) { lists[i], problems[i] = pastOf(ctx, from, n, service, since) })
	for i, n := range nodes {
		if problems[i] != "" {
			r.Problems = append(r.Problems, problems[i])
		}
		for _, p := range lists[i] {
			r.Changes = append(r.Changes, nodeHistory{n, p})
		}
	}
	slices.SortStableFunc(r.Changes, func(a, b nodeHistory) int { return a.Time.Compare(b.Time) })
	return r, nil
}

// pastOf asks one node, and returns why it has no answer.
func pastOf(ctx context.Context, from *asking.Nodes, node string, service svc.Name, since time.Duration) (list []proxy.Past,
	problem string) {
	if node == "" {
		return nil, noNodes
	}
	text, err := from.Get(ctx, node, "history", url.Values{"service": {service.String()}, "since": {since.String()}})
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil {
		return nil, fmt.Sprintf("node %s: %s", node, asking.WhyNot(err))
	}
	return list, ""
}

func (r *History) print(out io.Writer) error {
	if len(r.Changes) == 0 {
		fmt.Fprintf(out, "nothing changed for Service %s since %s\n", r.Service, r.Since.Local().Format(time.TimeOnly))
	}
	for _, c := range r.Changes {
		fmt.Fprintf(out, "%s  node %s\n", c.Time.Local().Format("15:04:05.000"), base.PlainLine(c.Node))
		printDifference(out, c.Before, c.After)
	}
	for _, p := range r.Problems {
		if p == noNodes {
			p += ": " + nameOne
		}
		fmt.Fprintln(out, "!", base.PlainLine(p))
	}
	if r.NotAsked > 0 {
		fmt.Fprintf(out, "! "+notAskedText, r.NotAsked)
	}
	return nil
}

// printDifference shows the lines that were and are there, each frontend in one.
func printDifference(out io.Writer, before, after string) {
	was, is := strings.Split(strings.TrimSpace(before), "\n"), strings.Split(strings.TrimSpace(after), "\n")
	for _, l := range was {
		if l != "" && !slices.Contains(is, l) {
			fmt.Fprintln(out, "  -", base.PlainLine(l))
		}
	}
	for _, l := range is {
		if l != "" && !slices.Contains(was, l) {
			fmt.Fprintln(out, "  +", base.PlainLine(l))
		}
	}
}
