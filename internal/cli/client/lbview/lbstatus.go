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
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/lb/claim"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Report is what 'fairlead lb status' shows. Its JSON form is meant for programs:
// fields are only ever added.
type Report struct {
	Services []lbService `json:"services"`
	// NotAnnouncing are the nodes that announce no address, whatever happens to the others.
	NotAnnouncing []lbIdleNode `json:"notAnnouncing,omitempty"`

	one bool // it is about one Service
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
	// Owners are the nodes that announce the address.
	Owners []lbOwner `json:"owners"`
}

// announced reports whether a node announces the address, as far as is known.
func (a *lbAddress) announced() bool {
	return slices.ContainsFunc(a.Owners, func(o lbOwner) bool { return !o.Stale })
}

type lbOwner struct {
	Node      string    `json:"node"`
	Via       string    `json:"via"`
	Interface string    `json:"interface,omitempty"`
	Since     time.Time `json:"since"`
	Reason    string    `json:"reason,omitempty"`
	// Stale means that the node has not taken back what it once reported: another one has
	// begun to answer since, or nothing is heard of the node.
	Stale bool `json:"stale,omitempty"`
}

// NewStatus returns 'fairlead lb status'.
func NewStatus(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output base.OutputFlag
	cmd := &cobra.Command{
		Use:   "status [SERVICE]",
		Short: "Show the addresses of load balancers, their ways and pools, and which nodes announce them, since when and why",
		Long: `Show the addresses of load balancers, their ways and pools, and which nodes announce
them, since when and why. For the Service of a Gateway, or of all Ingresses, also its
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
			r, err := collectLB(ctx, client, own, gateways, namespace, name)
			if err != nil {
				return err
			}
			return output.Write(g.Out, r, r.print)
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	output.Add(cmd)
	return cmd
}

// collectLB reports on the load balancers of a namespace, all with "", or on one of them.
func collectLB(
	ctx context.Context, client kubernetes.Interface, own *v1.Client, gateways *api.Client, namespace, name string,
) (*Report, error) {
	var services []corev1.Service
	if name != "" {
		s, err := client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			return nil, fmt.Errorf("%s/%s is of type %s, not LoadBalancer", namespace, name, s.Spec.Type)
		}
		services = append(services, *s)
	} else {
		list, err := client.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, err
		}
		services = slices.DeleteFunc(list.Items, func(s corev1.Service) bool { return s.Spec.Type != corev1.ServiceTypeLoadBalancer })
	}
	claims, err := client.NetworkingV1().IPAddresses().List(ctx,
		metav1.ListOptions{LabelSelector: networkingv1.LabelManagedBy + "=" + svc.AddressManager})
	if err != nil {
		return nil, err
	}
	pools := map[string]string{}
	for _, c := range claims.Items {
		pools[c.Name] = c.Annotations[svc.ClaimPoolAnnotation]
	}
	speakers, err := own.Speakers.List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) { // no controller has installed the kind yet
		speakers, err = &v1.SpeakerList{}, nil
	}
	if err != nil {
		return nil, err
	}
	reasons := map[string]string{}
	if list, err := own.Pools.List(ctx, metav1.ListOptions{}); err == nil {
		reasons = poolReasons(list.Items)
	}
	silent := silentNodes(ctx, client)
	owners, absent := ownersOf(speakers.Items, silent), absentOf(speakers.Items, silent)
	r := &Report{Services: []lbService{}}
	if name == "" {
		r.NotAnnouncing = idleNodes(speakers.Items, silent)
	}
	for i := range services {
		s := &services[i]
		out := lbService{Namespace: s.Namespace, Name: s.Name, Addresses: []lbAddress{}, Pending: len(s.Status.LoadBalancer.Ingress) == 0}
		reading := claim.Read(s)
		out.Absent = absent[s.Namespace+"/"+s.Name]
		out.Way, out.Because, out.Tags = reading.Way, reading.Because, reading.Spec.Tags
		for _, ing := range s.Status.LoadBalancer.Ingress {
			list := owners[ing.IP]
			slices.SortFunc(list, func(a, b lbOwner) int { return cmp.Compare(a.Node, b.Node) })
			out.Addresses = append(out.Addresses, lbAddress{cmp.Or(ing.IP, ing.Hostname), pools[ing.IP], append([]lbOwner{}, list...)})
		}
		unowned := func(a lbAddress) bool { return !a.announced() }
		if out.Pending {
			out.Reason = lastWarning(ctx, client, s, "")
		} else if slices.ContainsFunc(out.Addresses, unowned) {
			out.Reason = lastWarning(ctx, client, s, lbcontroller.NotAnnounceable)
			out.Reason = cmp.Or(out.Reason, out.poolReason(reasons)) // an Event lasts an hour
		}
		r.Services = append(r.Services, out)
	}
	r.one = name != ""
	r.fronts(ctx, client, gateways, services)
	return r, nil
}

// idleNodes returns the nodes that announce nothing: their speaker reports that, or they have none, as with --lb-announce
// none. Nodes that do not answer are left out.
func idleNodes(speakers []v1.Speaker, nodes map[string]bool) (out []lbIdleNode) {
	has := map[string]bool{}
	for _, s := range speakers {
		switch has[s.Name] = true; {
		case nodes[s.Name]:
		case s.Status.Announce == v1.AnnounceNone:
			out = append(out, lbIdleNode{s.Name, "--lb-announce none"})
		case missing(&s.Status):
			out = append(out, lbIdleNode{s.Name, "its speaker ended to be restarted, and has not returned"})
		case !s.Status.Eligible && len(s.Status.Addresses) == 0:
			out = append(out, lbIdleNode{s.Name, cmp.Or(s.Status.Reason, "it is not eligible")})
		}
	}
	for name, silent := range nodes {
		if !has[name] && !silent {
			out = append(out, lbIdleNode{name, "it has no speaker, or one with --lb-announce none"})
		}
	}
	slices.SortFunc(out, func(a, b lbIdleNode) int { return cmp.Compare(a.Node, b.Node) })
	return out
}

// silentNodes returns all nodes, and which of them nothing is heard of, as far as Nodes may be read.
func silentNodes(ctx context.Context, client kubernetes.Interface) map[string]bool {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil
	}
	silent := map[string]bool{}
	for i := range list.Items {
		silent[list.Items[i].Name] = slices.ContainsFunc(list.Items[i].Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
		})
	}
	return silent
}

// missing reports whether a speaker ended to be restarted, and is not back in time: nothing but its next process takes back what
// it has announced.
func missing(s *v1.SpeakerStatus) bool { return s.ReturnBy != nil && time.Now().After(s.ReturnBy.Time) }

// ownersOf returns who announces each address, as the speakers have last reported. A speaker that
// died could not take that back, nor could one that did not return: of several that answer ARP or NDP the one that began last
// counts.
func ownersOf(speakers []v1.Speaker, silent map[string]bool) map[string][]lbOwner {
	owners := map[string][]lbOwner{}
	for _, s := range speakers {
		for _, a := range s.Status.Addresses {
			owners[a.Address] = append(owners[a.Address],
				lbOwner{Node: s.Name, Via: a.Via, Interface: a.Interface, Since: a.Since.Time, Reason: a.Reason,
					Stale: silent[s.Name] || missing(&s.Status)})
		}
	}
	for _, list := range owners {
		var last time.Time
		for _, o := range list {
			if o.Via != "bgp" && o.Since.After(last) {
				last = o.Since
			}
		}
		for i := range list {
			list[i].Stale = list[i].Stale || list[i].Via != "bgp" && list[i].Since.Before(last)
		}
	}
	return owners
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
		if why := reasons[a.Pool]; why != "" && !a.announced() {
			return why
		}
	}
	return ""
}

// lastWarning returns the newest Warning about a Service, of one reason unless that is empty,
// as far as Events may be read.
func lastWarning(ctx context.Context, client kubernetes.Interface, s *corev1.Service, reason string) string {
	list, err := client.CoreV1().Events(s.Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "involvedObject.uid=" + string(s.UID) + ",type=" + corev1.EventTypeWarning})
	if err != nil {
		return ""
	}
	list.Items = slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return reason != "" && e.Reason != reason })
	if len(list.Items) == 0 {
		return ""
	}
	last := slices.MaxFunc(list.Items, func(a, b corev1.Event) int { return a.LastTimestamp.Compare(b.LastTimestamp.Time) })
	return base.PlainLine(last.Reason + ": " + last.Message)
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
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t-\t-\t-\t%s\n", s.Namespace, s.Name, a.Address, s.Way, cmp.Or(a.Pool, "-"), cmp.Or(s.Reason, "-"))
			}
			for _, o := range a.Owners {
				via := o.Via
				if o.Interface != "" {
					via += " on " + o.Interface
				}
				reason := cmp.Or(o.Reason, "-")
				if o.Stale {
					reason = "stale: " + reason
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Namespace, s.Name, a.Address, s.Way, cmp.Or(a.Pool, "-"), o.Node,
					base.PlainLine(via), o.Since.Local().Format(time.DateTime), base.PlainLine(reason))
			}
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, s := range r.Services {
		for _, a := range s.Addresses {
			if len(a.Owners) > 0 && !a.announced() {
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
	for _, n := range r.NotAnnouncing {
		fmt.Fprintf(out, "node %s announces nothing: %s\n", n.Node, base.PlainLine(n.Reason))
	}
	return nil
}
