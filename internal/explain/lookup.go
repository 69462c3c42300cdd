package explain

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Resolve returns the Service that a question leads to by its name, not set if it leads to none or asks for an
// address. What it finds out is in no Verdict.
func Resolve(q *Question, o *Objects) svc.Name {
	switch {
	case q.Service != (svc.Name{}):
		return q.Service
	case q.Name == "":
		return svc.Name{}
	}
	e := &explaining{question: q, objects: o, facts: &Facts{}, verdict: &Verdict{}}
	if !e.name() {
		return svc.Name{}
	}
	return e.target
}

// MayHave reports whether a Service has an address, whatever its ports, or has a node port with the number: a question about the address
// needs no other Services.
func MayHave(s *corev1.Service, at netip.AddrPort) bool {
	is := func(text string) bool { // which may have another spelling
		a, err := netip.ParseAddr(text)
		return err == nil && a.Unmap() == at.Addr().Unmap()
	}
	return is(s.Spec.ClusterIP) || slices.ContainsFunc(s.Spec.ClusterIPs, is) || slices.ContainsFunc(s.Spec.ExternalIPs, is) ||
		slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool { return is(i.IP) }) ||
		slices.ContainsFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort == int32(at.Port()) })
}

// Meant are the Services that a DNS name of a client may mean, whether or not there are such.
func Meant(name string, domains []string) (out []svc.Name) {
	for _, full := range candidates(name, domains) {
		if n, is := serviceOf(full, domains); is && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}
