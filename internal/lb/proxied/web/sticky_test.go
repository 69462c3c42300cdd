package web

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
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// While all Pods are bad, a Service may ask that none has connections.
func TestFailClosed(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-all-unhealthy": "closed"})
	r.service.Spec.Health.Interval, r.service.Spec.Health.Unhealthy = dialect.Duration(20*time.Millisecond), 1
	l := r.Listener()
	sick := l.Addr().String()
	r.Must(l.Close())
	r.set(netip.MustParseAddrPort(sick))
	status := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(lbtest.Patience); ; {
			answer, err := http.Get("http://" + r.At.String())
			r.Must(err)
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
	well := r.Web(func(w http.ResponseWriter, _ *http.Request) {})
	r.set(well)
	status(http.StatusOK)
}

// browser is an HTTP client with cookies, which reads which Pod answers.
func (r *rig) browser() (*http.Client, func() (string, *http.Response)) {
	jar, err := cookiejar.New(nil)
	r.Must(err)
	c := &http.Client{Jar: jar, Timeout: lbtest.Patience}
	r.Cleanup(c.CloseIdleConnections)
	return c, func() (string, *http.Response) {
		r.Helper()
		answer, err := c.Get("http://" + r.At.String() + "/")
		r.Must(err)
		body, err := io.ReadAll(answer.Body)
		r.Must(err)
		_ = answer.Body.Close()
		return string(body), answer
	}
}

// webNamed is a Pod that answers with its name, and sets its own cookie.
func (r *rig) webNamed(name string) netip.AddrPort {
	r.Helper()
	return r.Web(func(w http.ResponseWriter, q *http.Request) {
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
	cookies := client.Jar.Cookies(&url.URL{Scheme: "http", Host: r.At.String()})
	second, get2 := other.browser()
	second.Jar.SetCookies(&url.URL{Scheme: "http", Host: other.At.String()}, cookies)
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
		answer, err := client.Get("http://" + r.At.String() + "/static")
		r.Must(err)
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
	at := &url.URL{Scheme: "http", Host: r.At.String()}
	client.Jar.SetCookies(at, []*http.Cookie{{Name: "SESSION", MaxAge: -1}})
	if got := fmt.Sprint(client.Jar.Cookies(at)); strings.Contains(got, "SESSION") || !strings.Contains(got, "FLB-") {
		t.Fatal(got)
	}
	clear(seen)
	for range 4 {
		answer, err := client.Get("http://" + r.At.String() + "/static")
		r.Must(err)
		body, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		seen[string(body)] = true
	}
	if len(seen) != 2 {
		t.Errorf("a session that has ended sticks: %v", seen)
	}
}
