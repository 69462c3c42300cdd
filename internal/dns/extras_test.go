package dns

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// With autopath the first question of a search path brings the answer of the
// last one.
func TestAutopath(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		switch name := strings.ToLower(m.Question[0].Name); {
		case name != "www.example.com.":
			answerWith("com. 60 IN SOA ns.com. me.com. 1 2 3 4 30")(w, m, n)
		case m.Question[0].Qtype == mdns.TypeA:
			answerWith("@ 60 IN A 192.0.2.1")(w, m, n)
		default: // NODATA
			r := new(mdns.Msg).SetReply(m)
			rr, _ := mdns.NewRR("com. 60 IN SOA ns.com. me.com. 1 2 3 4 30")
			r.Ns = append(r.Ns, rr)
			_ = w.WriteMsg(r)
		}
	})
	o := clusterOptions()
	o.Upstream, o.Autopath = upstreams(u), true
	s := start(t, o)
	fill(s.Zone(), objects(t))
	const soa = "authority cluster.local. 5 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. SERIAL 7200 1800 86400 5"
	for _, c := range []struct {
		name  string
		typ   uint16
		want  string
		asked int64 // of the upstream
	}{
		{"www.example.com.prod.svc.cluster.local.", mdns.TypeA,
			"NOERROR\nwww.example.com.prod.svc.cluster.local. 5 IN CNAME www.example.com.\nwww.example.com. 60 IN A 192.0.2.1", 1},
		{"WWW.example.com.prod.svc.cluster.local.", mdns.TypeA,
			"NOERROR\nWWW.example.com.prod.svc.cluster.local. 5 IN CNAME www.example.com.\nwww.example.com. 60 IN A 192.0.2.1", 0},
		{"www.example.com.prod.svc.cluster.local.", mdns.TypeAAAA,
			"NOERROR\nwww.example.com.prod.svc.cluster.local. 5 IN CNAME www.example.com.\nauthority com. 60 IN SOA ns.com. me.com. 0 2 3 4 30", 1},
		// Another namespace's Service under the shorter ending.
		{"kubernetes.default.prod.svc.cluster.local.", mdns.TypeA,
			"NOERROR\nkubernetes.default.prod.svc.cluster.local. 5 IN CNAME kubernetes.default.svc.cluster.local.\n" +
				"kubernetes.default.svc.cluster.local. 5 IN A 10.96.0.1", 0},
		{"kubernetes.default.svc.prod.svc.cluster.local.", mdns.TypeA,
			"NOERROR\nkubernetes.default.svc.prod.svc.cluster.local. 5 IN CNAME kubernetes.default.svc.cluster.local.\n" +
				"kubernetes.default.svc.cluster.local. 5 IN A 10.96.0.1", 0},
		{"ext-in.prod.prod.svc.cluster.local.", mdns.TypeA,
			"NOERROR\next-in.prod.prod.svc.cluster.local. 5 IN CNAME ext-in.prod.svc.cluster.local.\n" +
				"ext-in.prod.svc.cluster.local. 5 IN CNAME dual.prod.svc.cluster.local.\ndual.prod.svc.cluster.local. 5 IN A 10.96.0.30", 0},
		// What exists is answered as ever.
		{"my-service.prod.svc.cluster.local.", mdns.TypeA, "NOERROR\nmy-service.prod.svc.cluster.local. 5 IN A 10.96.0.20", 0},
		{"db-0.db.prod.svc.cluster.local.", mdns.TypeA, "NOERROR\ndb-0.db.prod.svc.cluster.local. 5 IN A 10.244.1.10", 0},
		// No server has it: the answer to the name itself.
		{"nope.example.com.prod.svc.cluster.local.", mdns.TypeA, "NXDOMAIN\n" + soa, 1},
		// No search path.
		{"missing.prod.svc.cluster.local.", mdns.TypeA, "NXDOMAIN\n" + soa, 0},
		{"www.example.com.nowhere.svc.cluster.local.", mdns.TypeA, "NXDOMAIN\n" + soa, 0},
		{"www.example.com.svc.cluster.local.", mdns.TypeA, "NXDOMAIN\n" + soa, 0},
		{"www.example.com.prod.svc.cluster.local.", mdns.TypeSRV, "NXDOMAIN\n" + soa, 0},
		{"my-service.prod.svc.cluster.local.prod.svc.cluster.local.", mdns.TypeA, "NXDOMAIN\n" + soa, 0},
		{"192.0.2.1.prod.svc.cluster.local.", mdns.TypeA, "NXDOMAIN\n" + soa, 0},
	} {
		before := u.udp.Load()
		m := question(c.name, c.typ)
		m.SetEdns0(udpSize, false)
		if got := tableText(exchange(t, s, "udp", m), s); got != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, got, c.want)
		}
		if n := u.udp.Load() - before; n != c.asked {
			t.Errorf("%s: the upstream was asked %d times, want %d", c.name, n, c.asked)
		}
	}
	// A client has its answer a moment before it is counted.
	eventually(t, "six questions were answered by the search path", func() bool {
		return strings.Contains(scrape(t, s, "/metrics"), `coredns_autopath_success_total{server="dns://`+s.Addrs()[0].String()+`"} 6`)
	})
}

func TestHostsFile(t *testing.T) {
	file := t.TempDir() + "/hosts"
	text := "# comment\n192.0.2.10 db.corp db\n2001:db8::10\tDB.corp # six\n192.0.2.11 db.corp\nrubbish\n" +
		"10.96.0.20 thief\n192.0.2.12 my-service.prod.svc.cluster.local\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	u := startUpstream(t, answerWith("@ 60 IN A 192.0.2.1"))
	o := clusterOptions()
	o.Hosts, o.Upstream = file, upstreams(u)
	s := start(t, o)
	fill(s.Zone(), objects(t))
	for _, c := range []struct {
		name string
		typ  uint16
		want string
	}{
		{"DB.corp.", mdns.TypeA, "NOERROR\nDB.corp. 60 IN A 192.0.2.10\nDB.corp. 60 IN A 192.0.2.11"},
		{"db.corp.", mdns.TypeAAAA, "NOERROR\ndb.corp. 60 IN AAAA 2001:db8::10"},
		{"db.", mdns.TypeA, "NOERROR\ndb. 60 IN A 192.0.2.10"},
		{"db.", mdns.TypeMX, "NOERROR"},
		{"10.2.0.192.in-addr.arpa.", mdns.TypePTR, "NOERROR\n10.2.0.192.in-addr.arpa. 60 IN PTR db.corp."},
		{"www.corp.", mdns.TypeA, "NOERROR\nwww.corp. 60 IN A 192.0.2.1"},
		// The cluster's names come first.
		{"my-service.prod.svc.cluster.local.", mdns.TypeA, "NOERROR\nmy-service.prod.svc.cluster.local. 5 IN A 10.96.0.20"},
		{"20.0.96.10.in-addr.arpa.", mdns.TypePTR, "NOERROR\n20.0.96.10.in-addr.arpa. 5 IN PTR my-service.prod.svc.cluster.local."},
	} {
		if got := tableText(exchange(t, s, "udp", question(c.name, c.typ)), s); got != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, got, c.want)
		}
	}
	// It may change, and may be away for a moment.
	for _, c := range []struct{ text, want string }{{"192.0.2.99 db.corp\n", "192.0.2.99"}, {"", "192.0.2.99"},
		{"192.0.2.100 db.corp more\n", "192.0.2.100"}} {
		err := os.Remove(file)
		if c.text != "" {
			err = os.WriteFile(file, []byte(c.text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.reloadHosts()
		if got := firstA(exchange(t, s, "udp", question("db.corp.", mdns.TypeA))); got != c.want {
			t.Errorf("after %q: db.corp is %s", c.text, got)
		}
	}
	// Two names have an address, and one address has a name.
	if text := scrape(t, s, "/metrics"); !strings.Contains(text, `coredns_hosts_entries{hostsfile="`+file+`"} 3`) {
		t.Errorf("wrong number of entries in\n%s", text)
	}
	if _, err := New(Options{Listen: []string{":0"}, Hosts: file + "x"}); err == nil || !strings.Contains(err.Error(), "hosts file") {
		t.Errorf("error %v", err)
	}
}

// certificate makes a certificate for names and addresses that signs itself.
func certificate(t *testing.T, name string, addr net.IP) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{name}, IPAddresses: []net.IP{addr},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, _ := x509.ParseCertificate(der)
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// startTLSUpstream is startUpstream over TLS alone, as dns.example.
func startTLSUpstream(t *testing.T, answer func(mdns.ResponseWriter, *mdns.Msg, int64)) (*upstreamServer, *x509.CertPool) {
	t.Helper()
	cert, pool := certificate(t, "dns.example", net.ParseIP("127.0.0.1"))
	l, err := tls.Listen("tcp4", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	u := &upstreamServer{addr: l.Addr().(*net.TCPAddr).AddrPort(), answer: answer}
	up, done := make(chan struct{}), make(chan struct{})
	srv := &mdns.Server{Listener: l, Handler: u, NotifyStartedFunc: func() { close(up) }}
	go func() { defer close(done); _ = srv.ActivateAndServe() }()
	<-up
	t.Cleanup(func() { _ = srv.Shutdown(); <-done })
	return u, pool
}

// An upstream may close a connection whenever it likes: the next question goes
// over a new one, and is not a failure.
func TestTLSUpstreamThatHangsUp(t *testing.T) {
	u, pool := startTLSUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		answerWith("@ 0 IN A 192.0.2.1")(w, m, n)
		_ = w.Close()
	})
	s := start(t, Options{TLSUpstream: []TLSServer{{Addr: u.addr, ServerName: "dns.example", RootCAs: pool}}})
	for i := range 10 {
		if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("n%d.example.com.", i), mdns.TypeA))); got != "192.0.2.1" {
			t.Fatalf("answered %s", got)
		}
	}
	if n := s.forward.overTLS[0].stats.failures.Load(); n != 0 {
		t.Errorf("%d failures are counted", n)
	}
}

func TestUpstreamOverTLS(t *testing.T) {
	u, pool := startTLSUpstream(t, answerWith("@ 0 IN A 192.0.2.1"))
	good := start(t, Options{TLSUpstream: []TLSServer{{Addr: u.addr, ServerName: "dns.example", RootCAs: pool}}})
	byAddr := start(t, Options{TLSUpstream: []TLSServer{{Addr: u.addr, RootCAs: pool}}})
	for i := range 20 {
		for _, s := range []*Server{good, byAddr} {
			if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("n%d.example.com.", i), mdns.TypeA))); got != "192.0.2.1" {
				t.Fatalf("answered %s", got)
			}
		}
	}
	idle := &good.forward.overTLS[0].idle
	idle.mu.Lock()
	n := len(idle.list)
	idle.mu.Unlock()
	if n == 0 || n > 2 {
		t.Errorf("%d idle connections after questions one by one", n)
	}
	if stats := &good.forward.overTLS[0].stats; stats.reused.Load() < 10 || stats.tcp.Load() > 10 {
		t.Errorf("of 20 questions %d went over a connection that was open, %d over a new one", stats.reused.Load(), stats.tcp.Load())
	}
	for what, c := range map[string]TLSServer{
		"another name": {Addr: u.addr, ServerName: "other.example", RootCAs: pool},
		"unknown CA":   {Addr: u.addr, ServerName: "dns.example", RootCAs: x509.NewCertPool()},
	} {
		s := start(t, Options{TLSUpstream: []TLSServer{c}})
		if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure {
			t.Errorf("%s: answered %v", what, r)
		}
	}
	if _, err := New(Options{Listen: []string{":0"}, TLSUpstream: []TLSServer{{}}}); err == nil {
		t.Error("an upstream without an address is accepted")
	}
}

// A flood of random names: the memory of the cache is bounded, names that
// exist stay in it.
func TestCacheIsBounded(t *testing.T) {
	const size = 1000
	c := newCache(size, 3600)
	denial := func(n int) *entry {
		return &entry{rcode: rcodeNXDomain, ttl: 30, negative: true, body: make([]byte, n)}
	}
	c.put("good", &entry{ttl: 30, an: 1, body: make([]byte, 100)}, 1)
	for i := range 20 * size {
		c.put(fmt.Sprint("random", i), denial(i%9000), 1)
	}
	if n := c.denials.len(); n > size {
		t.Errorf("%d denials", n)
	}
	bytes := 0
	for i := range c.denials.shards {
		sh := &c.denials.shards[i]
		sum := 0
		for _, sl := range sh.ring {
			sum += sl.e.size()
		}
		if sum != sh.bytes || len(sh.ring) != len(sh.entries) {
			t.Errorf("shard %d: %d bytes counted as %d, %d slots, %d entries", i, sum, sh.bytes, len(sh.ring), len(sh.entries))
		}
		bytes += sum
	}
	if bytes > size<<10+cacheShards*maxEntry {
		t.Errorf("%d bytes", bytes)
	}
	if e, _, _ := c.get([]byte("good"), 2); e == nil {
		t.Error("the name that exists is gone")
	}
	if c.denials.evictions.Load() == 0 {
		t.Error("evictions are not counted")
	}
	// What is used stays longer than what is not.
	d := newCache(10*cacheShards, 0)
	d.put("used", denial(10), 1)
	for i := range 20 * cacheShards {
		d.put(fmt.Sprint("r", i), denial(10), 1)
		d.get([]byte("used"), 1)
	}
	if e, _, _ := d.get([]byte("used"), 1); e == nil {
		t.Error("an entry in use was thrown out")
	}
}

// Used all the time, an answer is renewed before its end.
func TestPrefetch(t *testing.T) {
	u := startUpstream(t, answerWith("@ 2 IN A 192.0.2.1"))
	s := start(t, Options{Upstream: upstreams(u)})
	eventually(t, "the answer is fetched before its end", func() bool {
		exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))
		return s.forward.metrics.prefetch.Load() > 0 && u.udp.Load() >= 2
	})
}

// Without prefetching (--dns-prefetch=false) an answer in frequent use is asked for
// again only when it has expired.
func TestNoPrefetch(t *testing.T) {
	u := startUpstream(t, answerWith("@ 2 IN A 192.0.2.1"))
	s := start(t, Options{Upstream: upstreams(u), NoPrefetch: true})
	eventually(t, "the answer is fetched again", func() bool {
		exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))
		return u.udp.Load() >= 3
	})
	if n := s.forward.metrics.prefetch.Load(); n != 0 {
		t.Errorf("%d answers were prefetched", n)
	}
}

func TestAddrsOfSeveralListeners(t *testing.T) {
	s := start(t, Options{Listen: []string{"127.0.0.1:0", "[::1]:0"}})
	a := s.Addrs()
	if len(a) != 2 || a[0].Port() == 0 || a[1].Addr() != netip.IPv6Loopback() {
		t.Errorf("addresses %v", a)
	}
}
