// Package effects has the consequences of a change of a TLS Secret, or of an IPAddressPool, for the Services that use it. It is pure.
package effects

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/svc"
)

// Users are the objects that may use TLS Secrets in the proxied way.
type Users struct {
	Services       []*corev1.Service
	Ingresses      []*networkingv1.Ingress
	IngressClasses []*networkingv1.IngressClass
	Gateways       []*gwv1.Gateway
	GatewayClasses []*gwv1.GatewayClass
	Sets           []*gwv1.ListenerSet
	// ClassesUnread and GatewayClassesUnread are set if the user may not list the classes: then each object may be of fairlead.
	ClassesUnread, GatewayClassesUnread bool
	// GatewaysUnread is set if Gateways of other namespaces are not in Gateways: a ListenerSet may hang on one of fairlead there.
	GatewaysUnread bool
}

// ifOurs follows an object whose class is not known.
const ifOurs = ", if its class is of fairlead,"

// use is a listener that has a Secret for its certificate.
type use struct {
	service  svc.Name
	listener string
	// keeps is set if nodes go on with the last certificate while the Secret has none that can be used.
	keeps bool
	// beside are the Secrets of its other certificates.
	beside []svc.Name
}

// SecretChange is what becomes of a Secret. One that does not exist is nil.
type SecretChange struct{ Before, After *corev1.Secret }

func (c *SecretChange) name() svc.Name {
	if c.After == nil {
		return svc.NameOf(c.Before)
	}
	return svc.NameOf(c.After)
}

// Certificates returns what the changes of Secrets, taken together, mean for each listener that uses one of them.
func (u *Users) Certificates(all []SecretChange, now time.Time) (out []explain.Change) {
	without := map[svc.Name]bool{}
	for i := range all {
		after, _ := read(all[i].After)
		without[all[i].name()] = after == nil
	}
	for i := range all {
		out = append(out, u.certificates(all[i].name(), all[i].Before, all[i].After, without, now)...)
	}
	return out
}

// certificates returns what the change of one Secret means. without are the Secrets that have no certificate after all changes.
func (u *Users) certificates(name svc.Name, was, is *corev1.Secret, without map[svc.Name]bool, now time.Time) (out []explain.Change) {
	before, _ := read(was)
	after, problem := read(is)
	for _, l := range u.of(name) {
		c := explain.Change{Service: l.service.String()}
		switch {
		case after != nil && before != nil && slices.EqualFunc(before.Certificate, after.Certificate, bytes.Equal):
			continue
		case after != nil && before == nil:
			c.Text = fmt.Sprintf("%s serves the certificate of Secret %s: %s", l.listener, name, text(after, now))
		case after != nil:
			c.Text = fmt.Sprintf("%s serves another certificate: %s, in place of %s", l.listener, text(after, now), text(before, now))
		case before == nil:
			c.Text = fmt.Sprintf("%s has no certificate of Secret %s: %s", l.listener, name, problem)
		case l.keeps:
			c.Text = fmt.Sprintf("%s keeps its last certificate, and a node that starts has none: Secret %s: %s", l.listener, name, problem)
		default:
			c.Text = fmt.Sprintf("%s loses its certificate, %s: Secret %s: %s", l.listener, text(before, now), name, problem)
			if !slices.ContainsFunc(l.beside, func(n svc.Name) bool { return !without[n] }) {
				c.Cuts = "it has no other certificate: new TLS connections fail, and open ones end with the listener"
			}
		}
		out = append(out, c)
	}
	return out
}

// read returns the certificate of a Secret, or why it has none.
func read(s *corev1.Secret) (*tls.Certificate, string) {
	if s == nil {
		return nil, "it does not exist"
	}
	return watch.ReadTLS(s)
}

// text names a certificate, and when it ends.
func text(c *tls.Certificate, now time.Time) string {
	leaf := c.Leaf
	who := slices.Clone(leaf.DNSNames)
	for _, a := range leaf.IPAddresses {
		who = append(who, a.String())
	}
	if len(who) == 0 {
		who = []string{leaf.Subject.String()}
	}
	const named = 4
	if len(who) > named {
		who = append(who[:named], fmt.Sprintf("%d more", len(who)-named))
	}
	end := "ends " + leaf.NotAfter.UTC().Format(time.DateOnly)
	if now.After(leaf.NotAfter) {
		end = "has ended on " + leaf.NotAfter.UTC().Format(time.DateOnly)
	}
	return fmt.Sprintf("for %s (%s)", strings.Join(who, ", "), end)
}

// of returns the listeners that use a Secret.
func (u *Users) of(secret svc.Name) (out []use) {
	for _, s := range u.Services {
		if s.Namespace != secret.Namespace || s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		if r := claim.Read(s); r.Way == dialect.Proxied {
			out = append(out, ofService(s, &r.Spec, secret.Name)...)
		}
	}
	return append(append(out, u.ofIngresses(secret)...), u.ofGateways(secret)...)
}

func ofService(s *corev1.Service, spec *dialect.Spec, secret string) (out []use) {
	n := svc.NameOf(s)
	if slices.Contains(spec.Certificates, secret) {
		for _, l := range spec.Listeners {
			if l.Protocol == dialect.HTTPS || l.Protocol == dialect.TLS {
				out = append(out, use{n, fmt.Sprintf("listener %s on port %d", l.Protocol, l.Port), true, nil})
			}
		}
	}
	if spec.BackendTLS.Certificate == secret {
		out = append(out, use{n, "the side of the endpoints", true, nil})
	}
	return out
}

// ofIngresses returns the Ingresses of this controller that name a Secret.
func (u *Users) ofIngresses(secret svc.Name) (out []use) {
	classes := map[string]*networkingv1.IngressClass{}
	for _, c := range u.IngressClasses {
		classes[c.Name] = c
	}
	byDefault := names.DefaultClass(slices.Values(u.IngressClasses))
	for _, in := range u.Ingresses {
		c, perhaps := classes[names.ClassOf(in, byDefault)], ""
		if c == nil && u.ClassesUnread {
			perhaps = ifOurs
		} else if c == nil {
			continue
		} else if ours, _ := names.OurIngressClass(c); !ours {
			continue
		}
		if in.Namespace != secret.Namespace {
			continue
		}
		for i := range in.Spec.TLS {
			if in.Spec.TLS[i].SecretName == secret.Name {
				front := names.SharedFront()
				if own, _ := fronts.Read(in.Annotations); own {
					front = svc.NameOf(in)
				}
				out = append(out, use{names.ServiceOfFront(front), fmt.Sprintf("Ingress %s for hosts %s", svc.NameOf(in),
					strings.Join(in.Spec.TLS[i].Hosts, ", ")) + perhaps, false, nil})
			}
		}
	}
	return out
}

// ofGateways returns the listeners of Gateways and ListenerSets of this controller that name a Secret.
func (u *Users) ofGateways(secret svc.Name) (out []use) {
	foreign, ours := map[string]bool{}, map[string]bool{}
	for _, c := range u.GatewayClasses {
		ours[c.Name], foreign[c.Name] = names.OurClass(c), !names.OurClass(c)
	}
	mine := map[svc.Name]bool{}
	perhaps := ""
	if u.GatewayClassesUnread {
		perhaps = ifOurs
	}
	add := func(of svc.Name, what, namespace string, l *gwv1.Listener) {
		if l.TLS == nil {
			return
		}
		var beside []svc.Name
		for i := range l.TLS.CertificateRefs {
			if n := refName(namespace, &l.TLS.CertificateRefs[i]); n != secret && n != (svc.Name{}) {
				beside = append(beside, n)
			}
		}
		for _, ref := range l.TLS.CertificateRefs {
			if refName(namespace, &ref) == secret {
				out = append(out, use{names.ServiceOfGateway(of), fmt.Sprintf("listener %s on port %d of %s", l.Name, l.Port, what) + perhaps, false,
					beside})
			}
		}
	}
	for _, g := range u.Gateways {
		n := svc.NameOf(g)
		if class := string(g.Spec.GatewayClassName); foreign[class] || !ours[class] && !u.GatewayClassesUnread {
			continue
		}
		mine[n] = true
		for i := range g.Spec.Listeners {
			add(n, "Gateway "+n.String(), g.Namespace, &g.Spec.Listeners[i])
		}
	}
	for _, s := range u.Sets {
		of, what := parents.OfSet(s), "ListenerSet "+svc.NameOf(s).String()
		if known := slices.ContainsFunc(u.Gateways, func(g *gwv1.Gateway) bool { return svc.NameOf(g) == of }); !known && u.GatewaysUnread {
			what += ", if its Gateway is of fairlead,"
		} else if !mine[of] {
			continue
		}
		for i := range s.Spec.Listeners {
			add(of, what, s.Namespace, new(gwv1.Listener(s.Spec.Listeners[i])))
		}
	}
	return out
}

// refName returns the Secret that a reference of an object of a namespace names, the zero Name if it names something else.
func refName(namespace string, ref *gwv1.SecretObjectReference) svc.Name {
	if ref.Kind != nil && *ref.Kind != "Secret" || ref.Group != nil && *ref.Group != "" {
		return svc.Name{}
	}
	if ref.Namespace != nil {
		namespace = string(*ref.Namespace)
	}
	return svc.Name{Namespace: namespace, Name: string(ref.Name)}
}
