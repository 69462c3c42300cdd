package dialect

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// maxCookieLife is the longest lifetime of a sticky cookie, in seconds: a week, as at AWS.
const maxCookieLife = 604800

func setStickyLifetime(s *Spec, d Duration) { s.Sticky.Lifetime = d }

// rawSticky is what annotations say about cookies, before all are known.
type rawSticky struct {
	kind string // insert or server, empty if none is said
	from string // the annotation
}

// readStickyType reads which cookie it is: one of the load balancer's own, or one of the Pods'.
func readStickyType(r *reader, v string) error {
	if v != "insert" && v != "server" {
		return fmt.Errorf("%q is neither insert nor server", shorten(v))
	}
	if r.sticky.kind == "" {
		r.sticky = rawSticky{v, r.key}
	}
	r.found(Applied, r.key, v, map[string]string{"insert": "the load balancer's own cookie, as by default",
		"server": "sessions stick by a cookie of the Pods'"}[v])
	return nil
}

// cookieName returns an annotation with the name of a Pods' cookie. With turnsOn it makes sessions stick by itself.
func cookieName(key string, turnsOn bool) Annotation {
	return Annotation{Key: key, Values: "the name of a cookie that Pods set", Sets: []Field{FieldStickyApp},
		read: func(r *reader, v string) error {
			if err := checkCookieName(v); err != nil {
				return err
			}
			r.set(FieldStickyApp, v, func(s *Spec) {
				s.Sticky.Application = v
				s.Sticky.Cookie = s.Sticky.Cookie || turnsOn
			})
			return nil
		}}
}

// checkCookieName returns why v is no token (RFC 6265, 4.1.1).
func checkCookieName(v string) error {
	other := func(c rune) bool {
		return c <= ' ' || c >= 0x7f || strings.ContainsRune(`()<>@,;:\"/[]?={}`, c)
	}
	if v == "" || len(v) > 200 || strings.ContainsFunc(v, other) {
		return fmt.Errorf("%q cannot be the name of a cookie", shorten(v))
	}
	return nil
}

// awsStickiness reads the attributes of a target group about stickiness
// (https://docs.aws.amazon.com/elasticloadbalancing/latest/application/edit-target-group-attributes.html#sticky-sessions).
func (r *reader) awsStickiness(on bool, pairs map[string]string) error {
	if !on {
		return nil
	}
	life := ""
	switch kind := cmp.Or(pairs["stickiness.type"], "source_ip"); kind {
	case "source_ip", "source_ip_dest_ip", "source_ip_dest_ip_proto":
		r.set(FieldBalance, string(SourceHash), func(s *Spec) { s.Balance = SourceHash })
		return nil
	case "lb_cookie":
		life = cmp.Or(pairs["stickiness.lb_cookie.duration_seconds"], "86400")
	case "app_cookie":
		name := pairs["stickiness.app_cookie.cookie_name"]
		if err := checkCookieName(name); err != nil {
			return fmt.Errorf("stickiness.app_cookie.cookie_name: %w", err)
		}
		life = cmp.Or(pairs["stickiness.app_cookie.duration_seconds"], "86400")
		r.set(FieldStickyApp, name, func(s *Spec) { s.Sticky.Application = name })
	default:
		return fmt.Errorf("stickiness.type: %q is not one of app_cookie, lb_cookie, source_ip", shorten(kind))
	}
	n, err := parseNumber(life, 1, maxCookieLife, "seconds")
	if err != nil {
		return fmt.Errorf("stickiness duration: %w", err)
	}
	r.set(FieldStickyCookie, "true", func(s *Spec) { setSticky(s, true) })
	r.set(FieldStickyLifetime, life+" seconds", func(s *Spec) { setStickyLifetime(s, Duration(n)*1e9) })
	return nil
}

// finishSticky combines the annotations about cookies: they need requests.
func (r *reader) finishSticky() {
	s := &r.Spec.Sticky
	if s.Cookie && r.sticky.kind == "server" && s.Application == "" {
		r.found(Invalid, r.sticky.from, "server", "annotation "+r.sticky.from+": server needs the name of the Pods' cookie")
	}
	if r.sticky.kind == "insert" || !s.Cookie {
		s.Application = ""
	}
	if s.Cookie && !slices.ContainsFunc(r.Spec.Listeners, func(l Listener) bool { return l.Protocol.IsHTTP() }) {
		s.Cookie = false
		for i, f := range r.Findings {
			if f.State == Applied && (f.Field == FieldStickyCookie || f.Field == FieldStickyApp || f.Field == FieldStickyLifetime) {
				r.Findings[i].State = Unused
				r.Findings[i].Text += ": has no effect, since no port is of http or https: there are no cookies in other protocols"
			}
		}
	}
}
