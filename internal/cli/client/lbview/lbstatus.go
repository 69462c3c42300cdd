// Package lbview has the commands that show load balancers, 'fairlead lb status' and
// 'fairlead lb explain', and 'fairlead lb rebalance'.
package lbview

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/lb/claim"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
	"github.com/fairlead/fairlead/internal/lb/owners"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// Report is what 'fairlead lb status' shows. Its JSON form is meant for programs:
// fields are only ever added.
type Report struct {
	Services []lbService `json:"services"`
	// NotAnnouncing are the nodes that announce no address, whatever happens to the others.
	NotAnnouncing []lbIdleNode `json:"notAnnouncing,omitempty"`

	// Problems are what is not known, since the user may not read it.
	Problems []string `json:"problems,omitempty"`

	left  int  // Services that are left out
	one   bool // it is about one Service
	blind bool // Speakers may not be read
}

// lbIdleNode is a node that announces no address, and why.
type lbIdleNode struct {
	Node   string `json:"node"`
	Reason string `json:"reason"`
}

type lbService struct {
	Namespace string      `json:"namespace"`
	Name      string      `json:"name"`
	Addresses []lbAddress `json:"addresses"`
	// Way is direct or proxied, and Because are the annotations for which it is the latter.
	Way     dialect.Way `json:"way"`
	Because []string    `json:"because,omitempty"`
	// Tags are the tags in its annotations.
	Tags map[string]string `json:"tags,omitempty"`
	// Status is the worst of its addresses.
	Status explain.Standing `json:"status"`
	// Pending is true while the Service has no address. Reason is the last Warning about that
	// or about an address that no node can announce.
	Pending bool   `json:"pending"`
	Reason  string `json:"reason,omitempty"`
	// Absent are the endpoints that get no new clients, by what health checks and connections of the nodes found.
	Absent []lbAbsent `json:"absent,omitempty"`
	// Front is what the Service of a Gateway, or of Ingresses, leads to.
	Front *lbFront `json:"front,omitempty"`
}

// lbAbsent is an endpoint that gets no new clients from a node.
type lbAbsent struct {
	Node     string    `json:"node"`
	Endpoint string    `json:"endpoint"`
	Pod      string    `json:"pod,omitempty"`
	Since    time.Time `json:"since"`
	Reason   string    `json:"reason"`
}

// name returns the endpoint with its Pod.
func (a *lbAbsent) name() string {
	if a.Pod == "" {
		return a.Endpoint
	}
	return a.Endpoint + " (Pod " + a.Pod + ")"
}

type lbAddress struct {
	Address string `json:"address"`
	// Pool is empty if the address is not of a pool, or not given by this controller.
	Pool string `json:"pool,omitempty"`
	explain.Judgement
	// Owners are the nodes that announce the address.
	Owners []lbOwner `json:"owners"`
	// OwnersLeft is how many more there are, in a Summary.
	OwnersLeft int `json:"ownersLeft,omitempty"`
}

type lbOwner = owners.Owner

// NewStatus returns 'fairlead lb status'.
func NewStatus(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output base.OutputFlag
	cmd := &cobra.Command{
		Use:   "status [SERVICE]",
		Short: "Show the addresses of load balancers, their ways and pools, and which nodes announce them, since when and why",
		Long: `Show the addresses of load balancers, their ways and pools, and which nodes announce
them, since when and why. For the Service of a Gateway, or of Ingresses, also its
listeners and routes, where these lead, and why one is not served.`,
		Example: `  fairlead lb status
  fairlead lb status web -n shop -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return base.Usagef("fairlead lb status takes one Service, but got %q", args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.Check(); err != nil {
				return err
			}
			config, namespace, err := f.Load()
			if err != nil {
				return err
			}
			client, err := kubernetes.NewForConfig(config)
			if err != nil {
				return err
			}
			own, err := v1.NewClient(config)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), base.RequestTimeout)
			defer cancel()
			name := ""
			if len(args) == 1 {
				name = args[0]
				if ns, rest, ok := strings.Cut(name, "/"); ok {
					namespace, name = ns, rest
				}
			} else if f.Namespace == "" {
				namespace = ""
			}
			gateways, err := api.NewClient(config)
			if err != nil {
				return err
			}
			r, services, err := collectLB(ctx, client, own, namespace, name, 0)
			if err != nil {
				return err
			}
			r.fronts(ctx, client, gateways, services)
			if err := output.Write(g.Out, r, r.print); err != nil {
				return err
			}
			return r.unread()
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	output.Add(cmd)
	return cmd
}

// collectLB reports on the load balancers of a namespace, all with "", or on one of them, without what they lead to. Of more than most it
// has the ones that need a look; 0 is no limit.
func collectLB(ctx context.Context, client kubernetes.Interface, own *v1.Client, namespace, name string, most int,
) (*Report, []corev1.Service, error) {
	var services []corev1.Service
	if name != "" {
		s, err := client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, nil, err
		}
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			return nil, nil, fmt.Errorf("%s/%s is of type %s, not LoadBalancer", namespace, name, s.Spec.Type)
		}
		services = append(services, *s)
	} else {
		list, err := client.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.type=LoadBalancer"})
		if err != nil {
			return nil, nil, err
		}
		services = slices.DeleteFunc(list.Items, func(s corev1.Service) bool { return s.Spec.Type != corev1.ServiceTypeLoadBalancer })
	}
	r := &Report{Services: []lbService{}}
	// unread notes what the user may not read, and returns any other error.
	unread := func(what string, err error) error {
		if !apierrors.IsForbidden(err) {
			return err
		}
		r.Problems = append(r.Problems, what+": "+base.OneLine(err))
		return nil
	}
	claims, err := client.NetworkingV1().IPAddresses().List(ctx, metav1.ListOptions{LabelSelector: claim.Selector})
	known := &explain.Balancers{}
	const noPools = "the pools of addresses are not known"
	if apierrors.IsForbidden(err) {
		known.Unread = append(known.Unread, explain.Line{Text: noPools, Source: explain.ClaimKind})
	}
	if err := unread(noPools, err); err != nil {
		return nil, nil, err
	}
	for i := range claims.Items {
		if c, ok := claim.Parse(&claims.Items[i]); ok {
			known.Claims = append(known.Claims, c)
		}
	}
	speakers, err := own.Speakers.List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) { // no controller has installed the kind yet
		speakers, err = &v1.SpeakerList{}, nil
	}
	const noSpeakers = "which node announces an address is not known"
	if r.blind = apierrors.IsForbidden(err); r.blind {
		speakers = &v1.SpeakerList{}
		known.Blind, known.Unread = true, append(known.Unread, explain.Line{Text: noSpeakers, Source: explain.SpeakerKind})
	}
	if err := unread(noSpeakers, err); err != nil {
		return nil, nil, err
	}
	known.Speakers = speakers.Items
	reasons := map[string]string{}
	if list, err := own.Pools.List(ctx, metav1.ListOptions{}); err == nil {
		reasons = poolReasons(list.Items)
	} else if apierrors.IsForbidden(err) {
		r.Problems = append(r.Problems, "why no node announces the addresses of a pool is not known: "+base.OneLine(err))
	}
	known.Nodes = nodesOf(ctx, client)
	silent := owners.Silent(known.Nodes)
	absent := absentOf(speakers.Items, silent)
	if name == "" && !r.blind {
		r.NotAnnouncing = idleNodes(speakers.Items, silent)
	}
	if r.left = len(services) - most; most > 0 && r.left > 0 {
		services = worst(services, known, most)
	} else {
		r.left = 0
	}
	warned := warnings{ctx: ctx, client: client, namespace: namespace, one: name != ""}
	for i := range services {
		out := serviceOf(known, &services[i])
		out.Absent = absent[out.Namespace+"/"+out.Name]
		if !r.blind {
			out.why(&services[i], &warned, reasons)
		}
		r.Services = append(r.Services, out)
	}
	r.one = name != ""
	return r, services, nil
}

// worst returns the most Services that stand worst, each judged once.
func worst(services []corev1.Service, known *explain.Balancers, most int) []corev1.Service {
	order, stands := make([]int, len(services)), make([]int, len(services))
	for i := range services {
		order[i], stands[i] = i, known.Stands(&services[i]).Worst()
	}
	slices.SortStableFunc(order, func(a, b int) int { return stands[a] - stands[b] })
	out := make([]corev1.Service, most)
	for i := range out {
		out[i] = services[order[i]]
	}
	return out
}

// serviceOf is a load balancer with its addresses, as explain judges them.
func serviceOf(known *explain.Balancers, s *corev1.Service) lbService {
	reading := claim.Read(s)
	out := lbService{Namespace: s.Namespace, Name: s.Name, Addresses: []lbAddress{}, Pending: len(s.Status.LoadBalancer.Ingress) == 0,
		Way: reading.Way, Because: reading.Because, Tags: reading.Spec.Tags, Status: known.Stands(s)}
	for i := range s.Status.LoadBalancer.Ingress {
		ing := &s.Status.LoadBalancer.Ingress[i]
		a, _ := claim.Ingress(ing)
		at := lbAddress{Address: cmp.Or(ing.IP, ing.Hostname), Judgement: known.Judge(s, a), Pool: known.PoolOf(s, a),
			Owners: append([]lbOwner{}, known.Announcing(a)...)}
		at.Reason = base.PlainLine(at.Reason)
		out.Addresses = append(out.Addresses, at)
	}
	return out
}

// why adds the last Warning about a load balancer that has a problem, or may have one.
func (s *lbService) why(of *corev1.Service, warned *warnings, reasons map[string]string) {
	switch {
	case s.Status == explain.Foreign:
		s.Reason = explain.Pending(of).Reason
		if len(s.Addresses) > 0 {
			s.Reason = s.Addresses[0].Reason
		}
	case s.Pending:
		s.Reason = warned.last(of, "")
	case slices.ContainsFunc(s.Addresses, lbAddress.silent):
		s.Reason = cmp.Or(warned.last(of, lbcontroller.NotAnnounceable), s.poolReason(reasons)) // an Event lasts an hour
	}
}

// silent reports whether no node is known to announce an address that fairlead has given.
func (a lbAddress) silent() bool {
	return (a.Status == explain.HasProblem || a.Status == explain.NotKnown) && !owners.Announced(a.Owners)
}

// idleNodes returns the nodes that announce nothing: their speaker reports that, or they have none, as with --lb-announce
// none. Nodes that do not answer are left out.
func idleNodes(speakers []v1.Speaker, nodes map[string]bool) (out []lbIdleNode) {
	has := map[string]bool{}
	for i := range speakers {
		s := &speakers[i]
		has[s.Name] = true
		if why, _ := owners.Idle(s); why != "" && !nodes[s.Name] {
			out = append(out, lbIdleNode{s.Name, why})
		}
	}
	for name, silent := range nodes {
		if !has[name] && !silent {
			out = append(out, lbIdleNode{name, owners.NoSpeaker})
		}
	}
	slices.SortFunc(out, func(a, b lbIdleNode) int { return cmp.Compare(a.Node, b.Node) })
	return out
}

// nodesOf returns all nodes, as far as they may be read.
func nodesOf(ctx context.Context, client kubernetes.Interface) (out []*corev1.Node) {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil
	}
	for i := range list.Items {
		out = append(out, &list.Items[i])
	}
	return out
}

// absentOf returns the endpoints of each Service that get no new clients, as the nodes report that are heard of.
func absentOf(speakers []v1.Speaker, silent map[string]bool) map[string][]lbAbsent {
	out := map[string][]lbAbsent{}
	for _, s := range speakers {
		if silent[s.Name] {
			continue
		}
		for _, a := range s.Status.Absent {
			out[a.Service] = append(out[a.Service],
				lbAbsent{Node: s.Name, Endpoint: a.Endpoint, Pod: a.Pod, Since: a.Since.Time, Reason: base.PlainLine(a.Reason)})
		}
	}
	for _, list := range out {
		slices.SortFunc(list, func(a, b lbAbsent) int {
			return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Node, b.Node))
		})
	}
	return out
}

// poolReasons returns why no node can announce addresses of a pool, by its name.
func poolReasons(pools []v1.IPAddressPool) map[string]string {
	out := map[string]string{}
	for _, p := range pools {
		if c := meta.FindStatusCondition(p.Status.Conditions, v1.PoolAnnounceable); c != nil && c.Status == metav1.ConditionFalse {
			out[p.Name] = base.PlainLine(c.Reason + ": " + c.Message)
		}
	}
	return out
}

// poolReason returns why no node announces an address, by the condition of its pool.
func (s *lbService) poolReason(reasons map[string]string) string {
	for _, a := range s.Addresses {
		if why := reasons[a.Pool]; why != "" && a.silent() {
			return why
		}
	}
	return ""
}

// LastWarning returns the newest Warning about a Service, of one reason unless that is empty,
// as far as Events may be read.
func LastWarning(ctx context.Context, client kubernetes.Interface, s *corev1.Service, reason string) string {
	list, err := client.CoreV1().Events(s.Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "involvedObject.uid=" + string(s.UID) + ",type=" + corev1.EventTypeWarning})
	if err != nil {
		return ""
	}
	return newest(list.Items, reason)
}

// newest returns the newest Warning, of one reason unless that is empty.
func newest(all []corev1.Event, reason string) string {
	all = slices.DeleteFunc(slices.Clone(all), func(e corev1.Event) bool { return reason != "" && e.Reason != reason })
	if len(all) == 0 {
		return ""
	}
	last := slices.MaxFunc(all, func(a, b corev1.Event) int { return a.LastTimestamp.Compare(b.LastTimestamp.Time) })
	return base.PlainLine(last.Reason + ": " + last.Message)
}

// warnings are the Warnings about the Services of a report, listed at most once if it is about several.
type warnings struct {
	ctx       context.Context //nolint:containedctx // of one report
	client    kubernetes.Interface
	namespace string
	one       bool
	byUID     map[types.UID][]corev1.Event
}

// warningsPage is how many Events one request lists.
const warningsPage = 500

// last returns what LastWarning does.
func (w *warnings) last(s *corev1.Service, reason string) string {
	if w.one {
		return LastWarning(w.ctx, w.client, s, reason)
	}
	if w.byUID == nil {
		w.byUID = map[types.UID][]corev1.Event{}
		with := metav1.ListOptions{FieldSelector: "involvedObject.kind=Service,type=" + corev1.EventTypeWarning, Limit: warningsPage}
		for {
			list, err := w.client.CoreV1().Events(w.namespace).List(w.ctx, with)
			if err != nil {
				break // as far as Events may be read
			}
			for i := range list.Items {
				uid := list.Items[i].InvolvedObject.UID
				w.byUID[uid] = append(w.byUID[uid], list.Items[i])
			}
			if with.Continue = list.Continue; with.Continue == "" {
				break
			}
		}
	}
	return newest(w.byUID[s.UID], reason)
}

// unread is the error of a report that the user may not read wholly.
func (r *Report) unread() error {
	if len(r.Problems) == 0 {
		return nil
	}
	return fmt.Errorf("the report is not whole: %s", base.PlainLine(strings.Join(r.Problems, "; ")))
}

func (r *Report) print(out io.Writer) error {
	if len(r.Services) == 0 {
		_, err := fmt.Fprintln(out, "no Service is of type LoadBalancer")
		return err
	}
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	fmt.Fprintln(w, "NAMESPACE\tSERVICE\tADDRESS\tWAY\tPOOL\tNODE\tVIA\tSINCE\tREASON")
	for _, s := range r.Services {
		if s.Pending {
			fmt.Fprintf(w, "%s\t%s\t<pending>\t%s\t-\t-\t-\t-\t%s\n", s.Namespace, s.Name, s.Way, cmp.Or(s.Reason, "-"))
		}
		for _, a := range s.Addresses {
			if len(a.Owners) == 0 {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t-\t-\t-\t%s\n", s.Namespace, s.Name, a.Address, s.Way, cmp.Or(a.Pool, "-"),
					cmp.Or(s.Reason, a.Reason, "-"))
			}
			for _, o := range a.Owners {
				reason := cmp.Or(o.Reason, "-")
				if o.Stale {
					reason = "stale: " + reason
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Namespace, s.Name, a.Address, s.Way, cmp.Or(a.Pool, "-"), o.Node,
					base.PlainLine(o.How()), o.Since.Local().Format(time.DateTime), base.PlainLine(reason))
			}
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, s := range r.Services {
		for _, a := range s.Addresses {
			switch {
			case len(a.Owners) == 0 || a.Status != explain.HasProblem:
			case owners.Announced(a.Owners):
				fmt.Fprintf(out, "%s of %s/%s: %s\n", a.Address, s.Namespace, s.Name, a.Reason)
			default:
				fmt.Fprintf(out, "no node announces %s of %s/%s: %s\n", a.Address, s.Namespace, s.Name,
					cmp.Or(s.Reason, "nothing is heard of the node that did"))
			}
		}
	}
	for _, s := range r.Services {
		for _, a := range s.Absent {
			fmt.Fprintf(out, "endpoint %s of %s/%s gets no new clients from node %s since %s: %s\n", base.PlainLine(a.name()), s.Namespace, s.Name,
				a.Node, a.Since.Local().Format(time.DateTime), a.Reason)
		}
	}
	for _, s := range r.Services {
		for _, k := range slices.Sorted(maps.Keys(s.Tags)) {
			fmt.Fprintf(out, "tag of %s/%s: %s\n", s.Namespace, s.Name, base.PlainLine(k+"="+s.Tags[k]))
		}
	}
	for _, s := range r.Services {
		most := maxRows
		if r.one {
			most = len(s.Front.routes())
		}
		if err := s.Front.print(out, s.Namespace+"/"+s.Name, most, false); err != nil {
			return err
		}
	}
	for _, p := range r.Problems {
		fmt.Fprintln(out, "!", base.PlainLine(p))
	}
	for _, n := range r.NotAnnouncing {
		fmt.Fprintf(out, "node %s announces nothing: %s\n", n.Node, base.PlainLine(n.Reason))
	}
	return nil
}
