package certificates_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/svc"
)

func order(namespace, secret, host, challenge string) certificates.Order {
	return certificates.Order{
		Secret: svc.Name{Namespace: namespace, Name: secret}, Hosts: []string{host}, Challenge: challenge, Answered: challenge != "dns-01",
		Kind: "Ingress", Of: svc.Name{Namespace: namespace, Name: "i"},
	}
}

// Hosts of a Secret are one certificate. A host is of the first Secret that names it, and only that answers for it.
func TestSet(t *testing.T) {
	s := certificates.NewSet()
	for _, c := range []struct {
		order certificates.Order
		want  string
	}{
		{order("a", "one", "y.example.com", "http-01"), ""},
		{order("a", "one", "x.example.com", "http-01"), ""},
		{order("a", "one", "x.example.com", "http-01"), ""},
		{order("a", "one", "z.example.com", "dns-01"), "Ingress i has the certificate of Secret one ordered by http-01"},
		{order("a", "two", "x.example.com", "http-01"), "the certificate for x.example.com is ordered for Secret one"},
		{order("b", "one", "x.example.com", "http-01"), "the certificate for x.example.com is ordered by another namespace"},
		{order("a", "wild", "*.example.org", "dns-01"), ""},
		{certificates.Order{Secret: svc.Name{Namespace: "b", Name: "far"}, Of: svc.Name{Namespace: "a", Name: "i"}},
			"a certificate is only kept in a Secret of the same namespace"},
	} {
		if got := s.Add(c.order); got != c.want {
			t.Errorf("%+v: %q, want %q", c.order, got, c.want)
		}
	}
	all := s.All()
	if len(all) != 2 || !slices.Equal(all[0].Hosts, []string{"x.example.com", "y.example.com"}) {
		t.Errorf("%+v", all)
	}
	if got := fmt.Sprint(s.Answering()); got != "map[x.example.com:a/one y.example.com:a/one]" {
		t.Errorf("answering %s", got)
	}
	if len(s.In("b")) != 0 || len(s.In("a")) != 2 || len(s.In("")) != 2 || s.Has(svc.Name{Namespace: "b", Name: "one"}) {
		t.Errorf("%v, %v", s.In("a"), s.In("b"))
	}
}

// Ten thousand hosts of a namespace are a bounded number of certificates, and leave room for other namespaces.
func TestBounds(t *testing.T) {
	s := certificates.NewSet()
	wrong := ""
	for i := range 10_000 {
		wrong = s.Add(order("greedy", fmt.Sprint("s", i), fmt.Sprintf("h%d.example.com", i), "http-01"))
	}
	if len(s.All()) != 100 || !strings.Contains(wrong, "100 certificates") {
		t.Errorf("%d certificates, %q", len(s.All()), wrong)
	}
	if wrong := s.Add(order("other", "s", "other.example.com", "http-01")); wrong != "" {
		t.Error(wrong)
	}
	for i := range certificates.MaxHosts {
		if wrong := s.Add(order("many", "s", fmt.Sprintf("m%d.example.com", i), "http-01")); wrong != "" {
			t.Error(wrong)
		}
	}
	if wrong := s.Add(order("many", "s", "more.example.com", "http-01")); !strings.Contains(wrong, "20 at most") {
		t.Errorf("%q", wrong)
	}
	for i := range 2000 {
		n := fmt.Sprint("n", i)
		s.Add(order(n, "s", n+".example.com", "http-01"))
	}
	if len(s.All()) != 1000 {
		t.Errorf("%d certificates", len(s.All()))
	}
}
