package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Policies are the NetworkPolicies of the namespaces of a question. fairlead enforces none of them: a network plugin may.
type Policies struct {
	List []*networkingv1.NetworkPolicy
	// Namespaces are the labels of the namespaces, nil if they may not be read.
	Namespaces map[string]labels.Set
	// Unread is why some policies are not known.
	Unread []Line
	// SomePods is set if the user may not read the Pods of all namespaces: an address that none is found for may be that of a Pod.
	SomePods bool
}

// allowed is what a NetworkPolicy makes of a connection.
type allowed int

// The values of allowed.
const (
	no allowed = iota
	// maybe is for a connection about which too little is known.
	maybe
	yes
)

// side is one end of a connection.
type side struct {
	// Addr is not valid if any address is meant.
	Addr netip.Addr
	// Pod is nil for an end that is no Pod, or is not known.
	Pod *corev1.Pod
	// Known is false if nothing is known of the end.
	Known bool
	// Stranger is set if it may be a Pod that is not known.
	Stranger bool
	// Masked is set if the other end may see an address of a node in place of Addr.
	Masked bool
	// Doubt is why too little is known of it.
	Doubt string
}

// direction is the part of a policy that counts for one end of a connection.
type direction struct {
	kind networkingv1.PolicyType
	// field is where its rules are.
	field string
}

var (
	ingress = direction{networkingv1.PolicyTypeIngress, "spec.ingress"}
	egress  = direction{networkingv1.PolicyTypeEgress, "spec.egress"}
)

// applies reports whether a policy isolates Pods in a direction: without policyTypes it does for ingress, and for egress if it has rules.
func (d *direction) applies(p *networkingv1.NetworkPolicy) bool {
	if len(p.Spec.PolicyTypes) > 0 {
		return slices.Contains(p.Spec.PolicyTypes, d.kind)
	}
	return d.kind == networkingv1.PolicyTypeIngress || len(p.Spec.Egress) > 0
}

// policyPort is where a connection leads: the port of the endpoint, after the Service's address was translated.
type policyPort struct {
	protocol svc.Protocol
	number   uint16
	// of is the Pod that it is a port of, nil if that is not known.
	of *corev1.Pod
}

// selecting returns the policies that select a Pod in a direction.
func (p *Policies) selecting(pod *corev1.Pod, d *direction) (out []*networkingv1.NetworkPolicy) {
	for _, n := range p.List {
		if n.Namespace != pod.Namespace || !d.applies(n) {
			continue
		}
		if s, err := metav1.LabelSelectorAsSelector(&n.Spec.PodSelector); err == nil && s.Matches(labels.Set(pod.Labels)) {
			out = append(out, n)
		}
	}
	return out
}

// lets is what the rules of a policy make of a connection with the other end.
func (p *Policies) lets(n *networkingv1.NetworkPolicy, d *direction, other *side, port *policyPort) allowed {
	best := no
	rule := func(peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) {
		at, from := no, no
		if len(ports) == 0 {
			at = yes
		}
		for i := range ports {
			at = max(at, port.is(&ports[i]))
		}
		if len(peers) == 0 {
			from = yes
		}
		for i := range peers {
			from = max(from, p.peer(n.Namespace, &peers[i], other))
		}
		best = max(best, min(at, from))
	}
	if d.kind == networkingv1.PolicyTypeIngress {
		for i := range n.Spec.Ingress {
			rule(n.Spec.Ingress[i].From, n.Spec.Ingress[i].Ports)
		}
		return best
	}
	for i := range n.Spec.Egress {
		rule(n.Spec.Egress[i].To, n.Spec.Egress[i].Ports)
	}
	return best
}

// is is whether a port of a rule has the port: without a number it is every port of its protocol, and a name is looked up in the
// containers of the Pod.
func (p *policyPort) is(n *networkingv1.NetworkPolicyPort) allowed {
	protocol := corev1.ProtocolTCP
	if n.Protocol != nil {
		protocol = *n.Protocol
	}
	switch {
	case string(protocol) != p.protocol.String():
		return no
	case n.Port == nil:
		return yes
	case n.Port.Type == intstr.String:
		return p.named(n.Port.StrVal, protocol)
	case int32(p.number) == n.Port.IntVal, n.EndPort != nil && int32(p.number) >= n.Port.IntVal && int32(p.number) <= *n.EndPort:
		return yes
	}
	return no
}

func (p *policyPort) named(name string, protocol corev1.Protocol) allowed {
	if p.of == nil {
		return maybe
	}
	for i := range p.of.Spec.Containers {
		for _, has := range p.of.Spec.Containers[i].Ports {
			if has.Name == name && cmp.Or(has.Protocol, corev1.ProtocolTCP) == protocol && has.ContainerPort == int32(p.number) {
				return yes
			}
		}
	}
	return no
}

// peer is whether a peer of a rule has the other end.
func (p *Policies) peer(namespace string, peer *networkingv1.NetworkPolicyPeer, other *side) allowed {
	if !other.Known {
		return maybe
	}
	if b := peer.IPBlock; b != nil {
		if other.Masked && !everything(b) {
			return maybe
		}
		return block(b, other.Addr)
	}
	switch {
	case other.Pod == nil && other.Stranger:
		return maybe
	case other.Pod == nil:
		return no // selectors are for Pods
	}
	in := no
	switch {
	case peer.NamespaceSelector == nil && other.Pod.Namespace == namespace:
		in = yes
	case peer.NamespaceSelector != nil:
		in = p.namespace(peer.NamespaceSelector, other.Pod.Namespace)
	}
	if in == no || peer.PodSelector == nil {
		return in
	}
	s, err := metav1.LabelSelectorAsSelector(peer.PodSelector)
	if err != nil || !s.Matches(labels.Set(other.Pod.Labels)) {
		return no
	}
	return in
}

// namespace is whether a selector has a namespace.
func (p *Policies) namespace(selector *metav1.LabelSelector, name string) allowed {
	s, err := metav1.LabelSelectorAsSelector(selector)
	has, known := p.Namespaces[name]
	switch {
	case err != nil:
		return no
	case s.Empty():
		return yes
	case !known:
		return maybe
	case s.Matches(has):
		return yes
	}
	return no
}

// everything reports whether a block has every address of its family.
func everything(b *networkingv1.IPBlock) bool {
	c, err := netip.ParsePrefix(b.CIDR)
	return err == nil && c.Bits() == 0 && len(b.Except) == 0
}

func block(b *networkingv1.IPBlock, a netip.Addr) allowed {
	if !a.IsValid() {
		return maybe
	}
	in := func(text string) bool {
		c, err := netip.ParsePrefix(text)
		return err == nil && c.Contains(a)
	}
	if in(b.CIDR) && !slices.ContainsFunc(b.Except, in) {
		return yes
	}
	return no
}

// clientSide is the end of the client, for endpoints of the family of an address.
func (e *explaining) clientSide(like netip.Addr) side {
	c := &e.question.Client
	out := side{Addr: c.Addr(like), Known: len(c.Addrs) > 0, Doubt: "name a client with --from"}
	if out.Known {
		out.Doubt = "you may not read what its selectors select"
	}
	if c.Host || !out.Addr.IsValid() {
		return out
	}
	for _, p := range e.objects.Pods {
		if !p.Spec.HostNetwork && slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == out.Addr.String() }) {
			out.Pod = p
			return out
		}
	}
	out.Stranger = e.objects.Policies.SomePods
	return out
}

// policies adds what NetworkPolicies make of connections to an endpoint.
func (e *explaining) policies(l *listed, at netip.AddrPort, protocol svc.Protocol, say func(text, source string)) {
	p := e.objects.Policies
	if p == nil || l.port == 0 || e.question.Then {
		return
	}
	client := e.clientSide(at.Addr())
	if client.Pod != nil && l.pod != nil && svc.NameOf(client.Pod) == svc.NameOf(l.pod) {
		return // a Pod always reaches itself
	}
	if client.Masked = client.Known && e.masked(at); client.Masked {
		client.Doubt = "endpoints see the node's address"
	}
	port := &policyPort{protocol, at.Port(), l.pod}
	if client.Pod != nil {
		doubt := "you may not read what its selectors select"
		if l.pod == nil {
			doubt = "the Pod of the endpoint is not known"
		}
		e.judge(client.Pod, &egress, &side{Addr: at.Addr(), Pod: l.pod, Known: true, Stranger: l.pod == nil, Doubt: doubt}, port, at, say)
	}
	switch {
	case l.pod == nil:
	case l.pod.Spec.HostNetwork:
		if p := p.selecting(l.pod, &ingress); len(p) > 0 {
			say("NetworkPolicy "+svc.NameOf(p[0]).String()+" selects it, and has no defined effect: its Pod is in the network of its node",
				about("NetworkPolicy", svc.NameOf(p[0]), "spec.podSelector"))
		}
	case e.question.Client.Host && e.question.Client.Node == l.node() && l.node() != "":
		if p := p.selecting(l.pod, &ingress); len(p) > 0 {
			say("NetworkPolicy "+svc.NameOf(p[0]).String()+" selects it, and does not count for its own node",
				about("NetworkPolicy", svc.NameOf(p[0]), "spec.podSelector"))
		}
	default:
		e.judge(l.pod, &ingress, &client, port, at, say)
	}
}

// masked reports whether an endpoint may see the address of a node in place of the client's: by a frontend that leads to it, or since the
// connections of a client outside of all nodes end at a node in the proxied way.
func (e *explaining) masked(at netip.AddrPort) bool {
	if s := e.objects.find(e.target); s != nil && e.question.Client.Node == "" && v1.Proxied(s) {
		return true
	}
	return slices.ContainsFunc(e.verdict.Frontends, func(f Frontend) bool { return f.masked && slices.Contains(f.Endpoints, at) })
}

// maxPolicies bounds the policies that are named for one Pod.
const maxPolicies = 8

// judge adds the policies that isolate a Pod in a direction: one that lets the connection through is enough; if none does, each of them is
// named.
func (e *explaining) judge(
	pod *corev1.Pod, d *direction, other *side, port *policyPort, at netip.AddrPort, say func(text, source string),
) {
	list := e.objects.Policies.selecting(pod, d)
	if len(list) == 0 {
		return
	}
	what := fmt.Sprintf("%s in to Pod %s, %s port %d", cmp.Or(e.question.Client.Text, "any client"), pod.Name, port.protocol, at.Port())
	if d.kind == networkingv1.PolicyTypeEgress {
		what = fmt.Sprintf("its client, Pod %s, out to %s", pod.Name, at)
		if port.protocol != svc.TCP {
			what += " by " + port.protocol.String()
		}
	}
	best, by := no, list[0]
	for _, n := range list {
		if a := e.objects.Policies.lets(n, d, other, port); a > best {
			best, by = a, n
		}
	}
	says := func(n *networkingv1.NetworkPolicy, format string) {
		say(fmt.Sprintf(format, svc.NameOf(n), what), about("NetworkPolicy", svc.NameOf(n), d.field))
	}
	switch {
	case best == yes:
		says(by, "NetworkPolicy %s lets %s")
		return
	case best == maybe:
		says(by, "NetworkPolicy %s may let %s: "+other.Doubt)
		return
	}
	for i, n := range list {
		if i == maxPolicies {
			say(fmt.Sprintf("%d more NetworkPolicies do not let it through either", len(list)-i), "NetworkPolicies of namespace "+pod.Namespace)
			return
		}
		says(n, "NetworkPolicy %s does not let %s: fairlead does not enforce it, and a network plugin that does drops the connection")
	}
}
