package explaincmd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace"
	"github.com/fairlead/fairlead/internal/trace/follow"
)

// traceFlags are the flags of 'fairlead trace'.
type traceFlags struct {
	base.ClientFlags
	output   base.OutputFlag
	protocol string
	request  requestFlags
}

// NewTrace returns 'fairlead trace'.
func NewTrace(g *base.Global) *cobra.Command {
	var f traceFlags
	cmd := &cobra.Command{
		Use:   "trace [FROM] TO",
		Short: "Send one packet or request, and show its way and what decided",
		Long: `Send one packet and show its way: where the node saw it, which rules of which programs
it met, and what decided. FROM is a Pod or a Node; without it the packet is sent from this
machine, in this network namespace, which needs root here and no agent. TO is a Service
with or without :PORT, ADDRESS:PORT, or a DNS name with or without :PORT.

The packet is the first one of a TCP connection (SYN). The kernel resets the answer, so
that no program gets a connection. With --protocol UDP it is an empty datagram, which its
receiver gets. A node makes one trace at a time, and waits 3 seconds for an answer.

With a URL as TO, this machine sends one HTTP request there, and follows no redirects. The
load balancers of Gateways, Ingresses and Services with an HTTP protocol report what became
of it: the route and the rule that took it, the Pods that were tried, or why they answered
themselves. That needs the rights to list nodes and to get nodes/proxy, or where only
'fairlead lb' runs to list pods and create pods/portforward in kube-system.

A packet from a Node needs the right to create nodes/proxy. One from a Pod needs the right
to create pods/trace in its namespace, which the role edit has; without the first right
the rules of other programs are named by their chain only.`,
		Example: `  fairlead trace web-6d5f9 my-service
  fairlead trace web-6d5f9 my-service.shop.svc.cluster.local:80 -n shop
  fairlead trace node2 203.0.113.7:443 -o json
  sudo fairlead trace 10.96.77.77:80
  fairlead trace https://shop.example/cart --address 203.0.113.7`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return base.Usagef("fairlead trace takes FROM and TO, or only TO, but got %q", args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.output.Check(); err != nil {
				return err
			}
			from, to := "", args[len(args)-1]
			if len(args) == 2 {
				if from = args[0]; from == "" {
					return base.Usagef("FROM is empty; want a Pod or a Node")
				}
			}
			log, err := g.Logger()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), base.RequestTimeout)
			defer cancel()
			if isURL(to) {
				if from != "" || f.protocol != "" {
					return base.Usagef("a request to a URL is sent from this machine by HTTP: leave out FROM and --protocol")
				}
				r, err := f.traceRequest(ctx, to)
				if err != nil {
					return err
				}
				return f.output.Write(g.Out, r, func(out io.Writer) error { return printRequest(out, r) })
			}
			if err := onlyForURLs(cmd); err != nil {
				return err
			}
			r, err := f.trace(ctx, log, from, to)
			if err != nil {
				return err
			}
			return f.output.Write(g.Out, r, func(out io.Writer) error { printTrace(out, r); return nil })
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	f.output.Add(cmd)
	f.request.add(cmd)
	cmd.Flags().StringVar(&f.protocol, "protocol", "", "TCP, or UDP for an empty datagram (default TCP)")
	return cmd
}

// trace sends the packet, here or on the node of from.
func (f *traceFlags) trace(ctx context.Context, log *slog.Logger, from, to string) (*trace.Report, error) {
	t := &tracing{from: from, to: to}
	var err error
	if t.protocol, err = svc.ParseProtocol(strings.ToUpper(f.protocol)); err != nil || t.protocol == svc.SCTP {
		return nil, base.Usagef("--protocol is %q; want TCP or UDP", f.protocol)
	}
	t.explicit = f.protocol != ""
	if t.client, t.namespace, err = f.Client(); err != nil {
		at, parsed := netip.ParseAddrPort(to)
		if from != "" || parsed != nil || !errors.Is(err, base.ErrNoKubeconfig) && !errors.Is(err, fs.ErrPermission) {
			return nil, err
		}
		return t.withoutNames(ctx, log, at, err)
	}
	t.namespace = cmp.Or(t.namespace, metav1.NamespaceDefault)
	return t.report(ctx, log)
}

// tracing is one packet to send.
type tracing struct {
	client    kubernetes.Interface
	namespace string
	from, to  string
	protocol  svc.Protocol
	// explicit is set if the protocol was asked for.
	explicit    bool
	cluster     *cluster
	sender      explain.Client
	pod         svc.Name // if the sender is one
	destination netip.AddrPort
}

// thisMachine is the sender without FROM.
const thisMachine = "this machine"

// withoutNames sends a packet from this machine while no API server answers: the report has no names, and why is the reason.
func (t *tracing) withoutNames(ctx context.Context, log *slog.Logger, at netip.AddrPort, why error) (*trace.Report, error) {
	t.destination = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	seen, err := t.here(ctx, log)
	if err != nil {
		return nil, err
	}
	r := trace.Tell(thisMachine, t.to, seen, nil)
	r.Notes = append(r.Notes, "Services and Pods are not named: "+base.OneLine(why))
	return r, nil
}

func (t *tracing) report(ctx context.Context, log *slog.Logger) (*trace.Report, error) {
	q, port, err := parseTarget(t.to, t.namespace)
	if err != nil {
		return nil, err
	}
	switch t.cluster, err = read(ctx, t.client, q, t.namespace); {
	case err != nil && t.from == "" && q.Address.IsValid():
		return t.withoutNames(ctx, log, q.Address, err)
	case err != nil:
		return nil, err
	}
	if err := t.who(ctx); err != nil {
		return nil, err
	}
	if err := t.where(q, port); err != nil {
		return nil, err
	}
	var seen *trace.Seen
	if t.from == "" {
		seen, err = t.here(ctx, log)
	} else {
		seen, err = t.there(ctx)
	}
	if err != nil {
		return nil, err
	}
	return trace.Tell(cmp.Or(t.from, thisMachine), t.to, seen, t.verdict(seen)), nil
}

// who finds the Pod or the Node that sends.
func (t *tracing) who(ctx context.Context) error {
	if t.from == "" {
		host, err := os.Hostname()
		if n := t.cluster.nodes[host]; err == nil && n != nil {
			t.sender = explain.Client{Node: host, Host: true, Addrs: explain.NodeAddresses(n)}
		}
		return nil
	}
	if _, err := netip.ParseAddr(t.from); err == nil {
		return base.Usagef("FROM is %q; want a Pod or a Node: a packet is sent from there", t.from)
	}
	if t.cluster.nodes[t.from] == nil {
		t.pod = svc.Name{Namespace: t.namespace, Name: t.from}
		if ns, pod, ok := strings.Cut(t.from, "/"); ok {
			t.pod = svc.Name{Namespace: ns, Name: pod}
		}
		// A user may have rights in its namespace, and not in that of the Service.
		if p, err := t.client.CoreV1().Pods(t.pod.Namespace).Get(ctx, t.pod.Name, metav1.GetOptions{}); err == nil {
			t.cluster.objects.Pods = append(t.cluster.objects.Pods, p)
		}
	}
	var err error
	if t.sender, err = t.cluster.client("FROM", t.from, t.namespace); err != nil {
		return err
	}
	if t.sender.Node == "" {
		return fmt.Errorf("FROM %s is on no node yet", t.from)
	}
	return nil
}

// here sends the packet from this process's network namespace.
func (t *tracing) here(ctx context.Context, log *slog.Logger) (*trace.Seen, error) {
	name := thisMachine
	if t.sender.Node != "" {
		name = "node " + t.sender.Node
	}
	seen, err := parts.TracePacket(ctx, &follow.Packet{
		Spaces: []follow.Space{{Name: name}}, Protocol: t.protocol, To: t.destination,
	}, log)
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("a trace from this machine needs root: run it with sudo, or name a Pod or a Node as FROM (%w)", err)
	}
	if seen != nil {
		seen.Node = t.sender.Node
	}
	return seen, err
}

// there has the agent of the sender's node send it.
func (t *tracing) there(ctx context.Context) (*trace.Seen, error) {
	post := t.client.CoreV1().RESTClient().Post
	node := post().Resource("nodes").Name(t.sender.Node).SubResource("proxy").Suffix("trace")
	if t.pod.Name != "" {
		node = node.Suffix(t.pod.Namespace, t.pod.Name)
	}
	text, err := asking.Answer(ctx, t.query(node))
	if apierrors.IsForbidden(err) && t.pod.Name != "" {
		pod := post().Namespace(t.pod.Namespace).Resource("pods").Name(t.pod.Name).SubResource("trace")
		text, err = asking.Answer(ctx, t.query(pod))
	}
	switch {
	case apierrors.IsForbidden(err) && t.pod.Name != "":
		return nil, fmt.Errorf("a trace from a Pod needs the right to create pods/trace in namespace %s, which the role edit has: %w",
			t.pod.Namespace, err)
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("a trace from a Node needs the right to create nodes/proxy: %w", err)
	case err != nil:
		return nil, fmt.Errorf("the agent of node %s cannot trace: %s", t.sender.Node, base.OneLine(err))
	}
	seen := &trace.Seen{}
	if err := json.Unmarshal(text, seen); err != nil {
		return nil, fmt.Errorf("cannot use the answer of node %s: %w", t.sender.Node, err)
	}
	seen.Node = t.sender.Node
	if seen.Facts != nil {
		if seen.Facts, err = checkFacts(seen.Facts, t.sender.Node); err != nil {
			return nil, err
		}
	}
	return seen, nil
}

func (t *tracing) query(r *rest.Request) *rest.Request {
	return r.Param("address", t.destination.String()).Param("protocol", t.protocol.String())
}

// verdict is what becomes of connections to the destination, by what the node has, else by the objects.
func (t *tracing) verdict(seen *trace.Seen) *explain.Verdict {
	q := &explain.Question{Address: t.destination, Protocol: t.protocol, Client: t.sender}
	objects := t.cluster.objects
	objects.Node = t.cluster.nodes[t.sender.Node]
	facts := seen.Facts
	if facts == nil {
		table := t.cluster.table(t.sender.Node)
		facts = explain.Assumed(t.sender.Node, "", table, explain.Choose(table, svc.Name{}, q.Address, q.Protocol))
	}
	return explain.Explain(q, &objects, facts)
}
