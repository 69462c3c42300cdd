// Package owners finds the nodes that announce the addresses of load balancers, by the reports of their Speakers, and the reason for
// which another node does not. It is pure, and shared by 'fairlead lb status' and 'fairlead explain'.
package owners

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// Owner is a node that announces an address. Its JSON form is meant for programs: fields are only ever added.
type Owner struct {
	Node      string    `json:"node"`
	Via       string    `json:"via"`
	Interface string    `json:"interface,omitempty"`
	Since     time.Time `json:"since"`
	Reason    string    `json:"reason,omitempty"`
	// Stale means that the node has not taken back what it once reported: another one has
	// begun to answer since, or nothing is heard of the node.
	Stale bool `json:"stale,omitempty"`
}

// ViaBGP is Owner.Via of a route.
const ViaBGP = "bgp"

// How returns the way in which the owner announces, and the interface if there is one.
func (o *Owner) How() string {
	if o.Interface == "" {
		return o.Via
	}
	return o.Via + " on " + o.Interface
}

// Of returns who announces each address, sorted by nodes, as the speakers have last reported. silent are the nodes that nothing is
// heard of. A speaker that died could not take its addresses back, nor could one that did not return: of several that answer ARP or
// NDP the one that began last counts.
func Of(speakers []v1.Speaker, silent map[string]bool) map[string][]Owner {
	owners := map[string][]Owner{}
	for i := range speakers {
		s := &speakers[i]
		for _, a := range s.Status.Addresses {
			owners[a.Address] = append(owners[a.Address],
				Owner{Node: s.Name, Via: a.Via, Interface: a.Interface, Since: a.Since.Time, Reason: a.Reason,
					Stale: silent[s.Name] || Missing(&s.Status)})
		}
	}
	for _, list := range owners {
		var last time.Time
		for _, o := range list {
			if o.Via != ViaBGP && o.Since.After(last) {
				last = o.Since
			}
		}
		for i := range list {
			list[i].Stale = list[i].Stale || list[i].Via != ViaBGP && list[i].Since.Before(last)
		}
		slices.SortFunc(list, func(a, b Owner) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Via, b.Via)) })
	}
	return owners
}

// Announced reports whether a node announces an address, as far as is known.
func Announced(list []Owner) bool {
	return slices.ContainsFunc(list, func(o Owner) bool { return !o.Stale })
}

// Missing reports whether a speaker ended to be restarted, and is not back in time: only its next process takes back what
// it has announced.
func Missing(s *v1.SpeakerStatus) bool { return s.ReturnBy != nil && time.Now().After(s.ReturnBy.Time) }

// Silent returns whether the API server hears nothing of each of the nodes.
func Silent(nodes []*corev1.Node) map[string]bool {
	silent := map[string]bool{}
	for _, n := range nodes {
		silent[n.Name] = slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
		})
	}
	return silent
}

// Idle is why the speaker of a node that is heard of announces no address at all, with the field that says so; both are empty if it
// may announce some.
func Idle(s *v1.Speaker) (why, field string) {
	switch {
	case s.Status.Announce == v1.AnnounceNone:
		return "--lb-announce none", "status.announce"
	case Missing(&s.Status):
		return "its speaker ended to be restarted, and has not returned", "status.returnBy"
	case !s.Status.Eligible && len(s.Status.Addresses) == 0:
		return cmp.Or(s.Status.Reason, "it is not eligible"), "status.reason"
	}
	return "", ""
}

// NoSpeaker is why a node without a Speaker object announces nothing.
const NoSpeaker = "it has no speaker, or one with --lb-announce none"

// Wanted is an address, and what decides which nodes may announce it beside their speakers.
type Wanted struct {
	Addr netip.Addr
	// Pool is the pool of the address, nil if it is of none or not known.
	Pool *v1.IPAddressPool
	// Local is set if only the Nodes may announce it, by the policy Local of its Service.
	Local bool
	Nodes []string
	// Service is NAMESPACE/NAME.
	Service string
}

// WhyNot is why a node does not announce an address, and the object with the field that says so. node is nil if it may not be read.
func (w *Wanted) WhyNot(s *v1.Speaker, node *corev1.Node) (why, source string) {
	if why, source := w.Bar(s, node); why != "" {
		return why, source
	}
	if Unlisted(s) {
		return fmt.Sprintf("it announces %d addresses, and its status lists %d of them: this may be one of the others", s.Status.AddressCount,
			len(s.Status.Addresses)), "Speaker " + s.Name + " status.addressCount"
	}
	return "it could: its proxy has not programmed the address yet, or the nodes have not agreed on it",
		"Speaker " + s.Name + " status.addresses"
}

// Bar is what keeps a node from announcing the address, and its source, as WhyNot; both are empty if nothing does.
func (w *Wanted) Bar(s *v1.Speaker, node *corev1.Node) (why, source string) {
	speaker := func(field string) string { return "Speaker " + s.Name + " " + field }
	if node != nil && Silent([]*corev1.Node{node})[node.Name] {
		return "nothing is heard of it", "Node " + node.Name + " condition Ready"
	}
	if why, field := Idle(s); why != "" {
		return why, speaker(field)
	}
	if !s.Status.Eligible {
		return cmp.Or(s.Status.Reason, "it is not eligible"), speaker("status.reason")
	}
	if w.Pool != nil && node != nil && !selects(w.Pool, node) {
		return "the pool's nodeSelector " + metav1.FormatLabelSelector(w.Pool.Spec.NodeSelector) + " does not select it",
			"IPAddressPool " + w.Pool.Name + " spec.nodeSelector"
	}
	if w.Local && !slices.Contains(w.Nodes, s.Name) {
		return "policy Local, and it has no ready endpoint", "Service " + w.Service + " spec.externalTrafficPolicy"
	}
	arp, bgp := w.noARP(&s.Status), w.noBGP(&s.Status)
	if arp == "" || bgp == "" {
		return "", ""
	}
	return arp + "; " + bgp, speaker("status.announce, status.networks, status.peers")
}

// Otherwise reports whether addresses may be routed to the node of a speaker by other means: it announces none, or is of a build that does
// not report how it announces.
func Otherwise(s *v1.Speaker) bool {
	return s.Status.Announce == v1.AnnounceNone || s.Status.Announce == "" && len(s.Status.Interfaces) == 0
}

// Unlisted reports whether the status of a speaker may leave out addresses that it announces.
func Unlisted(s *v1.Speaker) bool { return int(s.Status.AddressCount) > len(s.Status.Addresses) }

func selects(p *v1.IPAddressPool, node *corev1.Node) bool {
	if p.Spec.NodeSelector == nil {
		return true
	}
	selector, err := metav1.LabelSelectorAsSelector(p.Spec.NodeSelector)
	return err == nil && selector.Matches(labels.Set(node.Labels))
}

// noARP is why a speaker does not answer ARP or NDP for the address, empty if it may.
func (w *Wanted) noARP(s *v1.SpeakerStatus) string {
	switch {
	case w.Pool != nil && !w.Pool.Spec.Takes(v1.AnnounceARP):
		return "the pool is not for ARP and NDP"
	case s.Announce != "" && s.Announce != v1.AnnounceARP:
		return "it does not answer ARP and NDP (--lb-announce " + s.Announce + ")"
	case len(s.Interfaces) == 0:
		return "it has no interface for ARP and NDP"
	case w.Pool != nil && len(w.Pool.Spec.Interfaces) > 0:
		if slices.ContainsFunc(w.Pool.Spec.Interfaces, func(i string) bool { return slices.Contains(s.Interfaces, i) }) {
			return ""
		}
		return "it has none of the pool's interfaces " + strings.Join(w.Pool.Spec.Interfaces, ", ")
	case s.AnyNetwork || slices.ContainsFunc(s.Networks, func(text string) bool {
		p, err := netip.ParsePrefix(text)
		return err == nil && p.Contains(w.Addr)
	}):
		return ""
	}
	return "its networks " + strings.Join(s.Networks, ", ") + " do not have the address"
}

// noBGP is why a speaker has no route to the address at a peer, empty if it may.
func (w *Wanted) noBGP(s *v1.SpeakerStatus) string {
	if w.Pool != nil && !w.Pool.Spec.Takes(v1.AnnounceBGP) {
		return "the pool is not for BGP"
	}
	peers := w.Peers(s)
	switch {
	case len(s.Peers) == 0:
		return "it has no BGP peer"
	case len(peers) == 0:
		return "the pool's routes are for other BGP peers"
	case slices.ContainsFunc(peers, func(p v1.PeerStatus) bool { return p.State == v1.PeerEstablished }):
		return ""
	}
	var out []string
	for i := range peers {
		out = append(out, PeerText(&peers[i]))
	}
	return strings.Join(out, ", ")
}

// Peers are the BGP peers of a speaker that get routes to the address.
func (w *Wanted) Peers(s *v1.SpeakerStatus) []v1.PeerStatus {
	if w.Pool == nil {
		return s.Peers
	}
	names, all := w.Pool.Spec.RoutesTo()
	if all {
		return s.Peers
	}
	return slices.DeleteFunc(slices.Clone(s.Peers), func(p v1.PeerStatus) bool { return !slices.Contains(names, p.Name) })
}

// PeerText describes the session with a peer.
func PeerText(p *v1.PeerStatus) string {
	text := fmt.Sprintf("BGP peer %s (%s) is %s", p.Name, p.Address, p.State)
	if !p.Since.IsZero() {
		text += " since " + p.Since.UTC().Format(time.RFC3339)
	}
	if p.State != v1.PeerEstablished && p.Reason != "" {
		text += ": " + p.Reason
	}
	return text
}
