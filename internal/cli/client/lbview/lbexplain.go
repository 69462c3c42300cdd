package lbview

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/lb/claim"
)

// lbExplanation is what 'fairlead lb explain' shows of a Service. Its JSON form is meant for
// programs: fields are only ever added.
type lbExplanation struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	*dialect.Reading
	// Front is what the Service of a Gateway, or of Ingresses, leads to; nil without a cluster.
	Front *lbFront `json:"front,omitempty"`
}

// maxManifest is the largest file that is read.
const maxManifest = 16 << 20

// NewExplain returns 'fairlead lb explain'.
func NewExplain(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output, file string
	cmd := &cobra.Command{
		Use:   "explain SERVICE | -f FILE",
		Short: "Show how a load balancer reads a Service's annotations, including the ones of clouds",
		Long: `Show what a Service asks of its load balancer: the settings that follow from its
annotations, where each comes from, and which have no meaning on your own machines
or are not supported by this version. With -f the Services of a file are explained
("-" is the standard input), and no cluster is needed. Secrets are never read.
For the Service of a Gateway, or of Ingresses, also its listeners and routes,
where each of their matches leads, and why one is not served.`,
		Example: `  fairlead lb explain web -n shop
  fairlead lb explain -f service.yaml -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			if (len(args) == 1) == (file != "") || len(args) > 1 {
				return base.Usagef("fairlead lb explain takes one Service, or -f FILE")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if output != "table" && output != "json" {
				return base.Usagef("--output is %q; want table or json", output)
			}
			if file != "" {
				services, err := readServices(g.In, file)
				if err != nil {
					return err
				}
				return explainServices(g.Out, services, nil, output)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), base.RequestTimeout)
			defer cancel()
			service, front, err := getService(ctx, &f, args[0])
			if err != nil {
				return err
			}
			return explainServices(g.Out, []corev1.Service{*service}, front, output)
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	cmd.Flags().StringVarP(&file, "filename", "f", "", "file with Services as YAML or JSON, in place of one of the cluster")
	return cmd
}

// getService reads one Service of the cluster, given as NAME or NAMESPACE/NAME, and what it leads to if it is a front.
func getService(ctx context.Context, f *base.ClientFlags, name string) (*corev1.Service, *lbFront, error) {
	config, namespace, err := f.Load()
	if err != nil {
		return nil, nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, err
	}
	gateways, err := api.NewClient(config)
	if err != nil {
		return nil, nil, err
	}
	if ns, rest, ok := strings.Cut(name, "/"); ok {
		namespace, name = ns, rest
	}
	s, err := client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, nil, err
	}
	return s, (&frontObjects{client: client, api: gateways}).frontOf(ctx, s), nil
}

// readServices returns the Services of type LoadBalancer of a file, or if there are none
// its other Services; objects of other kinds are passed over.
func readServices(in io.Reader, file string) ([]corev1.Service, error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	var out, others []corev1.Service
	decoder := yaml.NewYAMLOrJSONDecoder(io.LimitReader(in, maxManifest), 4096)
	for {
		var raw json.RawMessage
		err := decoder.Decode(&raw)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		var kind metav1.TypeMeta
		if len(raw) == 0 || json.Unmarshal(raw, &kind) != nil || kind.Kind != "Service" {
			continue
		}
		var s corev1.Service
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, fmt.Errorf("%s: a Service: %w (values of annotations are strings: write them in quotes)", file, err)
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
			out = append(out, s)
		} else {
			others = append(others, s)
		}
	}
	if len(out) == 0 {
		out = others
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: there is no Service in it", file)
	}
	return out, nil
}

// explainServices explains Services. front is what the only one leads to, nil if it is no front.
func explainServices(w io.Writer, services []corev1.Service, front *lbFront, output string) error {
	var list []lbExplanation
	for i := range services {
		s := &services[i]
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			return fmt.Errorf("%s is of type %s, not LoadBalancer", s.Name, cmp.Or(s.Spec.Type, corev1.ServiceTypeClusterIP))
		}
		list = append(list, lbExplanation{s.Namespace, s.Name, claim.Read(s), front})
	}
	if output == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(map[string]any{"services": list})
	}
	for i := range list {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := list[i].print(w); err != nil {
			return err
		}
	}
	return nil
}

func (e *lbExplanation) print(w io.Writer) error {
	name := e.Name
	if e.Namespace != "" {
		name = e.Namespace + "/" + name
	}
	fmt.Fprintf(w, "Service %s takes the %s way", name, e.Way)
	if len(e.Because) > 0 {
		fmt.Fprintf(w, ", because of %s", strings.Join(e.Because, ", "))
	}
	fmt.Fprint(w, "\n\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PORT\tNAME\tPROTOCOL\tTO PODS")
	for _, l := range e.Spec.Listeners {
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\n", l.Port, cmp.Or(l.Name, "-"), l.Protocol, l.Backend)
	}
	fmt.Fprintln(t, "\nSETTING\tVALUE\tFROM\tIN THIS VERSION")
	for _, f := range slices.Sorted(maps.Keys(e.Origins)) {
		o, effect := e.Origins[f], "yes"
		switch {
		case !f.IsBuilt():
			effect = "no: " + f.Instead()
		case e.Way == dialect.Direct && !f.IsOfBothWays():
			effect = "no: the direct way has no use for it"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", f, base.PlainLine(o.Value), o.From, effect)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, part := range []struct {
		title  string
		states []dialect.State
	}{
		{"Wrong", []dialect.State{dialect.Invalid}},
		{"Unknown", []dialect.State{dialect.Unknown}},
		{"Not done by this version", []dialect.State{dialect.NotYet}},
		{"Overridden", []dialect.State{dialect.Overridden}},
		{"Without an effect in this way", []dialect.State{dialect.Unused}},
		{"Without a meaning here", []dialect.State{dialect.Meaningless}},
		{"Applied", []dialect.State{dialect.Applied}},
	} {
		title := "\n" + part.title + ":\n"
		for _, f := range e.Findings {
			if slices.Contains(part.states, f.State) {
				fmt.Fprintf(w, "%s  %s\n", title, base.PlainLine(prefixed(f.Annotation)+f.Text))
				title = ""
			}
		}
	}
	return e.Front.print(w, name, len(e.Front.routes()), true)
}

func prefixed(key string) string {
	if key == "" {
		return ""
	}
	return key + ": "
}
