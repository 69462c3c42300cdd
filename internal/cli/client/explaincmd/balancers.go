package explaincmd

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/cli/client/lbview"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// balancers explains the load balancers of the Services that a question leads to, and records in the objects the addresses that no
// node announces.
func (c *cluster) balancers(ctx context.Context, nodes *asking.Nodes, q *explain.Question) (out []*explain.Balancer) {
	target := explain.Resolve(q, &c.objects)
	var about []*corev1.Service
	for _, s := range c.objects.Services {
		has := slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool {
			a, ok := claim.Ingress(&i)
			return ok && a == q.Address.Addr()
		})
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer && (has || svc.NameOf(s) == target) {
			about = append(about, s)
		}
	}
	cfg := nodes.Config()
	if len(about) == 0 || cfg == nil {
		return nil
	}
	own, err := v1.NewClient(cfg)
	if err != nil {
		return nil
	}
	var addrs []netip.Addr
	for _, s := range about {
		for i := range s.Status.LoadBalancer.Ingress {
			if a, ok := claim.Ingress(&s.Status.LoadBalancer.Ingress[i]); ok {
				addrs = append(addrs, a)
			}
		}
	}
	known := readBalancers(ctx, nodes.Client(), own, claimsOf(addrs))
	for _, n := range c.names {
		known.Nodes = append(known.Nodes, c.nodes[n])
	}
	gateways, err := api.NewClient(cfg)
	for _, s := range about {
		b := c.objects.Balance(known, s, q.Address.Addr())
		if len(s.Status.LoadBalancer.Ingress) == 0 {
			if why := lbview.LastWarning(ctx, nodes.Client(), s, ""); why != "" {
				b.Add(why, "Events of Service "+svc.NameOf(s).String())
			}
		}
		if err == nil {
			b.Lines = append(b.Lines, lbview.FrontLines(ctx, nodes.Client(), gateways, s)...)
		}
		c.unannounced(b)
		out = append(out, b)
	}
	return out
}

func (c *cluster) unannounced(b *explain.Balancer) {
	for i := range b.Addresses {
		a := &b.Addresses[i]
		if !a.Nobody {
			continue
		}
		if c.objects.Unannounced == nil {
			c.objects.Unannounced = map[string]explain.Line{}
		}
		c.objects.Unannounced[a.Address] = explain.Line{Text: "no node announces " + a.Address, Source: "Speakers"}
	}
}

// readBalancers reads what decides who announces addresses. What the user may not read is a line of the answer; a kind that no controller
// has installed has no objects.
func readBalancers(ctx context.Context, client kubernetes.Interface, own *v1.Client, read claimReader) *explain.Balancers {
	b := &explain.Balancers{}
	unread := func(err error, kind, what string) (known bool) {
		if err != nil && !apierrors.IsNotFound(err) {
			b.Unread = append(b.Unread, explain.Line{Text: what + " is not known: " + base.OneLine(err), Source: kind})
			return false
		}
		return err == nil
	}
	claims, err := read(ctx, client)
	if unread(err, explain.ClaimKind, "of which pool an address is") {
		for _, o := range claims {
			if held, ok := claim.Parse(o); ok {
				b.Claims = append(b.Claims, held)
			}
		}
	}
	if list, err := own.Pools.List(ctx, metav1.ListOptions{}); unread(err, "IPAddressPools", "how the pool's addresses are announced") {
		b.Pools = list.Items
	}
	list, err := own.Speakers.List(ctx, metav1.ListOptions{})
	if unread(err, "Speakers", "which node announces an address") {
		b.Speakers = list.Items
	} else {
		b.Blind = err != nil && !apierrors.IsNotFound(err)
	}
	return b
}

// claimReader reads the claims that a question is about.
type claimReader func(context.Context, kubernetes.Interface) ([]*networkingv1.IPAddress, error)

// allClaims reads all claims.
func allClaims(ctx context.Context, client kubernetes.Interface) ([]*networkingv1.IPAddress, error) {
	return base.Paged[*networkingv1.IPAddressList, networkingv1.IPAddress](ctx, metav1.ListOptions{LabelSelector: claim.Selector},
		client.NetworkingV1().IPAddresses().List, nil)
}

// claimsOf reads the claims of some addresses by their names, as far as there are such.
func claimsOf(addrs []netip.Addr) claimReader {
	return func(ctx context.Context, client kubernetes.Interface) (out []*networkingv1.IPAddress, err error) {
		for _, a := range addrs {
			o, err := client.NetworkingV1().IPAddresses().Get(ctx, a.String(), metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
			case err != nil:
				return nil, err
			case o.Labels[networkingv1.LabelManagedBy] == svc.AddressManager:
				out = append(out, o)
			}
		}
		return out, nil
	}
}

// announcedBy is who announces an address, in a few words.
func announcedBy(a *explain.BalancerAddress) string {
	var out []string
	for i := range a.Announcers {
		n := &a.Announcers[i]
		out = append(out, fmt.Sprintf("node %s (%s)", n.Node, n.How()))
	}
	switch {
	case len(out) > 0:
		return "announced by " + strings.Join(out, ", ")
	case a.Nobody:
		return "no node announces it"
	}
	return "who announces it is not known"
}

func printBalancers(out io.Writer, list []*explain.Balancer) {
	for _, b := range list {
		fmt.Fprintf(out, "\nload balancer of Service %s, %s way\n", base.PlainLine(b.Service), base.PlainLine(string(b.Way)))
		printLines(out, "  ", b.Lines)
		for i := range b.Addresses {
			a := &b.Addresses[i]
			fmt.Fprintf(out, "  %s: %s\n", base.PlainLine(a.Address), base.PlainLine(announcedBy(a)))
			printLines(out, "    ", a.Lines)
		}
	}
}
