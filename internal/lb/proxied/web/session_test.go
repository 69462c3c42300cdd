package web

import (
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// sessions has all requests go to Pods a1 and a2 of Service a, and b1 and b2 of Service b, by a rule.
func (r *rig) sessions(rule string) map[string]netip.AddrPort {
	r.Helper()
	pods := map[string]netip.AddrPort{}
	for _, name := range []string{"a1", "a2", "b1", "b2"} {
		pods[name] = r.Web(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Session", "of the application")
			_, _ = io.WriteString(w, name)
		})
	}
	r.front(map[string]netip.AddrPort{"a": {}, "b": {}}, "metadata: {name: r, namespace: default}\nspec:\n  parentRefs: [{name: shop}]\n"+
		"  rules: [{backendRefs: [{name: a, port: 80}, {name: b, port: 80}], sessionPersistence: "+rule+"}]")
	r.endpoints("a", pods["a1"], pods["a2"])
	r.endpoints("b", pods["b1"], pods["b2"])
	return pods
}

// A browser stays at a Pod of one of the backends, whatever their weights are, until the Pod leaves; another one has another session.
func TestSessionByCookie(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.service.Key = "uid"
	pods := r.sessions("{sessionName: shop, absoluteTimeout: 1h, cookieConfig: {lifetimeType: Permanent}}")
	had := map[string]bool{}
	for range 20 {
		_, get := r.browser()
		pod, answer := get()
		if had[pod] = true; len(answer.Cookies()) != 1 || answer.Cookies()[0].Name != "shop" || answer.Cookies()[0].MaxAge != 3600 {
			t.Fatalf("cookies %v", answer.Cookies())
		}
		for range 5 {
			if next, answer := get(); next != pod || len(answer.Cookies()) > 0 {
				t.Errorf("after %s comes %s, with %v", pod, next, answer.Cookies())
			}
		}
	}
	if len(had) != 4 {
		t.Errorf("all sessions are at %v", had)
	}
	_, get := r.browser()
	pod, _ := get()
	service, gone := pod[:1], pods[pod]
	for name, at := range pods {
		if strings.HasPrefix(name, service) && at != gone {
			r.endpoints(service, at)
		}
	}
	next, answer := get()
	if next == pod || next[:1] != service || len(answer.Cookies()) != 1 {
		t.Errorf("after %s has left: %s, %v", pod, next, answer.Cookies())
	}
	if again, _ := get(); again != next {
		t.Errorf("after %s comes %s", next, again)
	}
}

// Clients that send back a header field stay, too. What an application puts there is replaced when the session begins.
func TestSessionByHeader(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.service.Key = "uid"
		_ = r.sessions("{type: Header, sessionName: X-Session}")
		client, token, first := r.clientOf(version), "", ""
		for n := range 10 {
			q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.At.String(), nil)
			r.Must(err)
			if token != "" {
				q.Header.Set("X-Session", token)
			}
			answer, err := client.Do(q)
			r.Must(err)
			body, err := io.ReadAll(answer.Body)
			r.Must(err)
			_ = answer.Body.Close()
			if got := answer.Header.Values("X-Session"); n == 0 {
				if token, first = got[0], string(body); len(got) != 1 || strings.Contains(token, "application") {
					t.Errorf("HTTP/%d: tokens %q", version, got)
				}
			} else if string(body) != first {
				t.Errorf("HTTP/%d: after %s comes %s", version, first, body)
			}
		}
	}
}

// A session is over after its time. Tokens that are none do no harm.
func TestSessionEnds(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.service.Key = "uid"
	_ = r.sessions("{sessionName: shop, absoluteTimeout: 1s}")
	client := r.Client()
	get := func(cookie string) string {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.At.String(), nil)
		r.Must(err)
		q.Header.Set("Cookie", cookie)
		answer, err := client.Do(q)
		r.Must(err)
		_, _ = io.Copy(io.Discard, answer.Body)
		if _ = answer.Body.Close(); answer.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", cookie, answer.Status)
		}
		for _, c := range answer.Cookies() {
			return c.Name + "=" + c.Value
		}
		return ""
	}
	first := get("shop=; shop=x; other")
	for deadline := time.Now().Add(lbtest.Patience); ; {
		if next := get(first); next != "" && next != first {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the session does not end")
		}
	}
}
