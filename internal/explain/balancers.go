package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/owners"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Balancers are the objects that decide who announces the addresses of load balancers.
type Balancers struct {
	Claims   []claim.Claim
	Pools    []v1.IPAddressPool
	Speakers []v1.Speaker
	// Nodes are all Nodes, none if they may not be read.
	Nodes []*corev1.Node
	// Unread is why some of these are not known, each with its kind as the source.
	Unread []Line
	// Blind is set if it is not known who announces: Speakers may not be read.
	Blind bool

	index *known // nil before the first answer; the other fields must not change after it
}

// Balancer is the load balancer of a Service. Its JSON form is meant for programs: fields are only ever added.
type Balancer struct {
	Service string `json:"service"`
	// Way is direct or proxied.
	Way dialect.Way `json:"way"`
	// Lines are about the load balancer as a whole.
	Lines     []Line            `json:"lines,omitempty"`
	Addresses []BalancerAddress `json:"addresses,omitempty"`
}

// BalancerAddress is an address of a load balancer.
type BalancerAddress struct {
	Address string `json:"address"`
	Pool    string `json:"pool,omitempty"`
	Judgement
	// Announcers announce it now; a node that announces it in two ways is there twice.
	Announcers []Announcer `json:"announcers"`
	// Nobody is set if it is known that no node announces it.
	Nobody bool   `json:"nobody,omitempty"`
	Lines  []Line `json:"lines"`
}

// Announcer is a node that announces an address.
type Announcer struct {
	owners.Owner
	// Peers are the BGP peers that get the route, if it is by BGP, each with the state of its session.
	Peers []string `json:"peers,omitempty"`
}

// Add adds a line about the load balancer as a whole.
func (b *Balancer) Add(text, source string) { b.Lines = append(b.Lines, Line{text, source}) }

func (a *BalancerAddress) add(text, source string) { a.Lines = append(a.Lines, Line{text, source}) }

// Balance explains the load balancer of a Service, or, if at is valid, this address of it. It is nil for a Service without one.
func (o *Objects) Balance(b *Balancers, s *corev1.Service, at netip.Addr) *Balancer {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	name := svc.NameOf(s)
	reading := claim.Read(s)
	out := &Balancer{Service: name.String(), Way: reading.Way}
	out.way(s, reading)
	out.Lines = append(out.Lines, b.Unread...)
	if j := Pending(s); j.Status == Foreign || len(s.Status.LoadBalancer.Ingress) == 0 {
		out.Lines = append(out.Lines, j.line())
	}
	for i := range s.Status.LoadBalancer.Ingress {
		a, ok := claim.Ingress(&s.Status.LoadBalancer.Ingress[i])
		if ok && (!at.IsValid() || a == at) {
			out.Addresses = append(out.Addresses, b.address(o, s, a))
		}
	}
	return out
}

// way adds why a Service takes its way, and the listeners of the proxied one.
func (b *Balancer) way(s *corev1.Service, r *dialect.Reading) {
	name := svc.NameOf(s)
	if r.Way != dialect.Proxied {
		return
	}
	text, source := "its connections end at the node that announces the address: it takes the proxied way", "spec"
	if len(r.Because) > 0 {
		text, source = text+", because of "+strings.Join(r.Because, ", "), "metadata.annotations"
	}
	b.Add(text, about("Service", name, source))
	if len(r.Spec.SourceRanges) > 0 {
		b.Add(fmt.Sprintf("only clients in %v are let in", r.Spec.SourceRanges), rangesField(name, r))
	}
	for i := range r.Spec.Listeners {
		l := &r.Spec.Listeners[i]
		text := fmt.Sprintf("listener on port %d: %s from clients, %s to endpoints", l.Port, l.Protocol, l.Backend)
		if l.Redirect != 0 {
			text = fmt.Sprintf("listener on port %d: %s, which leads clients to https on port %d", l.Port, l.Protocol, l.Redirect)
		}
		b.Add(text, about("Service", name, fmt.Sprintf("spec.ports[%d]", i)))
	}
}

// address explains who announces an address, and if nobody does, why each node does not.
func (b *Balancers) address(o *Objects, s *corev1.Service, a netip.Addr) BalancerAddress {
	out := BalancerAddress{Address: a.String(), Announcers: []Announcer{}, Judgement: b.Judge(s, a)}
	w := owners.Wanted{Addr: a, Service: svc.NameOf(s).String()}
	out.claimed(b.known().claims[a], svc.NameOf(s))
	if i := slices.IndexFunc(b.Pools, func(p v1.IPAddressPool) bool { return p.Name == out.Pool }); out.Pool != "" && i >= 0 {
		w.Pool = &b.Pools[i]
	}
	if claim.IsLocal(s) {
		w.Local, w.Nodes = true, o.ReadyNodes(svc.NameOf(s))
	}
	for _, owner := range b.Announcing(a) {
		b.announcer(&out, &w, owner)
	}
	if out.Status != Served && !(out.Status == Foreign && foreignClass(s) != "") && !b.Blind { // else the lines of all have it
		out.Lines = append(out.Lines, out.line())
	}
	if !out.heard || len(b.Speakers) == 0 {
		return out
	}
	out.Nobody = out.Status == HasProblem
	if w.Pool != nil {
		if c := meta.FindStatusCondition(w.Pool.Status.Conditions, v1.PoolAnnounceable); c != nil && c.Status == metav1.ConditionFalse {
			out.add(c.Message, "IPAddressPool "+w.Pool.Name+" condition "+v1.PoolAnnounceable)
		}
	}
	b.others(&out, &w)
	return out
}

// claimed adds the pool that the address is of, if it is the Service's.
func (a *BalancerAddress) claimed(c *claim.Claim, n svc.Name) {
	if c == nil || !slices.Contains(c.Services, n) {
		return
	}
	text := "it is of no pool"
	if a.Pool = c.Pool; c.Pool != "" {
		text = "it is of pool " + c.Pool
	}
	if len(c.Services) > 1 {
		text += ", and shared by " + claim.Join(c.Services)
	}
	a.add(text, "IPAddress "+a.Address+" annotation "+svc.ClaimPoolAnnotation)
}

// ClaimKind is the source of a line in Balancers.Unread about claims.
const ClaimKind = "IPAddresses"

// announcer adds a node that has reported to announce the address.
func (b *Balancers) announcer(to *BalancerAddress, w *owners.Wanted, o owners.Owner) {
	since, source := o.Since.UTC().Format(time.RFC3339), "Speaker "+o.Node+" status.addresses"
	reason := ""
	if o.Reason != "" {
		reason = ": " + o.Reason
	}
	if o.Stale {
		to.add(fmt.Sprintf("node %s has reported to announce it by %s since %s, and cannot have taken that back", o.Node, o.How(), since), source)
		return
	}
	out := Announcer{Owner: o}
	to.add(fmt.Sprintf("node %s announces it by %s since %s%s", o.Node, o.How(), since, reason), source)
	i := slices.IndexFunc(b.Speakers, func(s v1.Speaker) bool { return s.Name == o.Node })
	if o.Via == owners.ViaBGP && i >= 0 {
		peers := w.Peers(&b.Speakers[i].Status)
		for k := range peers {
			text := owners.PeerText(&peers[k])
			out.Peers = append(out.Peers, text)
			to.add("node "+o.Node+": "+text, "Speaker "+o.Node+" status.peers")
		}
	}
	to.Announcers = append(to.Announcers, out)
}

// maxSilent bounds the nodes that are named for an address that nobody announces.
const maxSilent = 16

// others adds why each node does not announce the address.
func (b *Balancers) others(to *BalancerAddress, w *owners.Wanted) {
	nodes := map[string]*corev1.Node{}
	for _, n := range b.Nodes {
		nodes[n.Name] = n
	}
	type silent struct{ node, why, source string }
	var all []silent
	for i := range b.Speakers {
		s := &b.Speakers[i]
		why, source := w.WhyNot(s, nodes[s.Name])
		all = append(all, silent{s.Name, why, source})
		delete(nodes, s.Name)
	}
	for name := range nodes {
		all = append(all, silent{name, owners.NoSpeaker, SpeakerKind})
	}
	slices.SortFunc(all, func(a, b silent) int { return strings.Compare(a.node, b.node) })
	for i, s := range all {
		if i == maxSilent {
			to.add(fmt.Sprintf("%d more nodes do not announce it: 'fairlead lb status' lists them", len(all)-i), SpeakerKind)
			break
		}
		to.add("node "+s.node+" does not announce it: "+s.why, s.source)
	}
}

// ReadyNodes are the nodes with a ready endpoint of a Service.
func (o *Objects) ReadyNodes(n svc.Name) (out []string) {
	for _, slice := range o.Slices {
		if slice.Namespace != n.Namespace || slice.Labels[discoveryv1.LabelServiceName] != n.Name {
			continue
		}
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if e.NodeName != nil && (e.Conditions.Ready == nil || *e.Conditions.Ready) && !slices.Contains(out, *e.NodeName) {
				out = append(out, *e.NodeName)
			}
		}
	}
	return out
}
