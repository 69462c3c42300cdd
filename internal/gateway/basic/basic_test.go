package basic

import (
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"
)

func hashed(t testing.TB, password string, cost int) string {
	t.Helper()
	text, err := bcrypt.GenerateFromPassword([]byte(password), cost)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Hashes as htpasswd, openssl passwd and slappasswd write them are read, each of the password "secret".
func TestForms(t *testing.T) {
	forms := []string{
		"$apr1$salt$VEpBc9VHGUKwI9.yg13Iu0",
		"$1$salt$ez2vlPGdaLYkJam5pWs/Y1",
		"$5$salt$kpa26zwgX83BPSR8d7w93OIXbFt/d3UOTZaAu5vsTM6",
		"$6$salt$egUxKNxDs8kPfh8iPMNcosMhb2eWah6d3R44JDm5Rj/j/XWR5E33QPd0YmHXoDHOIDR6kL5D3JcQcz0O8FHE00",
		"$5$rounds=1000$salt$CCvcOM6b7TEJDPb37Aec/9UpOg4QhPNAxPpL9ZzjTB7",
		"{SHA}5en6G6MezRroT3XKqkdPOmY/BfQ=",
		"{SSHA}gVK8WC9YyFT1gMsQHTGCgT3sSv5zYWx0",
		strings.Replace(hashed(t, "secret", bcrypt.MinCost), "$2a$", "$2y$", 1), hashed(t, "secret", bcrypt.MinCost),
	}
	v := NewVerifier(1)
	for _, text := range forms {
		u, problem := ReadFile([]byte("# users\n\nalice:" + text + ":a comment\r\nalice:{SHA}AAAAAAAAAAAAAAAAAAAAAAAAAAA=\n"))
		if problem != "" {
			t.Errorf("%s: %s", text, problem)
			continue
		}
		for _, c := range []struct {
			name, password string
			want           bool
		}{{"alice", "secret", true}, {"alice", "Secret", false}, {"alice", "", false}, {"bob", "secret", false}, {"", "secret", false}} {
			if right, busy := v.Verify(t.Context(), "default", u, Login{c.name, c.password}); right != c.want || busy {
				t.Errorf("%s: %s:%s is right: %t, busy: %t", text, c.name, c.password, right, busy)
			}
		}
		m, problem := ReadMap(map[string][]byte{"alice": []byte(text + "\n")})
		if right, _ := v.Verify(t.Context(), "default", m, Login{"alice", "secret"}); !right || problem != "" {
			t.Errorf("%s: as a map: %t %s", text, right, problem)
		}
	}
}

// What cannot be verified in time, or not at all, is refused for all users, with a text that has no part of a hash.
func TestRefusedForms(t *testing.T) {
	slow := strings.Replace(hashed(t, "secret", bcrypt.MinCost), "$04$", "$15$", 1)
	for text, want := range map[string]string{
		"alice:" + slow: `user "alice": bcrypt with a cost of 15`, "alice:$6$rounds=2000000$salt$x": `user "alice": 2000000 rounds`,
		"alice:rqXexS6ZhobKA": "no form that is served", "alice:secret": "no form that is served",
		"alice:":              "no form that is served",
		"alice:{PLAIN}secret": "no form that is served", "alice:{SHA}c2hvcnQ=": "no form", "alice:$2y$10$short": "no form",
		"alice:{SSHA}!":          "no form",
		"alice:$argon2id$v=19$x": "no form that is served", "alice": "line 1 is not NAME:HASH", ":x": "line 1 is not NAME:HASH",
		"": "it has 0 users",
		strings.Repeat("a", maxName+1) + ":{SHA}5en6G6MezRroT3XKqkdPOmY/BfQ=": "the name has more than",
		"alice:$apr1$" + strings.Repeat("x", 300):                             "no form",
	} {
		u, problem := ReadFile([]byte(text))
		_, hash, _ := strings.Cut(text, ":")
		if u != nil || !strings.Contains(problem, want) || len(hash) > 3 && strings.Contains(problem, hash) {
			t.Errorf("%.40s: %q, want %q", text, problem, want)
		}
	}
}

// A Verifier knows a right login again, also one that is not among the last, until its hash changes; and never a wrong one.
func TestKnownLogins(t *testing.T) {
	u, _ := ReadFile([]byte("alice:" + hashed(t, "secret", bcrypt.MinCost)))
	other, _ := ReadFile([]byte("alice:" + hashed(t, "secret", bcrypt.MinCost)))
	v := NewVerifier(1)
	alice := Login{"alice", "secret"}
	if v.Knows(u, alice) {
		t.Error("a login is known before it was verified")
	}
	for _, l := range []Login{alice, {"alice", "wrong"}, {"bob", "secret"}} {
		_, _ = v.Verify(t.Context(), "default", u, l)
	}
	if !v.Knows(u, alice) || v.Knows(u, Login{"alice", "wrong"}) || v.Knows(u, Login{"bob", "secret"}) || v.Knows(other, alice) {
		t.Errorf("alice: %t, a wrong password: %t, a wrong name: %t, with another hash: %t", v.Knows(u, alice),
			v.Knows(u, Login{"alice", "wrong"}), v.Knows(u, Login{"bob", "secret"}), v.Knows(other, alice))
	}
	many := func(n int) {
		for i := range n {
			v.mu.Lock()
			v.keep(v.digest(u, Login{"alice", fmt.Sprint(n, " ", i)}))
			v.mu.Unlock()
		}
	}
	many(maxKnown)
	if !v.Knows(u, alice) {
		t.Error("a login that is in use was forgotten")
	}
	many(2*maxKnown + 1)
	if v.Knows(u, alice) || len(v.known)+len(v.before) > 2*maxKnown {
		t.Errorf("%d logins are kept", len(v.known)+len(v.before))
	}
}

// The time does not tell which names exist: with users of one form and of several, the best times of all are alike.
func TestNamesAreNotTold(t *testing.T) {
	u, _ := ReadFile([]byte("fast:{SHA}5en6G6MezRroT3XKqkdPOmY/BfQ=\nalice:" + hashed(t, "secret", 8) + "\nbob:" + hashed(t, "other", 8)))
	best := map[string]time.Duration{}
	alike := func() bool {
		all := slices.Collect(maps.Values(best))
		return len(all) > 0 && slices.Max(all) <= 2*slices.Min(all)
	}
	for range 100 { // other programs take time, too
		if alike() {
			return
		}
		for _, name := range []string{"fast", "alice", "bob", "nobody"} {
			began := time.Now()
			if u.verify(name, "wrong") {
				t.Fatal("a wrong password is right")
			}
			if d := time.Since(began); best[name] == 0 || d < best[name] {
				best[name] = d
			}
		}
	}
	t.Errorf("%v", best)
}

// While others are verified a login waits, and not for ever.
func TestBusyVerifier(t *testing.T) {
	u, _ := ReadFile([]byte("alice:" + hashed(t, "secret", bcrypt.MinCost)))
	v := NewVerifier(1)
	v.slots <- struct{}{}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if right, busy := v.Verify(short, "default", u, Login{"alice", "secret"}); right || !busy {
		t.Errorf("right: %t, busy: %t", right, busy)
	}
	<-v.slots
	if right, busy := v.Verify(t.Context(), "default", u, Login{"alice", "secret"}); !right || busy {
		t.Errorf("right: %t, busy: %t", right, busy)
	}
}

// The passwords of a namespace leave half of the slots to others, and nothing of it stays.
func TestVerifierIsShared(t *testing.T) {
	u, _ := ReadFile([]byte("alice:" + hashed(t, "secret", bcrypt.MinCost)))
	for processors := range 9 {
		if slots := SlotsOf(processors); slots/2 >= slots || slots > max(2, processors) {
			t.Errorf("%d slots of %d processors: one namespace may have all", slots, processors)
		}
	}
	for slots, share := range map[int]int{1: 1, 2: 1, 5: 2} {
		v := NewVerifier(slots)
		slow := v.share("slow")
		for range share {
			slow.slots <- struct{}{}
		}
		short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if right, busy := v.Verify(short, "slow", u, Login{"alice", "secret"}); right || !busy {
			t.Errorf("%d slots: the namespace has more: right: %t, busy: %t", slots, right, busy)
		}
		cancel()
		if right, busy := v.Verify(t.Context(), "other", u, Login{"alice", "secret"}); !right || busy {
			t.Errorf("%d slots: another namespace: right: %t, busy: %t", slots, right, busy)
		}
		if v.leave("slow", slow); len(v.shares) > 0 || len(v.slots) > 0 {
			t.Errorf("%d slots: %d shares and %d slots are left", slots, len(v.shares), len(v.slots))
		}
	}
}

// The field Authorization is read as browsers and curl write it, and bounded.
func TestReadLogin(t *testing.T) {
	of := func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
	for value, want := range map[string]string{
		"Basic " + of("alice:secret"): "alice secret", "basic   " + of("alice:a:b"): "alice a:b", "BASIC " + of(":"): " ",
		"Basic": "", "": "", "Bearer " + of("alice:secret"): "", "Basic " + of("alice"): "", "Basic !": "",
		"Basic " + of("a:b") + ",Basic " + of("c:d"):       "",
		"Basic " + of(strings.Repeat("a", maxName+1)+":x"): "", "Basic " + of("a:"+strings.Repeat("x", maxPassword+1)): "",
	} {
		got := ""
		if l, ok := ReadLogin(value); ok {
			got = l.Name + " " + l.password
		}
		if got != want {
			t.Errorf("%.60q: %q, want %q", value, got, want)
		}
	}
}

func BenchmarkKnows(b *testing.B) {
	u, _ := ReadFile([]byte("alice:" + hashed(b, "secret", bcrypt.MinCost)))
	v := NewVerifier(1)
	_, _ = v.Verify(b.Context(), "default", u, Login{"alice", "secret"})
	for b.Loop() {
		if !v.Knows(u, Login{"alice", "secret"}) {
			b.Fatal("unknown")
		}
	}
}
