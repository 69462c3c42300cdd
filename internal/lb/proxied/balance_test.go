package proxied

import (
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

// spread returns how many of n connections each Pod has, by its name.
func (r *rig) spread(n int) map[string]int {
	r.Helper()
	out := map[string]int{}
	for range n {
		c := r.dial()
		got, err := say(c, "x")
		r.must(err)
		r.must(c.Close())
		out[strings.Fields(got)[0]]++
	}
	return out
}

// Pods have connections by their weights, none without one (behaviours 178, 179).
func TestWeights(t *testing.T) {
	for _, balance := range []string{"round-robin", "least-connections", "random-of-two"} {
		r := newRig(t, map[string]string{"fairlead.dev/lb-balance": balance})
		a, b, c := r.pod(named("a")), r.pod(named("b")), r.pod(named("c"))
		r.service.Weights = map[netip.AddrPort]int{a: 3, c: 0}
		r.set(a, b, c)
		got := r.spread(40)
		if got["c"] > 0 || balance == "round-robin" && got["a"] != 30 || balance == "random-of-two" && got["a"] <= got["b"] {
			t.Errorf("%s: %v", balance, got)
		}
		r.service.Weights = map[netip.AddrPort]int{a: 0, c: 0}
		r.set(a, c)
		if got, err := say(r.dial(), "x"); err == nil {
			t.Errorf("%s: %q of Pods without weight", balance, got)
		}
	}
	// Open ones count by their weights.
	r := newRig(t, map[string]string{"fairlead.dev/lb-balance": "least-connections"})
	a, b := r.pod(named("a")), r.pod(named("b"))
	r.service.Weights = map[netip.AddrPort]int{a: 3}
	r.set(a, b)
	open := map[string]int{}
	for range 12 {
		got, err := say(r.dial(), "x")
		r.must(err)
		open[got]++
	}
	if open["a x\n"] != 9 {
		t.Errorf("%v", open)
	}
}

// More clients have a Pod with more weight, and those that it had before keep it.
func TestSourceHashByWeights(t *testing.T) {
	var pods []netip.AddrPort
	for i := range 4 {
		pods = append(pods, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
	}
	before, after := &pool{ctx: t.Context()}, &pool{ctx: t.Context()}
	before.set(poolOptions{balance: dialect.SourceHash}, pods, 0)
	after.set(poolOptions{balance: dialect.SourceHash, weights: map[netip.AddrPort]int{pods[0]: 3}}, pods, 0)
	had, has, lost := 0, 0, 0
	for i := range 4000 {
		client := netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})
		a, _ := before.pick(client, nil)
		b, _ := after.pick(client, nil)
		switch first := pods[0]; {
		case a.addr == first && b.addr != first, a.addr != b.addr && b.addr != first:
			lost++
		case b.addr == first:
			has++
		}
		if a.addr == pods[0] {
			had++
		}
	}
	if lost > 0 || had < 900 || had > 1100 || has < 1850 || has > 2150 { // 1/4 and 3/6 of them
		t.Errorf("%d had the Pod, %d have it, %d have another one without a reason", had, has, lost)
	}
}

// A Pod that comes has few connections at first.
func TestSlowStart(t *testing.T) {
	r := newRig(t, map[string]string{"fairlead.dev/lb-slow-start": "3600"})
	a, b, c := r.pod(named("a")), r.pod(named("b")), r.pod(named("c"))
	r.set(a, b)
	if got := r.spread(20); got["a"] != 10 || got["b"] != 10 {
		t.Errorf("at the beginning: %v", got)
	}
	r.set(a, b, c)
	if got := r.spread(42); got["c"] > 3 || got["c"] == 0 {
		t.Errorf("a Pod that has come: %v", got)
	}
	r.ask(map[string]string{"fairlead.dev/lb-slow-start": "1"})
	r.set(a, b, c)
	for deadline := time.Now().Add(patience); ; {
		if got := r.spread(9); got["c"] == 3 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("a Pod that has come long ago: %v", got)
		}
	}
}

// While all Pods are bad, a Service may ask that none has connections.
func TestFailClosed(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-all-unhealthy": "closed"})
	r.service.Spec.Health.Interval, r.service.Spec.Health.Unhealthy = dialect.Duration(20*time.Millisecond), 1
	l := r.listener()
	sick := l.Addr().String()
	r.must(l.Close())
	r.set(netip.MustParseAddrPort(sick))
	status := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(patience); ; {
			answer, err := http.Get("http://" + r.at.String())
			r.must(err)
			_ = answer.Body.Close()
			if answer.StatusCode == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s, want %d", answer.Status, want)
			}
		}
	}
	status(http.StatusServiceUnavailable)
	well := r.web(func(w http.ResponseWriter, _ *http.Request) {})
	r.set(well)
	status(http.StatusOK)
}

// browser is an HTTP client with cookies, which reads which Pod answers.
func (r *rig) browser() (*http.Client, func() (string, *http.Response)) {
	jar, err := cookiejar.New(nil)
	r.must(err)
	c := &http.Client{Jar: jar, Timeout: patience}
	r.Cleanup(c.CloseIdleConnections)
	return c, func() (string, *http.Response) {
		r.Helper()
		answer, err := c.Get("http://" + r.at.String() + "/")
		r.must(err)
		body, err := io.ReadAll(answer.Body)
		r.must(err)
		_ = answer.Body.Close()
		return string(body), answer
	}
}

// webNamed is a Pod that answers with its name, and sets its own cookie.
func (r *rig) webNamed(name string) netip.AddrPort {
	r.Helper()
	return r.web(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/" {
			http.SetCookie(w, &http.Cookie{Name: "SESSION", Value: name})
		}
		_, _ = io.WriteString(w, name)
	})
}

// A cookie names a Pod: on every node, after a restart, and without a word of where that is. When the Pod is gone there is
// another cookie.
func TestStickyCookie(t *testing.T) {
	asks := map[string]string{lbProtocol: "http", "fairlead.dev/lb-sticky-cookie": "true"}
	r := newRig(t, asks)
	r.service.Key = "5a1f"
	pods := map[string]netip.AddrPort{}
	for _, n := range []string{"a", "b", "c"} {
		pods[n] = r.webNamed(n)
	}
	all := []netip.AddrPort{pods["a"], pods["b"], pods["c"]}
	r.set(all...)
	client, get := r.browser()
	first, answer := get()
	ours := slices.DeleteFunc(answer.Cookies(), func(c *http.Cookie) bool { return c.Name == "SESSION" })
	if len(ours) != 1 || !ours[0].HttpOnly || ours[0].Secure || ours[0].SameSite != http.SameSiteLaxMode || ours[0].MaxAge != 0 ||
		strings.Contains(ours[0].Value, pods[first].Addr().String()) || len(ours[0].Value) != 16 {
		t.Fatalf("%q", answer.Header["Set-Cookie"])
	}
	for range 6 {
		if got, answer := get(); got != first || len(answer.Cookies()) != 1 {
			t.Fatalf("%s, then %s with %q", first, got, answer.Header["Set-Cookie"])
		}
	}
	// Another node, or this one after a restart.
	other := newRig(t, asks)
	other.service.Key = r.service.Key
	other.set(all...)
	cookies := client.Jar.Cookies(&url.URL{Scheme: "http", Host: r.at.String()})
	second, get2 := other.browser()
	second.Jar.SetCookies(&url.URL{Scheme: "http", Host: other.at.String()}, cookies)
	for range 4 {
		if got, _ := get2(); got != first {
			t.Errorf("another node: %s, not %s", got, first)
		}
	}
	// Another Service makes nothing of it.
	other.service.Key = "77"
	other.set(all...)
	if _, answer := get2(); len(answer.Cookies()) != 2 {
		t.Errorf("another Service: %q", answer.Header["Set-Cookie"])
	}
	r.set(slices.DeleteFunc(all, func(a netip.AddrPort) bool { return a == pods[first] })...)
	next, answer := get()
	if again, _ := get(); next == first || again != next || len(answer.Cookies()) != 2 {
		t.Errorf("a Pod has gone: %s, then %s with %q, then %s", first, next, answer.Header["Set-Cookie"], again)
	}
}

// With a lifetime the cookie is renewed, and with a cookie of the Pods' sessions stick from that on.
func TestStickyApplicationCookie(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-sticky-app-cookie": "SESSION",
		"fairlead.dev/lb-sticky-cookie-lifetime": "60"})
	r.service.Key = "5a1f"
	r.set(r.webNamed("a"), r.webNamed("b"))
	client, get := r.browser()
	seen := map[string]bool{}
	for range 4 {
		answer, err := client.Get("http://" + r.at.String() + "/static")
		r.must(err)
		body, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if seen[string(body)] = true; len(answer.Cookies()) > 0 {
			t.Errorf("no session: %q", answer.Header["Set-Cookie"])
		}
	}
	if len(seen) != 2 {
		t.Errorf("requests without a session stick: %v", seen)
	}
	first, _ := get()
	for range 5 {
		got, answer := get()
		i := slices.IndexFunc(answer.Cookies(), func(c *http.Cookie) bool { return c.MaxAge == 60 })
		if got != first || i < 0 {
			t.Errorf("%s, not %s: %q", got, first, answer.Header["Set-Cookie"])
		}
	}
	// Without the application's cookie there is no session.
	at := &url.URL{Scheme: "http", Host: r.at.String()}
	client.Jar.SetCookies(at, []*http.Cookie{{Name: "SESSION", MaxAge: -1}})
	if got := fmt.Sprint(client.Jar.Cookies(at)); strings.Contains(got, "SESSION") || !strings.Contains(got, "FLB-") {
		t.Fatal(got)
	}
	clear(seen)
	for range 4 {
		answer, err := client.Get("http://" + r.at.String() + "/static")
		r.must(err)
		body, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		seen[string(body)] = true
	}
	if len(seen) != 2 {
		t.Errorf("a session that has ended sticks: %v", seen)
	}
}
