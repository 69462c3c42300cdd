package authz

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

func parse(t testing.TB, text string) *http1.Request {
	t.Helper()
	r := &http1.Request{}
	r.Reset()
	if n, err := r.Parse([]byte(strings.ReplaceAll(text, "\n", "\r\n") + "\r\n\r\n")); n == 0 || err != nil {
		t.Fatalf("%q: %d, %v", text, n, err)
	}
	return r
}

// sent returns the fields that go on to a Pod, which are neither of a connection nor forged.
func sent(r *http1.Request) (out []string) {
	for _, f := range r.Fields {
		if f.Kind == http1.Other || f.Kind == http1.Cookie || f.Kind == http1.UserAgent {
			out = append(out, fmt.Sprintf("%s=%s", f.Name, f.Value))
		}
	}
	return out
}

// The server gets what the rule names, and nothing that is of the client's connection or message.
func TestAsk(t *testing.T) {
	const request = "PUT /x?y HTTP/1.1\nHost: h\nContent-Length: 5\nConnection: x-hop\nX-Hop: 1\nCookie: c\nAuthorization: a\n" +
		"X-A: 1\nx-a: 2\nX_A: 3\nRange: bytes=0-1\nX-Forwarded-For: 6.6.6.6\nX-Real-IP: 6.6.6.6\nExpect: 100-continue\n" +
		"TE: trailers\nX-Original-URL: forged"
	client := netip.MustParseAddr("::ffff:192.0.2.1")
	for _, c := range []struct {
		rule filter.Auth
		want string
	}{
		{filter.Auth{}, "PUT h /c?d [Authorization=a]"},
		{
			filter.Auth{Prefix: "/p", Ask: []string{"x-a", "x_a", "cookie", "content-length", "x-hop"}},
			"PUT h /p/c?d [Cookie=c Authorization=a X-A=1 x-a=2]",
		},
		{filter.Auth{Ask: []string{"x-a"}}, "PUT h /c?d [Authorization=a X-A=1 x-a=2]"},
		{filter.Auth{AskAll: true}, "PUT h /c?d [Cookie=c Authorization=a X-A=1 x-a=2 X-Original-URL=forged]"},
		{
			filter.Auth{
				Method: "GET", Host: "s", Target: "/t", Ask: []string{"x-original-url"}, Nginx: &policy.NginxAuth{Redirect: "$scheme $host"},
			},
			"GET s /t [Authorization=a X-Original-URL=https://h/c?d X-Original-URI=/c?d X-Original-Method=PUT X-Scheme=https " +
				"X-Real-IP=192.0.2.1 X-Auth-Request-Redirect=https h]",
		},
	} {
		r := parse(t, request)
		q, body := Ask(&c.rule, r, client, true, "/c?d").Message([]byte("7 bytes"), Circumstances{})
		for _, f := range r.Fields { // the bytes of its connection are used again
			copy(f.Value, "##########")
		}
		underscored := ""
		for _, f := range q.Fields { // sent if the Service keeps such names
			if f.Kind == http1.Underscored {
				underscored += fmt.Sprintf("%s=%s", f.Name, f.Value)
			}
		}
		if asked := c.rule.AskAll || slices.Contains(c.rule.Ask, "x_a"); asked && underscored != "X_A=3" || !asked && underscored != "" {
			t.Errorf("%+v: the fields with a _ are %q", c.rule, underscored)
		}
		got := fmt.Sprintf("%s %s %s %v", q.Method, q.Host, q.Target, sent(q))
		if got != c.want || q.Length != 7 || string(body) != "7 bytes" || q.Chunked || q.Upgrades || q.Continue {
			t.Errorf("%+v:\n%s, want\n%s", c.rule, got, c.want)
		}
	}
}

// What identifies a client comes from the server and never from the client, in no spelling and however often.
func TestPass(t *testing.T) {
	const request = "GET / HTTP/1.1\nHost: h\nX-User: root\nx-user: root\nX_User: root\nX-Other: mine\nX-Empty: mine"
	answer := &Answer{Status: 200, Fields: []http1.Field{
		{Name: []byte("X-User"), Value: []byte("alice")}, {Name: []byte("x-user"), Value: []byte("admin")},
		{Name: []byte("X-More"), Value: []byte("1")}, {Name: []byte("Content-Type"), Value: []byte("t")},
		{Name: []byte("Host"), Value: []byte("evil"), Kind: http1.Host}, {Name: []byte("Set-Cookie"), Value: []byte("s"), Kind: http1.SetCookie},
		{Name: []byte("X-Hop"), Value: []byte("1"), Kind: http1.Named}, {Name: []byte("Proxy-Connection"), Value: []byte("1")},
	}}
	for want, rule := range map[string]filter.Auth{
		"[X-Other=mine X-User=alice x-user=admin]":                       {Take: []string{"x-user", "x-empty"}},
		"[X-Other=mine X-Empty=mine X-User=alice x-user=admin X-More=1]": {TakeAll: true},
		"[X-Other=mine X-Empty=mine]":                                    {Take: []string{"x_user"}},
		"[X-Empty=mine X-User=alice x-user=admin]":                       {Take: []string{"x_user", "x-user", "x_other"}},
		"[X-User=root x-user=root X-Other=mine X-Empty=mine]":            {},
		"[X-Other=mine X-Empty=mine X-More=1 X-User=alice x-user=admin]": {Take: []string{"x-more", "x-user"}},
	} {
		r := parse(t, request)
		Ask(&rule, r, netip.Addr{}, false, "/").Pass(r, answer)
		if got := fmt.Sprint(sent(r)); got != want {
			t.Errorf("%+v: %s, want %s", rule, got, want)
		}
	}
}

// Trailers that the server alone may send are not the client's either.
func TestWithhold(t *testing.T) {
	for want, rule := range map[string]filter.Auth{
		"[X-Sum=1]": {Take: []string{"x-user"}}, "[]": {TakeAll: true}, "[X-User=root x_user=root X-Sum=1]": {},
	} {
		trailers := &http1.Request{}
		trailers.Fields = []http1.Field{
			{Name: []byte("X-User"), Value: []byte("root")}, {Name: []byte("x_user"), Value: []byte("root")},
			{Name: []byte("X-Sum"), Value: []byte("1")},
		}
		Ask(&rule, &http1.Request{}, netip.Addr{}, false, "/").Withhold(trailers.Fields)
		if got := fmt.Sprint(sent(trailers)); got != want {
			t.Errorf("%+v: %s, want %s", rule, got, want)
		}
	}
	(*Question)(nil).Withhold([]http1.Field{{}})
}
