package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// deciding is the decision about one frontend.
type deciding struct {
	*explaining
	port *Port
	at   *table.Frontend
	has  *dataplane.Installed // nil if it was not read back
	out  *Frontend
}

// frontend decides what becomes of a connection to the i-th frontend of a port.
func (e *explaining) frontend(port *Port, i int) Frontend {
	f := &port.Frontends[i]
	out := Frontend{Kind: f.Kind.String(), Protocol: port.Protocol.String(), Address: f.Addr.String(), Port: port.ID.Port, Answer: Answers}
	if f.Kind == table.NodePort {
		out.Address = fmt.Sprintf("port %d", f.Addr.Port())
	}
	d := deciding{explaining: e, port: port, at: f, out: &out}
	if i < len(port.Installed) {
		d.has = &port.Installed[i]
	}
	d.decide()
	d.proof()
	return out
}

// decide goes the way of a packet: what the node has, who is let in, where it is sent, and whether that answers.
func (d *deciding) decide() {
	want := dataplane.Expected(d.port.ServicePort, d.at)
	now := want
	if d.has != nil {
		now = *d.has
	}
	if !d.arrives() || !d.installed(&now, &want) || !d.letIn(&now) {
		return
	}
	inside := d.facts.inside(&d.question.Client, d.at.Addr.Addr())
	fate := now.For(inside)
	if len(d.at.Hops) > 0 && !inside {
		fate = now.For(true) // other nodes' endpoints serve, too
		d.passedOn()
	}
	d.out.Endpoints = fate.Endpoints
	if d.out.Cause == Rejected {
		defer func() { d.out.Cause = Rejected }() // what keeps the node from its table goes before all else
	}
	switch {
	case len(fate.Endpoints) > 0:
		d.sent(&now, &fate)
	case fate.Drop:
		d.policyLocal()
	default:
		d.nothing()
	}
}

// arrives reports whether a packet of the client comes to a node at all: to an address of a load balancer it does from outside only if
// a node announces it.
func (d *deciding) arrives() bool {
	c := &d.question.Client
	l, nobody := d.objects.Unannounced[d.at.Addr.Addr().String()]
	if !nobody || d.at.Kind != table.LoadBalancerIP || c.Node != "" || !c.Addr(d.at.Addr.Addr()).IsValid() {
		return true
	}
	d.out.end(Dropped, NoRoute, l.Text+": packets of a client outside of all nodes come to none of them", l.Source)
	return false
}

// installed compares the node with its Table. It returns false if packets do not find the frontend at all.
func (d *deciding) installed(now, want *dataplane.Installed) bool {
	source := "node " + d.facts.Node + ", mode " + d.facts.Mode
	if why := d.port.Rejected; why != "" {
		d.out.Cause = Rejected
		d.out.add("the node could not write this port: "+why, source)
	} else if d.has != nil {
		if diff := now.Differs(want); diff != "" {
			d.out.Cause = Rejected
			d.out.add("the node has something else than its table: "+diff, source)
		}
	}
	if now.Present {
		return true
	}
	d.out.Answer, d.out.Cause = Refused, Rejected
	if slices.ContainsFunc(d.facts.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(d.at.Addr.Addr()) }) && !d.hasAddress() {
		d.out.Answer = Dropped
	}
	return false
}

// hasAddress reports whether another frontend with the address is installed: other ports of a ClusterIP are refused.
func (d *deciding) hasAddress() bool {
	for i := range d.facts.Ports {
		p := &d.facts.Ports[i]
		for k := range p.Installed {
			if p.Installed[k].Present && p.Frontends[k].Kind == table.ClusterIP && p.Frontends[k].Addr.Addr() == d.at.Addr.Addr() {
				return true
			}
		}
	}
	return false
}

// letIn reports whether the client is within the source ranges.
func (d *deciding) letIn(now *dataplane.Installed) bool {
	if !now.Limited {
		return true
	}
	source := d.field("spec.loadBalancerSourceRanges")
	if s := d.objects.find(d.port.ID.Name); s != nil && len(s.Spec.LoadBalancerSourceRanges) == 0 {
		source = d.field("annotation " + corev1.AnnotationLoadBalancerSourceRangesKey)
	}
	c := &d.question.Client
	client := c.Addr(d.at.Addr.Addr())
	if !client.IsValid() {
		d.out.add(fmt.Sprintf("only clients in %v are let in; name one with --from", now.Allow), source)
		return true
	}
	for _, p := range now.Allow {
		own := dataplane.IsOwn(p, d.at.Addr.Addr())
		if p.Contains(client) && (!own || c.Host) {
			d.out.add(fmt.Sprintf("client %s is let in, by %s", client, p), source)
			return true
		}
	}
	d.out.end(Dropped, SourceRange, fmt.Sprintf("client %s is not in %v, and is dropped", client, now.Allow), source)
	return false
}

// field is the source that names a field of the Service.
func (d *deciding) field(name string) string { return about("Service", d.port.ID.Name, name) }

func (d *deciding) policyField() string {
	if d.at.Kind == table.ClusterIP {
		return d.field("spec.internalTrafficPolicy")
	}
	return d.field("spec.externalTrafficPolicy")
}

func (d *deciding) policyLocal() {
	d.out.end(Dropped, PolicyLocal, "policy Local sends connections only to endpoints of node "+d.facts.Node+
		", which has none: they are dropped", d.policyField())
}

// sent decides about a connection that goes to one of the endpoints.
func (d *deciding) sent(now *dataplane.Installed, fate *dataplane.Fate) {
	d.out.add(fmt.Sprintf("sent to one of %d endpoints", len(fate.Endpoints)), "EndpointSlices of Service "+d.port.ID.Name.String())
	d.masquerade()
	if !d.question.Then { // the condition of the Node is of the present
		d.forwarding() // before what was probed: it may be why
	}
	switch proto := d.port.Protocol; {
	case d.question.Then:
		d.out.Answer = Sent
	case proto != svc.TCP:
		d.out.Answer = Sent
		d.out.add(proto.String()+": not probed: whether an endpoint answers is not known", d.field("spec.ports"))
	}
	if now.Holes > 0 {
		d.out.Answer = Sometimes
	}
	candidates := fate.Endpoints
	if a := now.Kept; a.IsValid() && slices.Contains(candidates, a) {
		d.out.add(fmt.Sprintf("client %s is kept at %s", d.question.Client.Addr(a.Addr()), a), d.field("spec.sessionAffinity"))
		candidates = []netip.AddrPort{a}
	}
	var dead []Probe
	alive := 0
	for _, a := range candidates {
		switch p, known := d.facts.probe(a); {
		case !known:
		case p.Result == Connected:
			alive++
		default:
			dead = append(dead, p)
		}
	}
	if len(dead) > 0 {
		d.dead(dead, alive > 0 || len(dead) < len(candidates), now.Kept.IsValid() && len(candidates) == 1 && len(fate.Endpoints) > 1)
	}
}

// dead adds endpoints that do not answer. others reports whether a connection may reach one that does.
func (d *deciding) dead(list []Probe, others, kept bool) {
	worst := list[0]
	for _, p := range list {
		if p.Result != NotOpen {
			worst = p
		}
		text := fmt.Sprintf("endpoint %s does not answer node %s: %s", p.Endpoint, d.facts.Node, p.Error)
		if p.Result == NotOpen {
			text = fmt.Sprintf("nothing listens on endpoint %s: the connection is refused", p.Endpoint)
		}
		d.out.add(text, "connection from node "+d.facts.Node)
	}
	answer, cause := Refused, WrongTargetPort
	if worst.Result != NotOpen {
		answer, cause = Dropped, NoRoute
	} else {
		d.out.add("the port of the endpoints follows from targetPort", d.field("spec.ports"))
	}
	switch {
	case kept:
		cause = AffinityDead
	case others && d.facts.Mode == "userspace":
		d.out.add("the proxy tries another endpoint when one does not answer", "mode userspace of node "+d.facts.Node)
		return
	case others:
		answer = Sometimes
	}
	d.out.Answer, d.out.Cause = answer, cause
}

// forwarding names what the node itself reports about packets that it does not pass on.
func (d *deciding) forwarding() {
	if d.objects.Node == nil {
		return
	}
	for _, c := range d.objects.Node.Status.Conditions {
		if c.Type == svc.PacketsForwarded && c.Status == corev1.ConditionFalse {
			d.out.add(c.Message, "Node "+d.facts.Node+" condition "+string(svc.PacketsForwarded))
		}
	}
}

// passedOn adds the nodes that share new connections of clients outside.
func (d *deciding) passedOn() {
	var nodes []string
	for _, h := range d.at.Hops {
		if h.Endpoints > 0 {
			nodes = append(nodes, h.String())
		}
	}
	d.out.add("passed on as they are, by a hash of the client, to the nodes of the endpoints, which answer the client: "+
		strings.Join(nodes, ", "), d.field("annotation "+svc.ForwardingAnnotation)+", or flag --forwarding of node "+d.facts.Node)
}

// masquerade adds the source address that endpoints see.
func (d *deciding) masquerade() {
	set := dataplane.Settings{MasqueradeAll: d.facts.MasqueradeAll}
	for _, p := range d.facts.ClusterCIDRs {
		if p.Addr().Is4() == d.at.Addr.Addr().Is4() {
			set.Pods = append(set.Pods, p)
		}
	}
	c := &d.question.Client
	masq := dataplane.MasqueradingOf(&set, d.at)
	client := c.Addr(d.at.Addr.Addr())
	outside := client.IsValid() && !slices.ContainsFunc(set.Pods, func(p netip.Prefix) bool { return p.Contains(client) })
	d.out.masked = true
	split := d.at.LocalClients != nil && c.Host && c.Node == d.facts.Node
	switch {
	case d.facts.Mode == "userspace":
		d.out.add("endpoints see an address of the node as the client", "mode userspace of node "+d.facts.Node)
	case masq == dataplane.MasqueradeAlways && d.at.Masquerade:
		d.out.add("endpoints see an address of the node as the client: policy Cluster", d.policyField())
	case masq == dataplane.MasqueradeAlways:
		d.out.add("endpoints see an address of the node as the client", "flag --masquerade-all of node "+d.facts.Node)
	case masq == dataplane.MasqueradeOutside && outside:
		d.out.add("endpoints see an address of the node as the client, which is outside of the ranges of Pods",
			"flag --cluster-cidr of node "+d.facts.Node)
	case split:
		d.out.add("endpoints see an address of the node as the client", "node "+d.facts.Node)
	case d.at.Hops != nil:
		d.out.masked = false
		d.out.add("endpoints see the address of the client", d.field("annotation "+svc.ForwardingAnnotation))
	default:
		d.out.masked = false
		d.out.add("endpoints see the address of the client", d.policyField())
	}
}

// proof adds the elements and counters of the node.
func (d *deciding) proof() {
	if d.has != nil {
		for _, p := range d.has.Proof {
			d.out.Proof = append(d.out.Proof, Line{p.Text, "node " + d.facts.Node + ": " + p.Element})
		}
	}
	for _, c := range d.port.Counts {
		if c.Protocol != d.port.Protocol || !isAt(d.at, c.To, d.facts.NodePortAddrs) {
			continue
		}
		d.out.Proof = append(d.out.Proof, Line{fmt.Sprintf("%d packets to %s were refused, %d dropped", c.Rejected, c.To, c.Dropped),
			"node " + d.facts.Node + ": counters"})
	}
}

// worst makes the worst of the frontends the answer of the Verdict.
func (e *explaining) worst() {
	for i := range e.verdict.Frontends {
		f := &e.verdict.Frontends[i]
		if severity(f.Answer) > severity(e.verdict.Answer) || e.verdict.Cause == "" && f.Answer == e.verdict.Answer {
			e.verdict.Answer, e.verdict.Cause = f.Answer, f.Cause
		}
	}
}

// joined joins up to max words.
func joined(words []string, limit int) string {
	if len(words) > limit {
		return strings.Join(words[:limit], ", ") + fmt.Sprintf(" and %d more", len(words)-limit)
	}
	return strings.Join(words, ", ")
}
