package front

import (
	"crypto/tls"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
)

// While an authority asks by HTTP-01 port 80 is open, also of a Service without one, and closed again; never at an address with
// another Service. What is in the Secret is only used if an authority's token can be that.
func TestPortOfChallenges(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	web, other := svc.Name{Namespace: "shop", Name: "web"}, svc.Name{Namespace: "shop", Name: "other"}
	https := dialect.Listener{Port: 443, Protocol: dialect.HTTPS, Backend: dialect.HTTP}
	http := dialect.Listener{Port: 80, Protocol: dialect.HTTP, Backend: dialect.HTTP}
	open := &corev1.Secret{Data: map[string][]byte{
		"tls.crt": []byte("x"), "acme-http-1.abc": []byte("abc.key"), "acme-http-1.": []byte(".key"), "acme-http-1.a.b": []byte("a.b.key"),
		"acme-http-1.other": []byte("abc.key"),
	}}
	if got := acme.Tokens(open); len(got) != 1 || got["abc"] != "abc.key" {
		t.Errorf("tokens %q", got)
	}
	for _, c := range []struct {
		secret    *corev1.Secret
		listeners []dialect.Listener
		claims    []svc.Name
		want      int
	}{
		{open, []dialect.Listener{https}, []svc.Name{web}, 2},
		{open, []dialect.Listener{https}, []svc.Name{web, other}, 1},
		{open, []dialect.Listener{https, http}, []svc.Name{web}, 2},
		{&corev1.Secret{}, []dialect.Listener{https}, []svc.Name{web}, 1},
	} {
		listeners := append(make([]dialect.Listener, 0, 4), c.listeners...)
		d := &draft{inputs: &inputs{claims: map[netip.Addr][]svc.Name{a: c.claims}}, name: web, to: &proxied.Service{
			Addrs: []netip.Addr{a}, Spec: dialect.Spec{Listeners: listeners}, Tokens: acme.Tokens(c.secret)}}
		if why := d.challenge(); why.text != "" || len(d.to.Spec.Listeners) != c.want {
			t.Errorf("%+v: %q, %+v", c, why.text, d.to.Spec.Listeners)
		}
		if listeners[:4][len(c.listeners)] != (dialect.Listener{}) {
			t.Error("the Service's own listeners have changed")
		}
	}
}

// All Ingresses share an address: what a tenant's Secret has for an authority counts only for the host whose certificate is ordered for
// that Secret. Else the tenant could have the names of others certified, at an authority of its choice.
func TestAnswersOfFronts(t *testing.T) {
	own, thief := svc.Name{Namespace: "a", Name: "own"}, svc.Name{Namespace: "b", Name: "thief"}
	other := svc.Name{Namespace: "b", Name: "other"}
	orders := certificates.NewSet()
	for n, host := range map[svc.Name]string{own: "a.example.com", thief: "b.example.com"} {
		if wrong := orders.Add(certificates.Order{Secret: n, Hosts: []string{host}, Answered: true, Of: n}); wrong != "" {
			t.Fatal(wrong)
		}
	}
	cert := &tls.Certificate{}
	forged := acme.Answers{Challenges: map[string]*tls.Certificate{"a.example.com": cert}, Tokens: map[string]string{"abc": "abc.key"}}
	challenges, tokens := answersOf(orders, map[svc.Name]acme.Answers{thief: forged, other: forged})
	if len(challenges) != 0 || len(tokens) != 1 || tokens["b.example.com"]["abc"] != "abc.key" {
		t.Errorf("forged: %v, %v", challenges, tokens)
	}
	challenges, _ = answersOf(orders, map[svc.Name]acme.Answers{own: forged})
	if len(challenges) != 1 || challenges["a.example.com"] != cert {
		t.Errorf("own: %v", challenges)
	}
}
