package dialect

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// redirects returns an annotation with ports of http whose clients are sent to ports of https.
func redirects(key, separator string) Annotation {
	return Annotation{Key: key, Values: "FROM" + separator + "TO pairs of port numbers with commas between: clients of the port FROM, of http, are " +
		"sent to the port TO, of https", Sets: []Field{FieldRedirects}, read: func(r *reader, v string) error {
		to := map[uint16]uint16{}
		for item := range strings.SplitSeq(v, ",") {
			a, b, _ := strings.Cut(strings.TrimSpace(item), separator)
			from, err := strconv.ParseUint(a, 10, 16)
			port, err2 := strconv.ParseUint(b, 10, 16)
			if err != nil || err2 != nil || from == port || to[uint16(from)] != 0 {
				return fmt.Errorf("%q is not FROM%sTO, two port numbers, with each FROM once", shorten(item), separator)
			}
			to[uint16(from)] = uint16(port)
		}
		r.set(FieldRedirects, v, func(*Spec) { r.raw.redirects = to })
		return nil
	}}
}

// finishRedirects takes redirects over. What was meant to be https must not be served by http.
func (r *reader) finishRedirects() {
	o := r.Origins[FieldRedirects]
	find := func(port uint16, p Protocol) int {
		return slices.IndexFunc(r.Spec.Listeners, func(l Listener) bool { return l.Port == port && l.Protocol == p })
	}
	for from, to := range r.raw.redirects {
		i := find(from, HTTP)
		if i < 0 || find(to, HTTPS) < 0 {
			r.found(Invalid, o.From, shorten(o.Value), fmt.Sprintf("annotation %s: want a port %d of protocol http and a port %d of https", o.From, from, to))
			return
		}
		r.Spec.Listeners[i].Redirect = to
	}
}
