package dialect

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// none returns an annotation without a meaning on machines of one's own.
func none(key, why string) Annotation { return Annotation{Key: key, Values: "any", None: why} }

// of adds the number of a behaviour.
func (a Annotation) of(behaviour string) Annotation {
	a.Behaviour = behaviour
	return a
}

// later returns an annotation that this version does not act on, and what happens instead.
func later(key, values string, f Field, instead string) Annotation {
	return Annotation{Key: key, Values: values, Sets: []Field{f}, Later: instead, read: func(r *reader, v string) error {
		r.found(NotYet, r.key, shorten(v), "this version does not do it yet; "+instead)
		return nil
	}}
}

// forwarded returns an annotation about a field of requests that listeners of HTTP always send.
func forwarded(key, field, on, off string) Annotation {
	return Annotation{Key: key, Values: on + ", " + off, Sets: []Field{FieldHeaders}, read: func(r *reader, v string) error {
		switch v {
		case on:
			r.same(FieldHeaders, field)
		case off:
			r.found(Meaningless, r.key, v, "accepted; has no meaning here because listeners of HTTP always send "+field)
		default:
			return fmt.Errorf("%q is neither %s nor %s", shorten(v), on, off)
		}
		return nil
	}}
}

// text returns an annotation whose value is taken as it is.
func text(key, values string, f Field, apply func(*Spec, string)) Annotation {
	return Annotation{Key: key, Values: values, Sets: []Field{f}, read: func(r *reader, v string) error {
		r.set(f, v, func(s *Spec) { apply(s, v) })
		return nil
	}}
}

// flag returns an annotation that is true or false. normal is what counts without it.
func flag(key string, f Field, normal bool, apply func(*Spec, bool)) Annotation {
	return word(key, map[string]bool{"true": true, "false": false}, f, normal, apply)
}

// word returns an annotation with one of some words, in any case.
func word[T comparable](key string, words map[string]T, f Field, normal T, apply func(*Spec, T)) Annotation {
	list := sortedKeys(words)
	return Annotation{Key: key, Values: list, Sets: []Field{f}, read: func(r *reader, v string) error {
		value, ok := words[strings.ToLower(v)]
		if !ok {
			return fmt.Errorf("%q is not one of %s", shorten(v), list)
		}
		if value == normal {
			r.same(f, v)
			return nil
		}
		r.set(f, v, func(s *Spec) { apply(s, value) })
		return nil
	}}
}

func sortedKeys[T any](m map[string]T) string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return strings.Join(keys, ", ")
}

// number returns an annotation that is a number.
func number(key string, least, most int, unit string, f Field, apply func(*Spec, int)) Annotation {
	values := strings.TrimSpace(fmt.Sprintf("%d to %d %s", least, most, unit))
	return Annotation{Key: key, Values: values, Sets: []Field{f}, read: func(r *reader, v string) error {
		n, err := parseNumber(v, least, most, unit)
		if err != nil {
			return err
		}
		r.set(f, strings.TrimSpace(fmt.Sprintf("%d %s", n, unit)), func(s *Spec) { apply(s, n) })
		return nil
	}}
}

func parseNumber(v string, least, most int, unit string) (int, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("%q is not a number from %d to %d%s", shorten(v), least, most, strings.TrimRight(" "+unit, " "))
	}
	return n, nil
}

// seconds returns an annotation that is a number of seconds.
func seconds(key string, least, most int, f Field, apply func(*Spec, Duration)) Annotation {
	return number(key, least, most, "seconds", f, func(s *Spec, n int) { apply(s, Duration(time.Duration(n)*time.Second)) })
}

// addresses returns an annotation with addresses; family restricts them to one of 4 and 6.
func addresses(key string, family int) Annotation {
	values := "an IP address, or one of each family with a comma between"
	if family != 0 {
		values = fmt.Sprintf("an IPv%d address", family)
	}
	return Annotation{Key: key, Values: values, Sets: []Field{FieldAddresses}, read: func(r *reader, v string) error {
		list, err := parseAddresses(v)
		if err != nil {
			return err
		}
		if family != 0 && (len(list) != 1 || list[0].Is4() != (family == 4)) {
			return fmt.Errorf("%q is not %s", shorten(v), values)
		}
		r.addAddresses(family != 0, v, list)
		return nil
	}}
}

// addAddresses sets the addresses, or with more adds one to that of the other family.
func (r *reader) addAddresses(more bool, text string, list []netip.Addr) {
	o, has := r.Origins[FieldAddresses]
	if has && more && len(r.Spec.Addresses) == 1 && r.Spec.Addresses[0].Is4() != list[0].Is4() {
		r.Spec.Addresses = append(r.Spec.Addresses, list...)
		r.Origins[FieldAddresses] = Origin{o.From + ", " + r.key, o.Value + "," + text}
		r.Findings = append(r.Findings, Finding{Applied, r.key, text, FieldAddresses, string(FieldAddresses) + " " + text})
		return
	}
	r.set(FieldAddresses, text, func(s *Spec) { s.Addresses = list })
}

// sharedBy returns an annotation with the id of a load balancer: Services of a namespace with the same one share an address,
// as they share the instance in the cloud.
func sharedBy(key string) Annotation {
	return text(key, "the id of a load balancer; Services of a namespace with the same one share an address", FieldSharingKey,
		func(s *Spec, v string) { s.SharingKey = v })
}

// prefixes returns an annotation with networks.
func prefixes(key string, f Field, apply func(*Spec, []netip.Prefix)) Annotation {
	return Annotation{Key: key, Values: "CIDRs with commas between", Sets: []Field{f}, read: func(r *reader, v string) error {
		list, err := parsePrefixes(strings.Split(v, ","))
		if err != nil {
			return err
		}
		r.set(f, v, func(s *Spec) { apply(s, list) })
		return nil
	}}
}

func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, t := range texts {
		t = strings.TrimSpace(t)
		if t == "" {
			continue
		}
		p, err := netip.ParsePrefix(t)
		if err != nil {
			return nil, fmt.Errorf("%q is not a network like 192.0.2.0/24", shorten(t))
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// parseTags reads key=value pairs with commas between; "key=" and "key" count too
// (behaviour 130).
func parseTags(v string) (map[string]string, error) {
	tags := map[string]string{}
	for item := range strings.SplitSeq(v, ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(item), "=")
		if key = strings.TrimSpace(key); key == "" {
			if value != "" {
				return nil, fmt.Errorf("%q has a value without a key", shorten(item))
			}
			continue
		}
		tags[key] = strings.TrimSpace(value)
	}
	return tags, nil
}

func tags(key string) Annotation {
	return Annotation{Key: key, Values: "key=value pairs with commas between", Sets: []Field{FieldTags}, read: func(r *reader,
		v string) error {
		t, err := parseTags(v)
		if err == nil && len(t) > 0 {
			r.set(FieldTags, v, func(s *Spec) { s.Tags = t })
		}
		return err
	}}
}

// Setters that several dialects share.

func setIdle(s *Spec, d Duration)      { s.IdleTimeout = d }
func setRequest(s *Spec, d Duration)   { s.RequestTimeout = d }
func setSlowStart(s *Spec, d Duration) { s.SlowStart = d }
func setSticky(s *Spec, on bool)       { s.Sticky.Cookie = on }
func setDraining(s *Spec, on bool)     { s.Draining = on }
func setDrain(s *Spec, d Duration)     { s.DrainTimeout = d }
func setHealthy(s *Spec, n int)        { s.Health.Healthy = n }
func setUnhealthy(s *Spec, n int)      { s.Health.Unhealthy = n }
func setInterval(s *Spec, d Duration)  { s.Health.Interval = d }
func setTimeout(s *Spec, d Duration)   { s.Health.Timeout = d }
func setHealth(s *Spec, p Protocol)    { s.Health.Protocol = p }
func setChecked(s *Spec, on bool)      { s.Health.Enabled = on }
func setBalance(s *Spec, b Balance)    { s.Balance = b }
func setCrossZone(s *Spec, on bool)    { s.CrossZone = on }
func setBandwidth(s *Spec, n int)      { s.BandwidthMbps = n }
func setConnections(s *Spec, n int)    { s.ConnectionLimit = n }
func setHealthPort(s *Spec, n int)     { s.Health.Port = uint16(n) }

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

// healthHost returns an annotation with the host that checks of HTTP ask for. own is a word for the address of each Pod.
func healthHost(key, own string) Annotation {
	return Annotation{Key: key, Values: "a host name of 80 letters, digits, dots and hyphens at most", Sets: []Field{FieldHealthHost},
		read: func(r *reader, v string) error {
			other := func(c rune) bool {
				return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '.'
			}
			if own != "" && v == own {
				r.same(FieldHealthHost, v)
				return nil
			}
			if len(v) > 80 || strings.ContainsFunc(v, other) {
				return fmt.Errorf("%q is not a host name of 80 letters, digits, dots and hyphens at most", shorten(v))
			}
			r.set(FieldHealthHost, v, func(s *Spec) { s.Health.Host = v })
			return nil
		}}
}

// healthMethod returns an annotation with the method of checks of HTTP.
func healthMethod(key string) Annotation {
	return word(key, map[string]string{"get": "GET", "head": "HEAD"}, FieldHealthMethod, "GET",
		func(s *Spec, v string) { s.Health.Method = v })
}

// alpnPolicies are the policies of AWS
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
