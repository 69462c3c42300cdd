package pods

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

// cookieMAC returns what stands for text in cookies of the Service with a key. The key is the Service's UID, which all
// nodes know and no client does: so a client learns no address by it and cannot name a Pod that it had not, and it is
// the same on every node and after a restart.
func cookieMAC(key, text string) []byte {
	h := hmac.New(sha256.New, []byte(key))
	h.Write([]byte(text))
	return h.Sum(nil)[:12]
}

// cookieName returns the name of the cookies of a Service: another one than that of other Services, as ports of one
// host share their cookies.
func cookieName(key string) string { return "FLB-" + hex.EncodeToString(cookieMAC(key, "name")[:4]) }

// Sticky is how the requests of a client stay at a Pod. The zero value is for requests that do not.
type Sticky struct {
	cookie string // the name of the one by which requests stick, empty for none
	spec   dialect.Sticky
}

// NewSticky returns what a Service with a key asks for.
func NewSticky(key string, spec dialect.Sticky) Sticky {
	if !spec.Cookie {
		return Sticky{}
	}
	return Sticky{cookieName(key), spec}
}

// Cookies reports whether requests stick: if not, their cookies need not be read.
func (s *Sticky) Cookies() bool { return s.cookie != "" }

// tag makes the tags by which cookies name members, if there are cookies. All ports of a Pod share a tag, so that a client
// stays at it by http and https. The caller holds mu.
func (p *Pool) tag() {
	p.tags = nil
	if p.o.Key == "" {
		return
	}
	times := map[netip.Addr]int{}
	for _, m := range p.members {
		times[m.addr.Addr()]++
	}
	p.tags = make(map[string]*Member, len(p.members))
	for _, m := range p.members {
		of := m.addr.Addr().String()
		if times[m.addr.Addr()] > 1 {
			of = m.addr.String()
		}
		m.tag = base64.RawURLEncoding.EncodeToString(cookieMAC(p.o.Key, of))
		p.tags[m.tag] = m
	}
}

// member returns the member that a request's fields Cookie name, nil if there is none that is good.
func (s *Sticky) member(of *Pool, cookies []string) *Member {
	if s.cookie == "" || len(cookies) == 0 {
		return nil
	}
	tag, application := "", s.spec.Application == ""
	for _, line := range cookies {
		for item := range strings.SplitSeq(line, ";") {
			name, value, _ := strings.Cut(strings.TrimSpace(item), "=")
			switch name {
			case s.cookie:
				tag = value
			case s.spec.Application:
				application = true
			}
		}
	}
	if tag == "" || !application {
		return nil
	}
	return of.tagged(tag)
}

// tagged returns the member with a tag, nil if there is none that is good.
func (p *Pool) tagged(tag string) *Member {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.tags[tag]; m != nil && !m.bad && !time.Now().Before(m.ejected) {
		return m
	}
	return nil
}

// Choose returns the member of a Pool for a request of a client with fields Cookie, none of tried. Its answer sets the cookie
// that Keep returns.
func (s *Sticky) Choose(of *Pool, client netip.Addr, cookies []string, tried []*Member) (*Member, error) {
	if len(tried) == 0 {
		if m := s.member(of, cookies); m != nil {
			return m, nil
		}
	}
	return of.Pick(client, tried)
}

// Keep returns the field Set-Cookie by which further requests go to a member, "" if none is needed. cookies are the
// request's fields Cookie, and set the fields Set-Cookie of the answer.
func (s *Sticky) Keep(of *Pool, m *Member, cookies, set []string, secure bool) string {
	if s.cookie == "" {
		return ""
	}
	if s.spec.Application != "" {
		if !sets(set, s.spec.Application) {
			return ""
		}
	} else if s.spec.Lifetime == 0 && s.member(of, cookies) == m {
		return ""
	}
	of.mu.Lock()
	value := m.tag
	of.mu.Unlock()
	out := setCookie(s.cookie, value, cookieAttributes{}, secure)
	if s.spec.Lifetime > 0 {
		out += fmt.Sprintf("; Max-Age=%d", s.spec.Lifetime.Std()/time.Second)
	}
	return out
}

// sets reports whether one of the fields Set-Cookie sets a cookie of that name.
func sets(fields []string, name string) bool {
	for _, f := range fields {
		if c, err := http.ParseSetCookie(f); err == nil && c.Name == name {
			return true
		}
	}
	return false
}
