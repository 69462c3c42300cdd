package dialect

import (
	"fmt"
	"strconv"
	"strings"
)

// CodeRange are the statuses of HTTP from First to Last.
type CodeRange struct{ First, Last int }

// ParseCodes reads statuses of HTTP as AWS writes them ("200-399,401") or Alibaba ("http_2xx,http_3xx"). Empty
// is 200-399.
func ParseCodes(v string) ([]CodeRange, error) {
	if v == "" {
		return []CodeRange{{200, 399}}, nil
	}
	var out []CodeRange
	for item := range strings.SplitSeq(v, ",") {
		item = strings.TrimSpace(item)
		if class, ok := strings.CutPrefix(item, "http_"); ok && len(class) == 3 && class[0] >= '1' && class[0] <= '5' && class[1:] == "xx" {
			first := int(class[0]-'0') * 100
			out = append(out, CodeRange{first, first + 99})
			continue
		}
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		first, err := strconv.ParseUint(from, 10, 16)
		last, err2 := strconv.ParseUint(to, 10, 16)
		if err != nil || err2 != nil || first < 100 || last > 599 || first > last {
			return nil, fmt.Errorf("%q is not a status or range of statuses from 100 to 599, nor http_2xx and its like", shorten(item))
		}
		out = append(out, CodeRange{int(first), int(last)})
	}
	return out, nil
}

// codes returns an annotation with the statuses of HTTP that mean health.
func codes(key, values string) Annotation {
	return Annotation{Key: key, Values: values, Sets: []Field{FieldHealthCodes}, read: func(r *reader, v string) error {
		if _, err := ParseCodes(v); err != nil {
			return err
		}
		r.set(FieldHealthCodes, v, func(s *Spec) { s.Health.Codes = v })
		return nil
	}}
}

// path returns an annotation with a path of HTTP, which may have a query.
func path(key string) Annotation {
	return Annotation{Key: key, Values: "a path, which begins with /", Sets: []Field{FieldHealthPath}, read: func(r *reader, v string) error {
		bad := func(c rune) bool { return c <= ' ' || c >= 0x7f }
		if !strings.HasPrefix(v, "/") || len(v) > 1024 || strings.ContainsFunc(v, bad) {
			return fmt.Errorf("%q is not a path that begins with /, without blanks, of 1024 bytes at most", shorten(v))
		}
		r.set(FieldHealthPath, v, func(s *Spec) { s.Health.Path = v })
		return nil
	}}
}

// alpnPolicies are those of AWS
// (https://docs.aws.amazon.com/elasticloadbalancing/latest/network/load-balancer-listeners.html#alpn-policies).
var alpnPolicies = map[string][]string{
	"HTTP1Only": {"http/1.1", "http/1.0"}, "HTTP2Only": {"h2"}, "HTTP2Optional": {"http/1.1", "http/1.0", "h2"},
	"HTTP2Preferred": {"h2", "http/1.1", "http/1.0"}, "None": nil,
}

// alpnPolicy returns an annotation with the name of a policy for ALPN.
func alpnPolicy(key string) Annotation {
	return Annotation{Key: key, Values: sortedKeys(alpnPolicies), Sets: []Field{FieldALPN}, read: func(r *reader, v string) error {
		list, ok := alpnPolicies[v]
		if !ok {
			return fmt.Errorf("%q is not one of %s", shorten(v), sortedKeys(alpnPolicies))
		}
		r.set(FieldALPN, v, func(s *Spec) { s.ALPN = list })
		return nil
	}}
}
