package dialect

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// internal returns an annotation that asks for an internal load balancer by one of values, or
// without these by all but "" and "false" (behaviour 108). other are values for an external one.
func internal(key, behaviour string, values, other []string) Annotation {
	a := Annotation{Key: key, Sets: []Field{FieldInternal}, Behaviour: behaviour, Values: strings.Join(slices.Concat(values, other), ", ")}
	if values == nil {
		a.Values = "anything but false"
	}
	a.read = func(r *reader, v string) error {
		text := v
		v = strings.ToLower(v)
		switch {
		case values == nil && v != "false" || slices.Contains(values, v):
			if r.Spec.Internal {
				r.same(FieldInternal, "true")
				return nil
			}
			r.set(FieldInternal, "true", func(s *Spec) { s.Internal = true })
		case v == "false" || slices.Contains(other, v):
			r.found(Applied, r.key, v, "not internal, as by default")
		default:
			return fmt.Errorf("%q is not one of %s; the Service gets no address until the value is right", shorten(text), a.Values)
		}
		return nil
	}
	return a
}

// maxTypos is how many letters of the name of an annotation may differ from that of one that asks for an internal load
// balancer: an address that everybody reaches must not follow from a typo.
const maxTypos = 2

// internals are the annotations that ask for an internal load balancer.
var internals = func() (out []Annotation) {
	for _, d := range dialects {
		for _, a := range d.Annotations {
			if slices.Contains(a.Sets, FieldInternal) {
				out = append(out, a)
			}
		}
	}
	return out
}()

// almostInternal reports whether an unknown annotation is a mistyped one that asks for an internal load balancer. Then the
// Service gets no address.
func (r *reader) almostInternal(key, value string) bool {
	nearest, least := (*Annotation)(nil), maxTypos+1
	for i := range internals {
		if d := distance(strings.ToLower(key), internals[i].Key, least); d < least {
			nearest, least = &internals[i], d
		}
	}
	if value = strings.TrimSpace(value); nearest == nil || value == "" {
		return false
	}
	asks := &reader{service: r.service, key: key, Reading: Reading{Origins: map[Field]Origin{}}}
	if err := nearest.read(asks, value); err == nil && !asks.Spec.Internal {
		return false
	}
	text := fmt.Sprintf("annotation %s is unknown; is %s (%s) meant? The Service gets no address until the name is right", key, nearest.Key,
		nearest.Values)
	if r.AddressErr == nil {
		r.AddressErr = errors.New(text)
	}
	r.found(Unknown, key, value, text)
	return true
}
