package proxied

import (
	"testing"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// At port 80 only the one path of an open challenge is answered, without TLS: Pods, or what else the port does, keep the rest.
func TestTokens(t *testing.T) {
	const path = "/.well-known/acme-challenge/"
	spec := dialect.Spec{Listeners: []dialect.Listener{{Port: 80, Protocol: dialect.HTTP, Backend: dialect.HTTP}}}
	config := func(tokens map[string]string, change func(*dialect.Listener)) *Config {
		l := spec.Listeners[0]
		change(&l)
		c, err := newConfig(&Service{Spec: spec, Tokens: tokens}, l, nil)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	tokens := map[string]string{"abc": "abc.key"}
	same := func(*dialect.Listener) {}
	for _, c := range []struct {
		config         *Config
		method, target string
		secure         bool
		want           string
	}{
		{config(tokens, same), "GET", path + "abc", false, "abc.key"},
		{config(tokens, same), "GET", path + "abc", true, "pods"},
		{config(tokens, same), "POST", path + "abc", false, "pods"},
		{config(tokens, same), "GET", path + "abc?x", false, "pods"},
		{config(tokens, same), "GET", path + "other", false, "pods"},
		{config(tokens, same), "GET", path, false, "pods"},
		{config(tokens, same), "GET", "/", false, "pods"},
		{config(nil, same), "GET", path + "abc", false, "pods"},
		{config(tokens, func(l *dialect.Listener) { l.Port = 8080 }), "GET", path + "abc", false, "pods"},
		{config(tokens, func(l *dialect.Listener) { l.Redirect = 443 }), "GET", path + "abc", false, "abc.key"},
		{config(tokens, func(l *dialect.Listener) { l.Redirect = 443 }), "GET", "/", false, "308"},
		{config(tokens, func(l *dialect.Listener) { l.Name = ACMEListener }), "GET", path + "abc", false, "abc.key"},
		{config(tokens, func(l *dialect.Listener) { l.Name = ACMEListener }), "GET", "/", false, "404"},
	} {
		request := &http1.Request{Method: []byte(c.method), Target: []byte(c.target), Host: []byte("a.example")}
		r := c.config.Route(request, Origin{Secure: c.secure})
		got := ""
		switch {
		case r.To == c.config && r.Reply == nil:
			got = "pods"
		case r.To != nil || r.Reply == nil:
			got = "neither"
		case r.Reply.Status == 200:
			got = string(r.Reply.Body)
		case r.Reply.Status == 308:
			got = "308"
		case r.Reply.Status == 404:
			got = "404"
		}
		if got != c.want {
			t.Errorf("%s %s, by TLS %v: %q, want %q", c.method, c.target, c.secure, got, c.want)
		}
	}
}

// At a front only requests for the host that a token is for get its answer: the hosts of other tenants are at the same address.
func TestTokensOfHosts(t *testing.T) {
	v := &Service{Routes: &Routes{Tokens: map[string]map[string]string{"a.example": {"abc": "abc.key"}}}}
	for _, l := range []dialect.Listener{
		{Port: 80, Protocol: dialect.HTTP, Backend: dialect.HTTP}, {Name: ACMEListener, Port: 80, Protocol: dialect.HTTP, Backend: dialect.HTTP},
	} {
		c := &Config{Router: redirector{443}}
		v.challenge(c, l)
		for host, want := range map[string]int{"a.example": 200, "A.example:80": 200, "b.example": 0, "": 0} {
			asked := &http1.Request{Method: []byte("GET"), Target: []byte("/.well-known/acme-challenge/abc"), Host: []byte(host)}
			r := c.Router.Route(asked, Origin{})
			if got := r.Reply.Status; (got == 200) != (want == 200) {
				t.Errorf("%q at %q: %d", host, l.Name, got)
			}
		}
	}
}
