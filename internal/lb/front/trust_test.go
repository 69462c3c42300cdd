package front

import (
	"crypto/tls"
	"crypto/x509"
	"testing"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/svc"
)

// A policy is met by the authorities that were read, which keep their pointer while they stay; without one, or without the certificate
// that the Gateway has to show, it is not met.
func TestVerificationOfBackends(t *testing.T) {
	cert := func(name string) (*tls.Certificate, *x509.Certificate) {
		c, _, _ := lbtest.Certificate(t, name)
		return &c, c.Leaf
	}
	own, a := cert("a")
	_, b := cert("b")
	name := func(n string) svc.Name { return svc.Name{Namespace: "default", Name: n} }
	ca, more := trust.Ref{Kind: trust.ConfigMap, Name: name("ca")}, trust.Ref{Kind: trust.Secret, Name: name("more")}
	f := &gateway.Front{Policies: map[svc.Name]*trust.Policy{
		name("p"): {Hostname: "web.example.com", Names: []trust.Name{{Value: "x.example.com"}}, Authorities: []trust.Ref{ca, more}},
		name("s"): {Hostname: "web.example.com", System: true},
		name("q"): {Hostname: "web.example.com", Authorities: []trust.Ref{more}},
	}}
	state := &watch.State{Authorities: map[trust.Ref][]*x509.Certificate{ca: {a}}, Certificates: map[svc.Name]*tls.Certificate{}}
	kept := pools{}
	first := verification(f, state, pools{}, kept)
	p := first[name("p")]
	if len(first) != 2 || p.Name != "web.example.com" || p.Names != "host:x.example.com" || p.Roots == nil || first[name("s")].Roots == nil {
		t.Fatalf("%+v", first)
	}
	if second := verification(f, state, kept, pools{}); second[name("p")] != p || second[name("s")] != first[name("s")] {
		t.Errorf("without a change: %+v, want %+v", second, first)
	}
	state.Authorities = map[trust.Ref][]*x509.Certificate{ca: {b}}
	if changed := verification(f, state, kept, pools{})[name("p")]; changed == p || changed.Roots.Equal(p.Roots) {
		t.Error("another authority has the same roots")
	}
	f.ClientCertificate = name("own")
	if out := verification(f, state, kept, pools{}); len(out) > 0 {
		t.Errorf("without the certificate of the Gateway: %+v", out)
	}
	state.Certificates[name("own")] = own
	if out := verification(f, state, kept, pools{}); out[name("p")].Cert != own {
		t.Errorf("%+v", out)
	}
	if out := verification(nil, state, kept, pools{}); len(out) > 0 {
		t.Errorf("of Ingresses: %+v", out)
	}
	table := &gateway.Table{Ports: map[uint16]*gateway.Port{
		80: {}, 443: {Number: 443, Clients: &gateway.Clients{Authorities: []trust.Ref{ca}}},
		444: {Clients: &gateway.Clients{Authorities: []trust.Ref{more}, Insecure: true}},
	}}
	clients := clientsOf(table, state, kept, pools{})
	if len(clients) != 2 || !clients[443].Roots.Equal(poolOf(b)) || !clients[444].Roots.Equal(x509.NewCertPool()) || !clients[444].Insecure {
		t.Errorf("%+v", clients)
	}
}

func poolOf(c *x509.Certificate) *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(c)
	return pool
}
