package trust

import (
	"fmt"
	"net/url"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Policy is how TLS to the backends of a BackendTLSPolicy begins.
type Policy struct {
	// Hostname is asked for (SNI), and the certificate must be for it unless there are Names.
	Hostname string
	// Names are the ones of which a certificate must have one.
	Names []Name
	// System is true if the authorities of the node's operating system count, instead of Authorities.
	System      bool
	Authorities []Ref
	// Accepted and Resolved are the verdicts of its status, with what is wrong, "" if nothing is. They do not depend on other policies.
	// No connection may be made by a policy that is not accepted.
	Accepted, Resolved       gwv1.PolicyConditionReason
	NotAccepted, NotResolved string
	Generation               int64
	targets                  map[svc.Name][]string
	policy                   *gwv1.BackendTLSPolicy
}

// Name is a subject alternative name.
type Name struct {
	URI   bool
	Value string
}

// Read reads a policy of a list, whose authorities are added to the others.
func (p *Policies) Read(n svc.Name, authorities *Authorities) *Policy {
	from := p.all[n]
	v := &from.Spec.Validation
	out := &Policy{
		Hostname: string(v.Hostname), Accepted: gwv1.PolicyReasonAccepted, Resolved: gwv1.BackendTLSPolicyReasonResolvedRefs,
		Generation: from.Generation, targets: targetsOf(from), policy: from,
	}
	for i, s := range v.SubjectAltNames {
		out.readName(i, &s)
	}
	switch known := v.WellKnownCACertificates; {
	case len(v.CACertificateRefs) > 0:
		out.readAuthorities(from, authorities)
	case known != nil && *known == gwv1.WellKnownCACertificatesSystem:
		out.System = true
	default:
		out.refuse(gwv1.PolicyReasonInvalid, "validation.wellKnownCACertificates: want System")
	}
	return out
}

func (p *Policy) refuse(why gwv1.PolicyConditionReason, format string, args ...any) {
	if p.NotAccepted == "" {
		p.Accepted, p.NotAccepted = why, fmt.Sprintf(format, args...)
	}
}

func (p *Policy) miss(why gwv1.PolicyConditionReason, format string, args ...any) {
	if p.NotResolved == "" {
		p.Resolved, p.NotResolved = why, fmt.Sprintf(format, args...)
	}
}

func (p *Policy) readName(i int, s *gwv1.SubjectAltName) {
	at := fmt.Sprintf("validation.subjectAltNames[%d]", i)
	switch {
	case s.Type == gwv1.HostnameSubjectAltNameType && s.Hostname != "":
		p.Names = append(p.Names, Name{Value: strings.ToLower(string(s.Hostname))})
	case s.Type == gwv1.URISubjectAltNameType && s.URI != "":
		u, err := url.Parse(string(s.URI))
		if err != nil || u.Scheme == "" {
			p.refuse(gwv1.PolicyReasonInvalid, "%s.uri: want an absolute URI", at)
			return
		}
		p.Names = append(p.Names, Name{true, u.String()})
	default:
		p.refuse(gwv1.PolicyReasonInvalid, "%s.type: want Hostname or URI, and the field of that name", at)
	}
}

// readAuthorities reads the references of a policy. With one that can be used the policy counts: fewer authorities verify fewer
// certificates.
func (p *Policy) readAuthorities(from *gwv1.BackendTLSPolicy, authorities *Authorities) {
	for i, r := range from.Spec.Validation.CACertificateRefs {
		at := fmt.Sprintf("validation.caCertificateRefs[%d]", i)
		ref, ok := RefOf(string(r.Group), string(r.Kind), svc.Name{Namespace: from.Namespace, Name: string(r.Name)})
		if !ok {
			p.miss(gwv1.BackendTLSPolicyReasonInvalidKind, WrongKind, at, r.Kind)
			continue
		}
		if wrong := authorities.Add(ref); wrong != "" {
			p.miss(gwv1.BackendTLSPolicyReasonInvalidCACertificateRef, "%s: %s: %s", at, ref, wrong)
			continue
		}
		p.Authorities = append(p.Authorities, ref)
	}
	if len(p.Authorities) == 0 {
		p.refuse(gwv1.BackendTLSPolicyReasonNoValidCACertificate, "no reference leads to an authority; %s", p.NotResolved)
	}
}

// WrongKind is the text about a reference to a kind that has no authorities.
const WrongKind = "%s: objects of kind %s have no authorities; want a ConfigMap or a Secret"

// RefOf returns the reference to an object of a group and kind. ok is false if objects of that kind have no authorities.
func RefOf(group, kind string, n svc.Name) (r Ref, ok bool) {
	return Ref{kind, n}, group == "" && (kind == ConfigMap || kind == Secret)
}

// Verdict returns the reason of the condition Accepted for a Gateway with some of the Services as backends, and what is wrong, "" if
// nothing is. hasPort reports whether a Service has a port by that name.
func (p *Policies) Verdict(of *Policy, backs func(svc.Name) bool, hasPort func(svc.Name, string) bool) (
	reason gwv1.PolicyConditionReason, wrong string,
) {
	if of.NotAccepted != "" {
		return of.Accepted, of.NotAccepted
	}
	for _, r := range of.policy.Spec.TargetRefs {
		service := svc.Name{Namespace: of.policy.Namespace, Name: string(r.Name)}
		if !backs(service) {
			continue
		}
		for _, section := range of.targets[service] {
			if first := p.services[service].sections[section][0]; first.Name != of.policy.Name {
				return gwv1.PolicyReasonConflicted, fmt.Sprintf("BackendTLSPolicy %s takes precedence for Service %s", first.Name, service.Name)
			}
			if section != "" && !hasPort(service, section) {
				return gwv1.PolicyReasonTargetNotFound, fmt.Sprintf("Service %s has no port with the name %s", service.Name, section)
			}
		}
	}
	return of.Accepted, ""
}
