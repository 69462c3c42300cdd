package proxied

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

// tag makes the tags by which cookies name members, if there are cookies. All ports of a Pod share a tag, so that a client
// stays at it by http and https. The caller holds mu.
func (p *pool) tag() {
	p.tags = nil
	if p.o.key == "" {
		return
	}
	times := map[netip.Addr]int{}
	for _, m := range p.members {
		times[m.addr.Addr()]++
	}
	p.tags = make(map[string]*member, len(p.members))
	for _, m := range p.members {
		of := m.addr.Addr().String()
		if times[m.addr.Addr()] > 1 {
			of = m.addr.String()
		}
		m.tag = base64.RawURLEncoding.EncodeToString(cookieMAC(p.o.key, of))
		p.tags[m.tag] = m
	}
}

// stickyMember returns the member that a request's fields Cookie name, nil if there is none that is good.
func (c *config) stickyMember(cookies []string) *member {
	if c.cookie == "" || len(cookies) == 0 {
		return nil
	}
	tag, application := "", c.spec.Sticky.Application == ""
	for _, line := range cookies {
		for item := range strings.SplitSeq(line, ";") {
			name, value, _ := strings.Cut(strings.TrimSpace(item), "=")
			switch name {
			case c.cookie:
				tag = value
			case c.spec.Sticky.Application:
				application = true
			}
		}
	}
	if tag == "" || !application {
		return nil
	}
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	if m := c.pool.tags[tag]; m != nil && !m.bad {
		return m
	}
	return nil
}

// choose returns the member for a request of a client with fields Cookie, none of tried. Its answer sets the cookie
// that keep returns.
func (c *config) choose(client netip.Addr, cookies []string, tried []*member) (*member, error) {
	if len(tried) == 0 {
		if m := c.stickyMember(cookies); m != nil {
			return m, nil
		}
	}
	return c.pool.pick(client, tried)
}

// keep returns the field Set-Cookie by which further requests go to a member, "" if none is needed. cookies are the
// request's fields Cookie, and set the fields Set-Cookie of the answer.
func (c *config) keep(m *member, cookies, set []string, secure bool) string {
	if c.cookie == "" {
		return ""
	}
	s := c.spec.Sticky
	if s.Application != "" {
		if !sets(set, s.Application) {
			return ""
		}
	} else if s.Lifetime == 0 && c.stickyMember(cookies) == m {
		return ""
	}
	c.pool.mu.Lock()
	value := m.tag
	c.pool.mu.Unlock()
	out := fmt.Sprintf("%s=%s; Path=/; HttpOnly; SameSite=Lax", c.cookie, value)
	if secure {
		out += "; Secure"
	}
	if s.Lifetime > 0 {
		out += fmt.Sprintf("; Max-Age=%d", s.Lifetime.Std()/time.Second)
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
