package metallb

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// NodeLabel is the label of a node that says which program has its sessions of BGP. A router accepts one from a node's address.
const NodeLabel = svc.LBNodeLabel

// The values of NodeLabel. Without it MetalLB's speaker runs on the node; with any value it does not.
const (
	// Leaving is on a node whose MetalLB ends.
	Leaving = "leaving"
	// Moved is on a node that fairlead lb has sessions from.
	Moved = "fairlead"
	// Coming is on a node whose sessions of fairlead lb end.
	Coming = "returning"
)

// Node is a node of the speakers.
type Node struct {
	Name   string
	Labels map[string]string
	// Ready reports whether MetalLB's speaker on it is.
	Ready bool
	// Speaker is fairlead lb's, nil if there is none.
	Speaker *v1.Speaker
}

// Sessions are what announces by BGP, and what it has to.
type Sessions struct {
	Nodes    []Node
	Services []*corev1.Service
	// Endpoints has the nodes with a ready endpoint of each Service.
	Endpoints map[svc.Name]map[string]bool
}

// node returns a node, nil if there is none of that name.
func (s *Sessions) node(name string) *Node {
	for i := range s.Nodes {
		if s.Nodes[i].Name == name {
			return &s.Nodes[i]
		}
	}
	return nil
}

// BGP reports whether nodes are changed one by one, because pools are announced by BGP.
func (p *Plan) BGP() bool { return len(p.peers) > 0 || p.begun != "" }

// begun is what shows that nodes change their sessions, or have changed them, whatever MetalLB's objects are now.
func begun(c *Cluster) string {
	if c.Speaker == nil {
		return ""
	}
	if _, held := c.Speaker.Annotations[Strategy]; held {
		return fmt.Sprintf("the DaemonSet %s/%s has the annotation %s", c.Speaker.Namespace, c.Speaker.Name, Strategy)
	}
	if c.Sessions == nil {
		return ""
	}
	for _, n := range c.Sessions.Nodes {
		if n.Labels[NodeLabel] != "" {
			return fmt.Sprintf("node %s has the label %s", n.Name, NodeLabel)
		}
	}
	return ""
}

// readNone notes why there are no peers, and refuses what would need them.
func (p *Plan) readNone(c *Cluster, why error) {
	if p.begun == "" {
		return
	}
	if p.Phase == Before {
		p.refuse("%s of an earlier change, and %v: remove that first", p.begun, why)
		return
	}
	p.unread = fmt.Errorf("nodes change their sessions of BGP (%s), and MetalLB's peers cannot be read: %w. Repair its objects in the "+
		"namespace %s first; where its webhook refuses that, start its controller for that time", p.begun, why, c.Speaker.Namespace)
	p.Refused = append(p.Refused, p.unread.Error())
}

// Peers returns MetalLB's peers as peers of fairlead lb, of the nodes that are Moved.
func (p *Plan) Peers() (out []*v1.BGPPeer) {
	for _, from := range p.peers {
		peer := from.DeepCopy()
		peer.Labels = map[string]string{PoolLabel: "true"}
		Restrict(peer, true)
		out = append(out, peer)
	}
	return out
}

// Restrict makes a peer one of the nodes that are Moved, or takes that back, and reports whether it was not so before.
func Restrict(peer *v1.BGPPeer, moved bool) bool {
	is := func(r metav1.LabelSelectorRequirement) bool { return r.Key == NodeLabel }
	s := peer.Spec.NodeSelector
	if moved == (s != nil && slices.ContainsFunc(s.MatchExpressions, is)) {
		return false
	}
	if !moved {
		s.MatchExpressions = slices.DeleteFunc(s.MatchExpressions, is)
		if len(s.MatchExpressions)+len(s.MatchLabels) == 0 {
			peer.Spec.NodeSelector = nil
		}
		return true
	}
	if s == nil {
		s = &metav1.LabelSelector{}
		peer.Spec.NodeSelector = s
	}
	s.MatchExpressions = append(s.MatchExpressions,
		metav1.LabelSelectorRequirement{Key: NodeLabel, Operator: metav1.LabelSelectorOpIn, Values: []string{Moved}})
	return true
}

// Secrets are the names of the Secrets of svc.SystemNamespace with the passwords of peers.
func (p *Plan) Secrets() (out []string) {
	for _, peer := range p.peers {
		if ref := peer.Spec.PasswordSecretRef; ref != nil {
			out = append(out, ref.Name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// takePasswords gives each peer with a password a Secret of its own, as passwords in objects have, and reads MetalLB's. A name of
// MetalLB's could be one that another program of svc.SystemNamespace has.
func (p *Plan) takePasswords(c *Cluster) {
	for _, peer := range p.peers {
		ref := peer.Spec.PasswordSecretRef
		if ref == nil || inline(peer, p.passwords) {
			continue
		}
		from := ref.Name
		ref.Name = svc.BGPPasswordPrefix + peer.Name
		var password []byte
		if s := c.Secrets[from]; s != nil {
			password = s.Data[v1.PasswordKey]
		}
		if p.passwords[ref.Name] = string(password); len(password) == 0 && p.Phase != After {
			p.refuse("BGPPeer %s: the Secret %s of MetalLB's namespace is missing, or its key %q is missing or empty", peer.Name, from,
				v1.PasswordKey)
		}
	}
}

// inline reports whether MetalLB's object has the password of a converted peer, which then refers to a Secret of its own.
func inline(peer *v1.BGPPeer, passwords map[string]string) bool {
	name := peer.Spec.PasswordSecretRef.Name
	return name == svc.BGPPasswordPrefix+peer.Name && passwords[name] != ""
}

// Password is the password that has to be in a Secret.
func (p *Plan) Password(secret string) string { return p.passwords[secret] }

// Permit lets the Role of fairlead lb read these Secrets, as lb.bgpSecrets of the chart does.
func (p *Plan) Permit(role *rbacv1.Role) {
	for i := range role.Rules {
		if r := &role.Rules[i]; slices.Equal(r.Resources, []string{"secrets"}) && len(r.ResourceNames) > 0 {
			r.ResourceNames = append(r.ResourceNames, p.Secrets()...)
		}
	}
}

// selects reports whether a node has a session with a peer.
func selects(peer *v1.BGPPeer, n *Node) bool { return n.matches(peer.Spec.NodeSelector) }

// matches reports whether a selector, nil for all nodes, is for a node.
func (n *Node) matches(s *metav1.LabelSelector) bool {
	if s == nil {
		return true
	}
	selector, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && selector.Matches(labels.Set(n.Labels))
}

// should reports whether a node is to announce an address of a Service by BGP, whichever program does it.
func (s *Sessions) should(n *Node, a Address) bool {
	if a.pool != nil && (!a.pool.Takes(v1.AnnounceBGP) || !n.matches(a.pool.NodeSelector)) {
		return false
	}
	if _, excluded := n.Labels[corev1.LabelNodeExcludeBalancers]; excluded {
		return false
	}
	i := slices.IndexFunc(s.Services, func(o *corev1.Service) bool { return svc.NameOf(o) == a.Service })
	if i < 0 || !has(s.Services[i], a) {
		return false
	}
	at := s.Endpoints[a.Service]
	if s.Services[i].Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		return at[n.Name]
	}
	return len(at) > 0 // MetalLB announces no Service without an endpoint
}

// has reports whether a Service that stays has an address.
func has(o *corev1.Service, a Address) bool {
	return o.DeletionTimestamp == nil && o.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		slices.ContainsFunc(o.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool { return i.IP == a.Addr.String() })
}

// does reports whether a node announces an address to a peer now.
func (s *Sessions) does(n *Node, a Address, peer *v1.BGPPeer) bool {
	if a.pool != nil {
		if peers, all := a.pool.RoutesTo(); !all && !slices.Contains(peers, peer.Name) {
			return false
		}
	}
	switch n.Labels[NodeLabel] {
	case "":
		return n.Ready && selects(peer, n) && s.should(n, a)
	case Moved:
		return n.Speaker != nil && established(n.Speaker, peer.Name) && announces(n.Speaker, a)
	}
	return false
}

func established(s *v1.Speaker, peer string) bool {
	return slices.ContainsFunc(s.Status.Peers, func(p v1.PeerStatus) bool { return p.Name == peer && p.State == v1.PeerEstablished })
}

// announces reports whether a Speaker announces an address by BGP, as far as its status has room for that.
func announces(s *v1.Speaker, a Address) bool {
	return int(s.Status.AddressCount) > len(s.Status.Addresses) ||
		slices.ContainsFunc(s.Status.Addresses, func(have v1.AnnouncedAddress) bool {
			return have.Via == v1.AnnounceBGP && have.Address == a.Addr.String()
		})
}

// Last returns an error if a router would have no route to an address without a node: no other one announces it to that router.
func (p *Plan) Last(s *Sessions, name string) error {
	n := s.node(name)
	if n == nil {
		return nil
	}
	for _, a := range p.given {
		for _, peer := range p.peers {
			if s.does(n, a, peer) && !slices.ContainsFunc(s.Nodes, func(o Node) bool { return o.Name != name && s.does(&o, a, peer) }) {
				return fmt.Errorf("no other node than %s announces the address %s of the Service %s to BGPPeer %s", name, a.Addr, a.Service,
					peer.Name)
			}
		}
	}
	return nil
}

// Established returns an error unless fairlead lb has the sessions of a node, and announces what the node has to.
func (p *Plan) Established(s *Sessions, name string) error {
	n := s.node(name)
	switch {
	case n == nil:
		return fmt.Errorf("node %s is gone", name)
	case n.Speaker == nil:
		return fmt.Errorf("node %s has no Speaker", name)
	}
	for _, peer := range p.peers {
		if !selects(peer, n) || established(n.Speaker, peer.Name) {
			continue
		}
		return fmt.Errorf("node %s has no session with BGPPeer %s%s", name, peer.Name, whyNot(n.Speaker, peer.Name))
	}
	for _, a := range p.given {
		for _, peer := range p.peers {
			if selects(peer, n) && s.should(n, a) && !announces(n.Speaker, a) {
				return fmt.Errorf("node %s does not announce the address %s of the Service %s%s", name, a.Addr, a.Service,
					why([]*v1.Speaker{n.Speaker}))
			}
		}
	}
	return nil
}

// whyNot is why a Speaker has no session with a peer.
func whyNot(s *v1.Speaker, peer string) string {
	for _, have := range s.Status.Peers {
		if have.Name == peer {
			return ": " + strings.TrimSuffix(have.State+", "+have.Reason, ", ")
		}
	}
	if !s.Status.Eligible {
		return ": " + s.Status.Reason
	}
	return ""
}

// Ended returns an error if fairlead lb still has a session of a node.
func (p *Plan) Ended(s *Sessions, name string) error {
	n := s.node(name)
	if n == nil || n.Speaker == nil {
		return nil
	}
	for _, peer := range n.Speaker.Status.Peers {
		if slices.ContainsFunc(p.peers, func(o *v1.BGPPeer) bool { return o.Name == peer.Name }) {
			return fmt.Errorf("node %s still has a session with BGPPeer %s", name, peer.Name)
		}
	}
	return nil
}

// Routers returns the addresses and ports of the routers that a node has sessions with.
func (p *Plan) Routers(s *Sessions, name string) (out []string) {
	n := s.node(name)
	if n == nil {
		return nil
	}
	for _, peer := range p.peers {
		if selects(peer, n) {
			out = append(out, fmt.Sprintf("%s:%d", bracketed(peer.Spec.Address), cmp.Or(peer.Spec.Port, bgpPort)))
		}
	}
	return out
}

// bgpPort is where routers listen.
const bgpPort = 179

func bracketed(address string) string {
	if strings.Contains(address, ":") {
		return "[" + address + "]"
	}
	return address
}

// decideBGP refuses sessions that cannot be changed without a loss of routes.
func (p *Plan) decideBGP(c *Cluster) {
	if names := p.Secrets(); len(names) > 0 {
		p.differ("passwords of BGP are copied to Secrets of %s: %s", svc.SystemNamespace, some(names))
	}
	p.decideSpeaker(c)
	if c.Sessions == nil || p.Phase != Before {
		return
	}
	var names []string
	lost := map[string]error{}
	for i := range c.Sessions.Nodes {
		n := &c.Sessions.Nodes[i]
		names = append(names, n.Name)
		if err := p.Last(c.Sessions, n.Name); err != nil {
			lost[n.Name] = err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(lost)) {
		p.refuse("%v: with BGP the router would have no route while the session of the node changes, for %s. Let a second node announce "+
			"it, or see the steps by hand in docs/loadbalancer.md", lost[name], gap)
	}
	slices.Sort(names)
	p.differ("nodes change their sessions of BGP one by one (%s), while the others have their routes. Routers then spread "+
		"connections again: some that are open end", some(names))
}

// gap is how long a node has no session while it changes the program: some seconds, or what the router adds.
const gap = "as long as the router waits after a session has ended"

// The variable of MetalLB's speaker with its mode, and values of it. Without it the speaker has sessions of its own.
const (
	modeVariable = "METALLB_BGP_TYPE"
	modeFRR      = "frr"
	modeFRRK8s   = "frr-k8s"
)

// decideSpeaker refuses a speaker that has no sessions of its own, or that announces where fairlead lb does not.
func (p *Plan) decideSpeaker(c *Cluster) {
	if c.Speaker == nil {
		return
	}
	for _, container := range c.Speaker.Spec.Template.Spec.Containers {
		for _, e := range container.Env {
			switch {
			case e.Name != modeVariable:
			case e.Value == modeFRRK8s:
				p.refuse("MetalLB has BGP in the mode %s, where other Pods have the sessions: they stay when MetalLB's speaker ends. Change "+
					"MetalLB to its native mode first (frrk8s.enabled and speaker.frr.enabled of its chart), or see the steps by hand in "+
					"docs/loadbalancer.md", e.Value)
			case e.Value == modeFRR:
				p.differ("MetalLB has BGP in the mode %s, with which this change is not tested", e.Value)
			}
		}
		if slices.ContainsFunc(slices.Concat(container.Command, container.Args), isIgnoreExclude) {
			p.refuse("MetalLB has --ignore-exclude-lb, and fairlead lb announces from no node with the label %s: remove the flag first",
				corev1.LabelNodeExcludeBalancers)
		}
	}
}

// isIgnoreExclude reports whether an argument has MetalLB announce from nodes that are excluded from load balancers.
func isIgnoreExclude(arg string) bool {
	name, value, has := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	on, err := strconv.ParseBool(value)
	return strings.HasPrefix(arg, "-") && name == "ignore-exclude-lb" && (!has || on || err != nil)
}
