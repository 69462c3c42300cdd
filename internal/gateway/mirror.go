package gateway

import (
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// mirror reads a filter of type RequestMirror. ok is false if it leads to no backend: then requests go on without it, as the
// specification asks, and the route's status tells.
func (b *ruleCompiler) mirror(spec *gwv1.HTTPRequestMirrorFilter, at string) (m Mirror, ok bool) {
	m.numerator, m.denominator = 100, 100
	switch f := spec.Fraction; {
	case f != nil && spec.Percent != nil:
		b.fail("%s: want percent or fraction, not both", at)
	case f != nil:
		of := valueOf(f.Denominator, 100)
		if of < 1 || f.Numerator < 0 || f.Numerator > of {
			b.fail("%s.fraction: want a numerator from 0 to the denominator", at)
			return m, false
		}
		m.numerator, m.denominator = uint64(f.Numerator), uint64(of)
	case spec.Percent != nil:
		if *spec.Percent < 0 || *spec.Percent > 100 {
			b.fail("%s.percent: want 0 to 100", at)
			return m, false
		}
		m.numerator = uint64(*spec.Percent)
	}
	m.Backend, ok = b.resolve(&spec.BackendRef, at+".backendRef")
	return m, ok
}
