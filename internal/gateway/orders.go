package gateway

import (
	"fmt"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/svc"
)

// Ordered is what becomes of a listener that has its certificate ordered. The zero value has it given.
type Ordered struct {
	// Secret gets the certificate.
	Secret svc.Name
	// Problem is why none is ordered, "" if one is.
	Problem string
}

// Name returns the name of the Gateway.
func (f *frontTLS) Name() svc.Name { return f.gateway }

// OrderedOf returns the listeners of a Gateway that have their certificates ordered, or of one of its ListenerSets, by their names.
func OrderedOf(f *Front, set svc.Name) map[gwv1.SectionName]Ordered {
	out := map[gwv1.SectionName]Ordered{}
	for _, l := range f.listeners {
		of := svc.Name{}
		if l.set != nil {
			of = svc.NameOf(l.set)
		}
		if of == set && l.ordered != (Ordered{}) {
			out[l.spec.Name] = l.ordered
		}
	}
	return out
}

// order has the certificates of the listeners of a front ordered whose object asks for that.
func order(f *Front, g *gwv1.Gateway) {
	f.Orders = certificates.NewSet()
	for _, l := range f.listeners {
		kind, of, value := kindGateway, svc.NameOf(g), g.Annotations[dialect.ACME]
		if l.set != nil {
			kind, of, value = kindListenerSet, svc.NameOf(l.set), l.set.Annotations[dialect.ACME]
		}
		if value == "" || !l.tls() || f.refused != "" || l.refused != "" {
			continue
		}
		o := certificates.Order{Kind: string(kind), Of: of, Hosts: []string{l.host}}
		wrong := l.fit(&o, value)
		o.Answered = o.Challenge != dialect.DNS01
		if wrong == "" {
			wrong = unanswered(f, l, o.Challenge)
		}
		if wrong == "" {
			wrong = f.Orders.Add(o)
		}
		l.ordered = Ordered{o.Secret, wrong}
	}
}

// fit reads how the certificate of the listener is ordered. It returns why it cannot be, "" if it can.
func (l *listener) fit(o *certificates.Order, value string) string {
	var err error
	if o.Challenge, err = dialect.ReadACME(value); err != nil {
		return fmt.Sprintf("annotation %s: %s", dialect.ACME, err)
	}
	if l.spec.TLS == nil || len(l.spec.TLS.CertificateRefs) == 0 {
		return "tls.certificateRefs: want a Secret, which gets the certificate"
	}
	ref := &l.spec.TLS.CertificateRefs[0]
	o.Secret = svc.Name{Namespace: l.in, Name: string(ref.Name)}
	namespace := string(valueOf(ref.Namespace, gwv1.Namespace(l.in)))
	if valueOf(ref.Group, "") != "" || valueOf(ref.Kind, "Secret") != "Secret" || namespace != l.in {
		return fmt.Sprintf("tls.certificateRefs[0]: want a Secret of namespace %s, which gets the certificate", l.in)
	}
	if wrong := dialect.UnfitForACME(l.host, o.Challenge); wrong != "" {
		return "hostname: " + wrong
	}
	return ""
}

// unanswered returns why nodes cannot answer an authority for the listener, "" if they can.
func unanswered(f *Front, l *listener, challenge string) string {
	const http, https = 80, 443
	switch {
	case challenge == dialect.DNS01:
		return ""
	case l.spec.Port != https:
		return fmt.Sprintf("port: want %d, or the challenge %s: an authority asks who has the host there", https, dialect.DNS01)
	case challenge == dialect.HTTP01 && slices.ContainsFunc(f.listeners, func(o *listener) bool {
		return o.spec.Port == http && o.refused == "" && o.spec.Protocol != gwv1.HTTPProtocolType && o.spec.Protocol != gwv1.UDPProtocolType
	}):
		return fmt.Sprintf("port %d is of another protocol than HTTP, and an authority asks there by %s", http, dialect.HTTP01)
	}
	return ""
}

// addAwaiting adds the ports of listeners that have no certificate yet: an authority asks at the front's address, which it only
// has with a port.
func addAwaiting(f *Front, ports map[PortKey]string) {
	for _, l := range f.listeners {
		key := PortKey{Number: uint16(l.spec.Port)} //nolint:gosec // as in listenersOf
		if ports[key] != "" || !f.Orders.Has(l.ordered.Secret) || l.ordered.Problem != "" || len(l.kinds) == 0 {
			continue
		}
		if ports[key] = "https"; l.mode() != Requests {
			ports[key] = "tls"
		}
	}
}

// orderEntry has the certificate of an entry of an Ingress's tls ordered, if the Ingress asks for that. It reports whether it is.
func orderEntry(b *ingressBuilder, in *networkingv1.Ingress, entry int, secret svc.Name, hosts []string) bool {
	value := in.Annotations[dialect.ACME]
	if value == "" {
		return false
	}
	o := certificates.Order{Kind: kindIngress, Of: svc.NameOf(in), Secret: secret}
	var err error
	if o.Challenge, err = dialect.ReadACME(value); err != nil {
		b.problem(in, "annotation %s: %s; no certificate is ordered", dialect.ACME, err)
		return false
	}
	o.Answered = o.Challenge != dialect.DNS01
	for _, h := range hosts {
		if other, taken := b.secrets[h]; taken && other != secret {
			continue // another one is shown for it
		}
		if wrong := dialect.UnfitForACME(h, o.Challenge); wrong != "" {
			b.problem(in, "tls[%d].hosts: %s; no certificate is ordered", entry, wrong)
			return false
		}
		o.Hosts = append(o.Hosts, h)
	}
	if len(o.Hosts) == 0 {
		return false
	}
	if wrong := b.front.Orders.Add(o); wrong != "" {
		b.problem(in, "tls[%d]: %s; no certificate is ordered", entry, wrong)
		return false
	}
	return true
}
