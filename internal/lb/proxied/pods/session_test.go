package pods

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

const sessionKey = "a2f9"

// sessionPool is a Pool of three Pods whose tokens have a key.
func sessionPool(t *testing.T) *Pool {
	t.Helper()
	p := newPool(t, lbtest.New(t).Logger())
	p.Set(Options{Key: sessionKey}, []netip.AddrPort{
		netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80"), netip.MustParseAddrPort("10.0.0.3:80"),
	}, 0)
	return p
}

// A token leads to its backend and its Pod until the session is over, which no client can change.
func TestSessionTokens(t *testing.T) {
	p, now := sessionPool(t), time.Unix(1_800_000_000, 0)
	for _, absolute := range []time.Duration{0, time.Hour} {
		all := NewSessions(&policy.Session{Absolute: absolute}, sessionKey, "r/0", []string{"a", "b"})
		s, backend := all.Read("", now)
		if s.Use(1); backend != -1 {
			t.Error(backend)
		}
		token := s.Token(p, p.members[2])
		for range 10 {
			next, backend := all.Read(token, now.Add(59*time.Minute))
			m, err := next.Choose(p, netip.MustParseAddr("192.0.2.1"), nil)
			if err != nil || m != p.members[2] || backend != 1 {
				t.Fatalf("%v: Pod %v, backend %d, %v", absolute, m, backend, err)
			}
			if next.Use(backend); next.Token(p, m) != "" {
				t.Error("a token that the client has is set again")
			}
		}
		next, _ := all.Read(token, now)
		if m, err := next.Choose(p, netip.Addr{}, []*Member{p.members[2]}); err != nil || m == p.members[2] {
			t.Error("a Pod that was tried is chosen again")
		}
		if _, backend := all.Read(token, now.Add(time.Hour)); (backend == 1) != (absolute == 0) {
			t.Errorf("%v: after an hour the backend is %d", absolute, backend)
		}
		other := NewSessions(&policy.Session{Absolute: absolute}, "another key", "r/0", []string{"a", "b"})
		if _, backend := other.Read(token, now); backend != -1 {
			t.Error("another front takes the token")
		}
		less := NewSessions(&policy.Session{Absolute: absolute}, sessionKey, "r/0", []string{"a"})
		if _, backend := less.Read(token, now); backend != -1 {
			t.Error("a backend that the rule no longer has keeps a session")
		}
	}
}

// A client that changes its token, or makes one, has no session.
func TestSessionTokensAreProven(t *testing.T) {
	p, now := sessionPool(t), time.Unix(1_800_000_000, 0)
	all := NewSessions(&policy.Session{Absolute: time.Hour}, sessionKey, "r/0", []string{"a"})
	s, _ := all.Read("", now)
	s.Use(0)
	token := s.Token(p, p.members[0])
	later, _ := all.Read("", now.Add(10*time.Hour))
	later.Use(0)
	fresh := later.Token(p, p.members[1])
	const at = backendPart + podPart
	for _, forged := range []string{
		token[:at], token[:at+beganPart], token + "A", fresh[:backendPart] + token[backendPart:at] + fresh[at:], strings.Repeat("A", len(token)),
		token[:at] + "______" + token[at+beganPart:], strings.Repeat("x", 100_000),
	} {
		if _, backend := all.Read(forged, now.Add(10*time.Hour)); backend != -1 {
			t.Errorf("%.80q is taken", forged)
		}
	}
	if _, backend := all.Read(fresh, now); backend != -1 {
		t.Error("a session of the future is taken")
	}
	for at := range len(token) {
		changed := []byte(token)
		if changed[at]++; changed[at] == token[at] {
			t.Fatal(at)
		}
		if _, backend := all.Read(string(changed), now); backend != -1 {
			t.Errorf("a token is taken that differs at %d", at)
		}
	}
}

// Cookies of two rules differ, and last as long as the rule says.
func TestSessionCookies(t *testing.T) {
	one, two := NewSessions(&policy.Session{}, sessionKey, "r/0", nil), NewSessions(&policy.Session{}, sessionKey, "r/1", nil)
	if a, _ := one.Source(); !strings.HasPrefix(a, "FLB-") || a == two.name {
		t.Errorf("cookies %s and %s", a, two.name)
	}
	s, _ := NewSessions(&policy.Session{Name: "c", Absolute: time.Hour, Permanent: true}, sessionKey, "r/0", nil).Read("", time.Now())
	if got := s.Cookie("v", true); got != "c=v; Path=/; HttpOnly; SameSite=Lax; Secure; Max-Age=3600" {
		t.Error(got)
	}
	for fields, want := range map[string]string{
		"c=1": "1", "a=2; c=3": "3", `c="4"`: "4", "cc=5; xc=6": "", "c": "", "a=c=7": "",
	} {
		if got := CookieIn([]string{"other=x", fields}, "c"); got != want {
			t.Errorf("%s: %q", fields, got)
		}
	}
}

func BenchmarkSession(b *testing.B) {
	all, now := NewSessions(&policy.Session{Absolute: time.Hour}, sessionKey, "r/0", []string{"a", "b"}), time.Now()
	token := strings.Repeat("A", backendPart+podPart+beganPart+proofPart)
	for b.Loop() {
		_, _ = all.Read(token, now)
	}
}
