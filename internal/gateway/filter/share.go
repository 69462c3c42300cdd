package filter

import gwv1 "sigs.k8s.io/gateway-api/apis/v1"

// Share is a part of all requests, a fraction.
type Share struct{ Numerator, Denominator uint64 }

// ReadShare reads the part of the requests that a mirror gets, all without one. wrong names the first invalid field.
func ReadShare(spec *gwv1.HTTPRequestMirrorFilter) (s Share, wrong string) {
	s = Share{100, 100}
	switch f := spec.Fraction; {
	case f != nil && spec.Percent != nil:
		return s, ": want percent or fraction, not both"
	case f != nil:
		of := int32(100)
		if f.Denominator != nil {
			of = *f.Denominator
		}
		if of < 1 || f.Numerator < 0 || f.Numerator > of {
			return s, ".fraction: want a numerator from 0 to the denominator"
		}
		s = Share{uint64(f.Numerator), uint64(of)}
	case spec.Percent != nil:
		if *spec.Percent < 0 || *spec.Percent > 100 {
			return s, ".percent: want 0 to 100"
		}
		s.Numerator = uint64(*spec.Percent)
	}
	return s, ""
}

// Takes reports whether a request is one of the share. random is any number, each with the same probability.
func (s Share) Takes(random uint64) bool { return random%s.Denominator < s.Numerator }
