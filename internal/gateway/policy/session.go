package policy

import (
	"slices"
	"strings"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Session is how the requests of a client stay at one backend: its answer has a token, which the client's next requests have.
type Session struct {
	// Header means that the token is in a header field, otherwise in a cookie.
	Header bool
	// Name is that of the cookie or field, "" for one that no other rule has.
	Name string
	// Absolute is how long a session lasts, 0 without a bound.
	Absolute time.Duration
	// Permanent means that browsers keep the cookie for that long, also when they end.
	Permanent bool
	// Path, Domain and SameSite are attributes of the cookie, "" for "/", for none, and for Lax. Secure adds that attribute also
	// where clients come without TLS.
	Path, Domain, SameSite string
	Secure                 bool
}

// ReadSession reads the session persistence of a rule. wrong names the first invalid field.
func ReadSession(spec *gwv1.SessionPersistence) (s *Session, wrong string) {
	s = &Session{}
	if spec.Type != nil {
		switch *spec.Type {
		case gwv1.CookieBasedSessionPersistence:
		case gwv1.HeaderBasedSessionPersistence:
			s.Header = true
		default:
			return nil, "type: want Cookie or Header"
		}
	}
	if spec.SessionName != nil {
		if s.Name = *spec.SessionName; s.Name != "" && !isToken(s.Name) {
			return nil, "sessionName: want letters, digits and -_.~ and the like, as names of cookies and header fields have"
		}
	}
	if s.Header && slices.ContainsFunc([]string{"cookie", "set-cookie"}, func(n string) bool { return strings.EqualFold(n, s.Name) }) {
		return nil, "sessionName: want the name of a field that is not of cookies; they are of type Cookie"
	}
	if spec.AbsoluteTimeout != nil {
		d, ok := duration(spec.AbsoluteTimeout)
		if !ok || d < time.Second {
			return nil, "absoluteTimeout: want a duration of a second or more, for example 1h"
		}
		s.Absolute = d
	}
	if c := spec.CookieConfig; c != nil {
		if s.Header {
			return nil, "cookieConfig: want it only with type Cookie"
		}
		if c.LifetimeType != nil {
			switch *c.LifetimeType {
			case gwv1.SessionCookieLifetimeType:
			case gwv1.PermanentCookieLifetimeType:
				s.Permanent = true
			default:
				return nil, "cookieConfig.lifetimeType: want Session or Permanent"
			}
		}
	}
	if s.Permanent && s.Absolute == 0 {
		return nil, "absoluteTimeout: it is missing; a permanent cookie needs it"
	}
	return s, ""
}

// isToken reports whether a text can be the name of a cookie and of a field (RFC 9110, section 5.6.2).
func isToken(text string) bool {
	return !strings.ContainsFunc(text, func(c rune) bool {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		return !letter && !strings.ContainsRune("!#$%&'*+-.^_`|~", c)
	})
}
