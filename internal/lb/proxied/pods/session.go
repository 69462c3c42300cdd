package pods

import (
	"cmp"
	"crypto/hmac"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/policy"
)

// The parts of a token, in characters: who the backend and the Pod are, as cookieMAC has it, when the session began, and what proves
// that.
const (
	backendPart = 8
	podPart     = 16
	beganPart   = 6
	proofPart   = 16
)

// Sessions are the sessions of a rule of a route. It does not change.
type Sessions struct {
	rule     *policy.Session
	key      string
	name     string
	backends []string // their parts of tokens
}

// NewSessions returns the sessions of a rule. key is that of the front, scope is for no other rule, and backends are the names of
// the rule's backends.
func NewSessions(rule *policy.Session, key, scope string, backends []string) *Sessions {
	s := &Sessions{rule: rule, key: key, name: rule.Name}
	if s.name == "" {
		s.name = "FLB-" + hex.EncodeToString(cookieMAC(key, "session "+scope)[:4])
	}
	for _, b := range backends {
		s.backends = append(s.backends, base64.RawURLEncoding.EncodeToString(cookieMAC(key, "backend "+b)[:6]))
	}
	return s
}

// Source returns where requests have their tokens: a header field, or else a cookie.
func (s *Sessions) Source() (name string, header bool) { return s.name, s.rule.Header }

// CookieIn returns the value of a cookie in the fields Cookie of a request.
func CookieIn(fields []string, name string) string {
	for _, line := range fields {
		for item := range strings.SplitSeq(line, ";") {
			if n, value, _ := strings.Cut(strings.TrimSpace(item), "="); n == name {
				return strings.Trim(value, `"`)
			}
		}
	}
	return ""
}

// Session is that of a request. One goroutine uses it.
type Session struct {
	of      *Sessions
	backend int    // of the request
	pod     string // the part of its token, "" if it is of no session
	now     time.Time
}

// Read returns the session of a request with a token. backend is the index of the backend that has the session, -1 if the token is
// of no session, or of one that is over.
func (s *Sessions) Read(token string, now time.Time) (session *Session, backend int) {
	session = &Session{of: s, backend: -1, now: now}
	if !s.valid(token, now) {
		return session, -1
	}
	for i, b := range s.backends {
		if b == token[:backendPart] {
			session.pod = token[backendPart : backendPart+podPart]
			return session, i
		}
	}
	return session, -1
}

// valid reports whether a token can be of a session that goes on. Whoever has one could make it last longer if it proved nothing.
func (s *Sessions) valid(token string, now time.Time) bool {
	const at = backendPart + podPart
	if s.rule.Absolute == 0 {
		return len(token) == at
	}
	if len(token) != at+beganPart+proofPart || !hmac.Equal([]byte(token[at+beganPart:]), []byte(s.proof(token[:at+beganPart]))) {
		return false
	}
	raw, err := base64.RawURLEncoding.DecodeString(token[at : at+beganPart])
	if err != nil || len(raw) != 4 {
		return false
	}
	began := time.Unix(int64(binary.BigEndian.Uint32(raw)), 0)
	return now.Before(began.Add(s.rule.Absolute)) && began.Before(now.Add(time.Minute)) // clocks of nodes differ
}

func (s *Sessions) proof(of string) string {
	return base64.RawURLEncoding.EncodeToString(cookieMAC(s.key, "began "+s.name+" "+of))
}

// Use has the request go to a backend, by its index.
func (s *Session) Use(backend int) { s.backend = backend }

// Choose returns the member of a Pool for the request, none of tried.
func (s *Session) Choose(of *Pool, client netip.Addr, tried []*Member) (*Member, error) {
	if len(tried) == 0 && s.pod != "" {
		if m := of.tagged(s.pod); m != nil {
			return m, nil
		}
	}
	return of.Pick(client, tried)
}

// Token returns the token by which further requests go to a member, "" if the request has it already. A session that has to change
// its Pod begins again.
func (s *Session) Token(of *Pool, m *Member) string {
	of.mu.Lock()
	pod := m.tag
	of.mu.Unlock()
	if pod == "" || pod == s.pod || s.backend < 0 {
		return ""
	}
	token := s.of.backends[s.backend] + pod
	if s.of.rule.Absolute == 0 {
		return token
	}
	token += base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, uint32(s.now.Unix()))) //nolint:gosec // until 2106
	return token + s.of.proof(token)
}

// Cookie returns the field Set-Cookie for a token.
func (s *Session) Cookie(token string, secure bool) string {
	r := s.of.rule
	out := setCookie(s.of.name, token, cookieAttributes{r.Path, r.Domain, r.SameSite}, secure || r.Secure)
	if r.Permanent {
		out += fmt.Sprintf("; Max-Age=%d", r.Absolute/time.Second)
	}
	return out
}

// Field returns the name of the header field for tokens, "" if they are in cookies.
func (s *Session) Field() string {
	if s.of.rule.Header {
		return s.of.name
	}
	return ""
}

// cookieAttributes are attributes of a cookie, each "" for the usual one.
type cookieAttributes struct{ path, domain, sameSite string }

// setCookie returns a field Set-Cookie, without how long the cookie lasts.
func setCookie(name, value string, with cookieAttributes, secure bool) string {
	out := fmt.Sprintf("%s=%s; Path=%s; HttpOnly; SameSite=%s", name, value, cmp.Or(with.path, "/"), cmp.Or(with.sameSite, "Lax"))
	if with.domain != "" {
		out += "; Domain=" + with.domain
	}
	if secure {
		out += "; Secure"
	}
	return out
}
