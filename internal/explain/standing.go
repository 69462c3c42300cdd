package explain

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/owners"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Standing tells if an address, a route or an Ingress is served.
type Standing string

// The standings. Foreign is for what fairlead does not serve: another controller does, or nothing. NotKnown is for what the user may
// not read, and for what no node would report.
const (
	Served     Standing = "served"
	HasProblem Standing = "problem"
	NotKnown   Standing = "unknown"
	Foreign    Standing = "foreign"
)

// Judgement is a Standing with its reason. Its JSON form is meant for programs: fields are only ever added.
type Judgement struct {
	Status Standing `json:"status"`
	// Reason is empty for Served.
	Reason string `json:"reason,omitempty"`
	source string
	// heard is set if the Speakers were asked for an address that fairlead has given, and none reports to announce it.
	heard bool
}

func (j *Judgement) line() Line { return Line{j.Reason, j.source} }

// Worst orders standings: what needs a look comes first.
func (s Standing) Worst() int {
	return slices.Index([]Standing{HasProblem, NotKnown, Served, Foreign}, s)
}

// known is the index of Balancers, made once for all addresses.
type known struct {
	announced map[string][]owners.Owner
	claims    map[netip.Addr]*claim.Claim
	// elsewhere is set if a node may announce addresses that its Speaker does not list.
	elsewhere bool
	// unread has the lines of Unread by their kinds.
	unread map[string]string
}

func (b *Balancers) known() *known {
	if b.index != nil {
		return b.index
	}
	k := &known{announced: owners.Of(b.Speakers, owners.Silent(b.Nodes)), claims: map[netip.Addr]*claim.Claim{}, unread: map[string]string{},
		elsewhere: slices.ContainsFunc(b.Speakers, func(s v1.Speaker) bool { return owners.Unlisted(&s) || owners.Otherwise(&s) })}
	for i := range b.Claims {
		k.claims[b.Claims[i].Addr] = &b.Claims[i]
	}
	for _, l := range b.Unread {
		k.unread[l.Source] = l.Text
	}
	b.index = k
	return k
}

// foreignClass is the class of a Service that another controller serves, empty if fairlead does.
func foreignClass(s *corev1.Service) string {
	if c := s.Spec.LoadBalancerClass; c != nil && *c != svc.LoadBalancerClass {
		return *c
	}
	return ""
}

// Pending judges a load balancer without an address.
func Pending(s *corev1.Service) Judgement {
	if class := foreignClass(s); class != "" {
		return Judgement{Status: Foreign, Reason: "another controller serves it, of the class " + class,
			source: about("Service", svc.NameOf(s), "spec.loadBalancerClass")}
	}
	return Judgement{Status: HasProblem, Reason: "it has no address", source: about("Service", svc.NameOf(s), "status.loadBalancer.ingress")}
}

// Judge judges an address in the status of a Service; one that is not valid stands for a hostname.
func (b *Balancers) Judge(s *corev1.Service, a netip.Addr) Judgement {
	k, status := b.known(), about("Service", svc.NameOf(s), "status.loadBalancer.ingress")
	c, announced := k.claims[a], owners.Announced(k.announced[a.String()])
	claims, unread := k.unread[ClaimKind]
	switch {
	case foreignClass(s) != "":
		return Pending(s)
	case c == nil && !unread || !a.IsValid():
		return Judgement{Foreign, "fairlead has not given the address to it: another controller or a user has written it", status, false}
	case c != nil && !slices.Contains(c.Services, svc.NameOf(s)):
		return Judgement{HasProblem, "the address is of " + claim.Join(c.Services),
			"IPAddress " + a.String() + " annotation " + svc.ClaimServicesAnnotation, false}
	case announced:
		return Judgement{Status: Served}
	case b.Blind:
		return Judgement{NotKnown, k.unread[SpeakerKind], SpeakerKind, false}
	case c == nil:
		return Judgement{NotKnown, claims, ClaimKind, false}
	case len(b.Speakers) == 0:
		return Judgement{NotKnown, "no node has a speaker: the address must be routed to the nodes by other means", SpeakerKind, true}
	case k.elsewhere:
		return Judgement{NotKnown, "no node reports to announce it, and it may be routed by other means", SpeakerKind, true}
	}
	return Judgement{HasProblem, "no node announces it", SpeakerKind, true}
}

// SpeakerKind is the source of lines about Speakers, also in Balancers.Unread.
const SpeakerKind = "Speakers"

// PoolOf is the pool of an address of a Service, empty if it is of none, of another Service, or not known.
func (b *Balancers) PoolOf(s *corev1.Service, a netip.Addr) string {
	if c := b.known().claims[a]; c != nil && slices.Contains(c.Services, svc.NameOf(s)) {
		return c.Pool
	}
	return ""
}

// Announcing are the nodes that have reported to announce an address.
func (b *Balancers) Announcing(a netip.Addr) []owners.Owner { return b.known().announced[a.String()] }

// Stands is the worst standing of the addresses of a load balancer.
func (b *Balancers) Stands(s *corev1.Service) Standing {
	if len(s.Status.LoadBalancer.Ingress) == 0 {
		return Pending(s).Status
	}
	out := Foreign
	for i := range s.Status.LoadBalancer.Ingress {
		a, _ := claim.Ingress(&s.Status.LoadBalancer.Ingress[i])
		if j := b.Judge(s, a); j.Status.Worst() < out.Worst() {
			out = j.Status
		}
	}
	return out
}
