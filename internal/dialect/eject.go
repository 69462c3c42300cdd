package dialect

import (
	"fmt"
	"strings"
)

const ejectValues = "off, or pairs with commas between: errors=1..100 in a row, share=1..100 percent, panic=0..100 percent"

// eject returns the annotation about Pods that fail.
func eject(key string) Annotation {
	return Annotation{Key: key, Values: ejectValues, Sets: []Field{FieldEject}, read: func(r *reader, v string) error {
		e, err := parseEject(v)
		if err == nil {
			r.set(FieldEject, v, func(s *Spec) { s.Eject = e })
		}
		return err
	}}
}

// parseEject reads off, or errors=5,share=50,panic=30 with each at most once.
func parseEject(v string) (e Eject, err error) {
	if strings.EqualFold(v, "off") {
		return Eject{Off: true}, nil
	}
	seen := map[string]bool{}
	for item := range strings.SplitSeq(v, ",") {
		key, value, is := strings.Cut(item, "=")
		key = strings.ToLower(strings.TrimSpace(key))
		if !is || seen[key] {
			return Eject{}, fmt.Errorf("%q is not %s", shorten(v), ejectValues)
		}
		seen[key] = true
		to, least, unit := (*int)(nil), 1, "percent"
		switch key {
		case "errors":
			to, unit = &e.Errors, "in a row"
		case "share":
			to = &e.Share
		case "panic":
			to, least = &e.Panic, 0
		default:
			return Eject{}, fmt.Errorf("%q is not one of errors, share, panic", shorten(key))
		}
		if *to, err = parseNumber(strings.TrimSpace(value), least, 100, unit); err != nil {
			return Eject{}, fmt.Errorf("%s: %w", key, err)
		}
	}
	return e, nil
}
