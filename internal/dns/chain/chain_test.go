package chain

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// kubeadm's file end to end: the cluster's names with the file's TTL, other names cached, the pages of HTTP.
func TestKubeadm(t *testing.T) {
	up := startUpstream(t)
	r := start(t, kubeadm, up)
	r.want("web.default.svc.cluster.local.", mdns.TypeA, "NOERROR; web.default.svc.cluster.local. 30 A 10.96.0.5")
	r.want("WEB.default.svc.cluster.local.", mdns.TypeAAAA, "NOERROR; cluster.local. 30 SOA")
	r.want("no.default.svc.cluster.local.", mdns.TypeA, "NXDOMAIN; cluster.local. 30 SOA")
	r.want("10-1-2-3.default.pod.cluster.local.", mdns.TypeA, "NOERROR; 10-1-2-3.default.pod.cluster.local. 30 A 10.1.2.3")
	r.want("5.0.96.10.in-addr.arpa.", mdns.TypePTR, "NOERROR; 5.0.96.10.in-addr.arpa. 30 PTR web.default.svc.cluster.local.")
	r.want("ext.default.svc.cluster.local.", mdns.TypeA,
		"NOERROR; ext.default.svc.cluster.local. 30 CNAME www.example.com.; www.example.com. 30 A 203.0.113.7")
	r.want("gone.default.svc.cluster.local.", mdns.TypeA,
		"NXDOMAIN; gone.default.svc.cluster.local. 5 CNAME nx.example.com.; example. 5 SOA")
	r.want("a.example.com.", mdns.TypeA, "NOERROR; a.example.com. 30 A 203.0.113.7")
	for range 2 {
		if m := r.ask("a.example.com.", mdns.TypeA); len(m.Answer) != 1 || m.Answer[0].Header().Ttl > 30 || m.Authoritative {
			t.Errorf("from the cache: %s", m)
		}
	}
	if n := up.count("a.example.com."); n != 1 {
		t.Errorf("the resolver was asked %d times, want once: the answer is cached", n)
	}
	// The case of letters is the client's, though the resolver is asked in random case.
	r.want("MiXeD.example.com.", mdns.TypeA, "NOERROR; MiXeD.example.com. 30 A 203.0.113.7")
	r.want("9.9.9.9.in-addr.arpa.", mdns.TypePTR, "NOERROR; example. 30 SOA")
	if n := up.count("9.9.9.9.in-addr.arpa."); n != 1 {
		t.Errorf("a reverse name that the cluster does not have is asked %d times of the resolver, want once", n)
	}
	for path, want := range map[string]string{"/health": "OK", "/ready": "OK"} {
		if code, text := r.get(path); code != 200 || text != want {
			t.Errorf("%s: %d %s", path, code, text)
		}
	}
	_, text := r.get("/metrics")
	for _, want := range []string{
		"fairlead_dns_ready 1", "fairlead_dns_api_up 1", "go_goroutines ", "process_open_fds ",
		"coredns_panics_total 0", `coredns_build_info{goversion="go`, `coredns_plugin_enabled{name="kubernetes",server="dns://:`,
		`view="",zone="."} 1`, `coredns_cache_hits_total{server="dns://:`, `plugin="forward",rcode="NOERROR"`,
		`coredns_forward_responses_total{rcode="NOERROR",to="` + up.addr + `"}`, `coredns_forward_requests_total{to="` + up.addr + `"} `,
		`coredns_forward_request_duration_seconds_count{rcode="NOERROR",to="` + up.addr + `"}`,
		`coredns_forward_healthcheck_failures_total{to="` + up.addr + `"} 0`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in the metrics:\n%s", want, text)
		}
	}
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

// A changed file is used; one with a mistake is not, and the last one serves on.
func TestReload(t *testing.T) {
	up := startUpstream(t)
	r := start(t, kubeadm, up)
	r.write(r.fill(strings.Replace(kubeadm, "loadbalance", "nosuch", 1), up))
	r.eventually("the mistake is logged", func() bool { return strings.Contains(r.log.String(), "unknown plugin") })
	r.want("web.default.svc.cluster.local.", mdns.TypeA, "NOERROR; web.default.svc.cluster.local. 30 A 10.96.0.5")
	r.write(r.fill(strings.Replace(kubeadm, "loadbalance", "hosts {\n 192.0.2.9 new.example\n fallthrough\n}", 1), up))
	r.eventually("the change is in use", func() bool {
		return strings.HasPrefix(line(r.ask("new.example.", mdns.TypeA)), "NOERROR; new.example. 30 A 192.0.2.9")
	})
	r.want("web.default.svc.cluster.local.", mdns.TypeA, "NOERROR; web.default.svc.cluster.local. 30 A 10.96.0.5")
	if strings.Contains(r.log.String(), "not listed yet") {
		t.Error("the names of the cluster were unknown for a time")
	}
	if _, text := r.get("/metrics"); !strings.Contains(text, "coredns_reload_failed_total 1") {
		t.Error("the refused file is not counted")
	}
}

// A reload may change the form of an address whose port it keeps, and the configuration of the
// cluster, whose names are then complete from the first question on.
func TestReloadOfAddressesAndCluster(t *testing.T) {
	again := make(chan os.Signal)
	text := ".:PORT {\n bind 127.0.0.1\n health WEB\n kubernetes cluster.local {\n ttl 30\n}\n cache\n}\n"
	r := startWith(t, text, nil, again)
	const name, answer = "web.default.svc.cluster.local.", "NOERROR; web.default.svc.cluster.local. %d A 10.96.0.5"
	r.want(name, mdns.TypeA, fmt.Sprintf(answer, 30))
	_, port, _ := net.SplitHostPort(r.web)
	next := strings.NewReplacer("bind 127.0.0.1\n", "", "WEB", ":"+port, "ttl 30", "ttl 7").Replace(text)
	r.write(r.fill(next, nil))
	again <- syscall.SIGUSR1
	r.eventually("the change is in use", func() bool { return strings.Contains(r.log.String(), "the changed Corefile is in use") })
	r.want(name, mdns.TypeA, fmt.Sprintf(answer, 7))
	r.eventually("the new address serves", func() bool { code, _ := r.get("/health"); return code == http.StatusOK })
	// A cluster that does not answer in time is not used.
	r.blocked.Store(true)
	r.write(r.fill(strings.Replace(next, "ttl 7", "ttl 8", 1), nil))
	again <- syscall.SIGUSR1
	r.eventually("the reload is refused", func() bool { return strings.Contains(r.log.String(), "not listed yet after") })
	r.want(name, mdns.TypeAAAA, "NOERROR; cluster.local. 7 SOA")
	// A loop that a reload brings is found too.
	r.write(r.fill(".:PORT {\n loop\n forward . 127.0.0.1:PORT\n}\n", nil))
	again <- syscall.SIGUSR1
	r.eventually("the server ends", r.s.ending.Load)
	if err := r.end(); err == nil || !strings.Contains(err.Error(), "in a loop") {
		t.Errorf("the error is %v", err)
	}
}

// A resolver that sends questions back ends the server with the reason.
func TestLoop(t *testing.T) {
	r := &running{t: t, log: &lockedBuffer{}, file: filepath.Join(t.TempDir(), "Corefile")}
	port := freePort(t)
	r.write(fmt.Sprintf(".:%d {\n bind 127.0.0.1\n loop\n forward . 127.0.0.1:%d\n}", port, port))
	plan, err := corefile.Load(r.file)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Options{Plan: plan, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := s.Run(ctx); err == nil || !strings.Contains(err.Error(), "in a loop; name other resolvers") {
		t.Errorf("the error is %v", err)
	}
}

// Each plugin in a server of its own, by question and answer.
func TestPlugins(t *testing.T) {
	up := startUpstream(t)
	dir := t.TempDir()
	zone := `$ORIGIN file.example.
@ 60 IN SOA ns h 1 2 3 4 30
@ 60 IN NS ns
ns 60 IN A 192.0.2.53
www 60 IN CNAME ns
*.wild 60 IN A 192.0.2.54
a.b.c 60 IN A 192.0.2.55
sub 60 IN NS ns.sub
ns.sub 60 IN A 192.0.2.56
`
	for name, text := range map[string]string{"db.file.example": zone, "hosts": "192.0.2.1 h.example h2.example\n2001:db8::1 h.example\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	type question struct {
		name string
		typ  uint16
		want string
	}
	const a, aaaa, txt, srv = mdns.TypeA, mdns.TypeAAAA, mdns.TypeTXT, mdns.TypeSRV
	for name, c := range map[string]struct {
		text      string
		questions []question
	}{
		"hosts": {"hosts DIR/hosts {\n ttl 9\n fallthrough example.com\n}\nforward . UP", []question{
			{"h.example.", a, "NOERROR; h.example. 9 A 192.0.2.1"},
			{"h.example.", aaaa, "NOERROR; h.example. 9 AAAA 2001:db8::1"},
			{"h2.example.", aaaa, "NOERROR"},
			{"1.2.0.192.in-addr.arpa.", mdns.TypePTR,
				"NOERROR; 1.2.0.192.in-addr.arpa. 9 PTR h.example.; 1.2.0.192.in-addr.arpa. 9 PTR h2.example."},
			{"x.example.com.", a, "NOERROR; x.example.com. 300 A 203.0.113.7"},
			{"x.example.net.", a, "SERVFAIL"},
		}},
		"file": {"file DIR/db.file.example file.example", []question{
			{"www.file.example.", a,
				"NOERROR; www.file.example. 60 CNAME ns.file.example.; ns.file.example. 60 A 192.0.2.53; file.example. 60 NS ns.file.example."},
			{"x.wild.file.example.", a, "NOERROR; x.wild.file.example. 60 A 192.0.2.54; file.example. 60 NS ns.file.example."},
			{"b.c.file.example.", a, "NOERROR; file.example. 60 SOA"},
			{"none.file.example.", a, "NXDOMAIN; file.example. 60 SOA"},
			{"x.sub.file.example.", a, "NOERROR; sub.file.example. 60 NS ns.sub.file.example."},
			{"other.example.", a, "SERVFAIL"},
		}},
		"auto": {"auto {\n directory DIR\n}", []question{
			{"ns.file.example.", a, "NOERROR; ns.file.example. 60 A 192.0.2.53; file.example. 60 NS ns.file.example."},
			{"ns.other.example.", a, "SERVFAIL"},
		}},
		"rewrite": {`rewrite stop {
 name regex (.*)\.in\.example\.$ {1}.default.svc.cluster.local
 answer name (.*)\.default\.svc\.cluster\.local\.$ {1}.in.example
}
rewrite name suffix .old.example .new.example answer auto
rewrite continue ttl exact ttl.example 7
rewrite type ANY HINFO
rewrite rcode exact nx.code.example NXDOMAIN NOERROR
rewrite name exact.example other.example
kubernetes cluster.local
forward . UP`, []question{
			{"web.in.example.", a, "NOERROR; web.in.example. 5 A 10.96.0.5"},
			{"x.old.example.", a, "NOERROR; x.old.example. 300 A 203.0.113.7"},
			{"ttl.example.", a, "NOERROR; ttl.example. 7 A 203.0.113.7"},
			{"nx.code.example.", a, "NOERROR; example. 60 SOA"},
			{"Exact.example.", a, "NOERROR; exact.example. 300 A 203.0.113.7"},
		}},
		"template": {`template IN A ip.example {
 match ^ip-(?P<a>[0-9]+)-(?P<b>[0-9a-f]+)[.]ip[.]example[.]$
 answer "{{ .Name }} 60 IN A 10.0.{{ .Group.a }}.{{ parseInt .Group.b 16 8 }}"
 fallthrough
}
template ANY ANY none.example {
 rcode NXDOMAIN
}
template IN A alias.example {
 answer "{{ .Name }} 60 IN CNAME www.example.com."
}
forward . UP`, []question{
			{"ip-3-f4.ip.example.", a, "NOERROR; ip-3-f4.ip.example. 60 A 10.0.3.244"},
			{"x.ip.example.", a, "NOERROR; x.ip.example. 300 A 203.0.113.7"},
			{"x.none.example.", aaaa, "NXDOMAIN"},
			{"alias.example.", a, "NOERROR; alias.example. 60 CNAME www.example.com.; www.example.com. 300 A 203.0.113.7"},
		}},
		"acl": {"acl blocked.example {\n block net 127.0.0.0/8\n}\nacl {\n filter type AAAA\n allow net *\n}\nforward . UP", []question{
			{"x.blocked.example.", a, "REFUSED"}, {"x.example.", aaaa, "NOERROR"}, {"x.example.", a, "NOERROR; x.example. 300 A 203.0.113.7"},
		}},
		"dns64": {"dns64 {\n allow_ipv4\n}\nforward . UP", []question{
			{"x.example.", aaaa, "NOERROR; x.example. 60 AAAA 64:ff9b::cb00:7107"}, {"nx.example.", aaaa, "NXDOMAIN; example. 60 SOA"},
		}},
		"any, local, minimal": {"any\nlocal\nminimal\nfile DIR/db.file.example file.example", []question{
			{"x.example.", mdns.TypeANY, `NOERROR; x.example. 8482 HINFO "ANY obsoleted" "See RFC 8482"`},
			{"localhost.", a, "NOERROR; localhost. 604800 A 127.0.0.1"},
			{"x.localhost.", a, "NOERROR; x.localhost. 604800 A 127.0.0.1"},
			{"localhost.x.example.", aaaa, "NOERROR; localhost.x.example. 604800 AAAA ::1"},
			{"x.localhost.", txt, "NOERROR; x.localhost. 604800 SOA"},
			{"1.0.0.127.in-addr.arpa.", mdns.TypePTR, "NOERROR; 1.0.0.127.in-addr.arpa. 604800 PTR localhost."},
			{"1.0.0.127.in-addr.arpa.", a, "NOERROR; 127.in-addr.arpa. 604800 SOA"},
			{"2.0.0.127.in-addr.arpa.", mdns.TypePTR, "NXDOMAIN; 127.in-addr.arpa. 604800 SOA"},
			{"255.in-addr.arpa.", mdns.TypeNS, "NOERROR; 255.in-addr.arpa. 604800 NS localhost."},
			{"ns.file.example.", a, "NOERROR; ns.file.example. 60 A 192.0.2.53"},
		}},
		"autopath": {"autopath @kubernetes\nkubernetes cluster.local {\n pods verified\n}\nforward . UP", []question{
			{"web.default.svc.cluster.local.", a, "NOERROR; web.default.svc.cluster.local. 5 A 10.96.0.5"},
			{"www.example.com.default.svc.cluster.local.", a,
				"NOERROR; www.example.com.default.svc.cluster.local. 300 CNAME www.example.com.; " +
					"www.example.com. 300 A 203.0.113.7"},
			{"127-0-0-1.default.pod.cluster.local.", a, "NOERROR; 127-0-0-1.default.pod.cluster.local. 5 A 127.0.0.1"},
			{"10-0-0-1.default.pod.cluster.local.", a, "NXDOMAIN; cluster.local. 5 SOA"},
		}},
		"kubernetes without reverse zones and endpoints": {"kubernetes cluster.local {\n noendpoints\n namespaces default\n ttl 0\n}", []question{
			{"_http._tcp.web.default.svc.cluster.local.", srv,
				"NOERROR; _http._tcp.web.default.svc.cluster.local. 0 SRV 0 100 80 web.default.svc.cluster.local."},
			{"5.0.96.10.in-addr.arpa.", mdns.TypePTR, "SERVFAIL"},
			{"dns-version.cluster.local.", txt, `NOERROR; dns-version.cluster.local. 0 TXT "1.1.0"`},
		}},
		"forward with except and failures": {"forward . UP {\n except kept.example\n}", []question{
			{"x.kept.example.", a, "SERVFAIL"}, {"fail.example.", a, "SERVFAIL"}, {"nx.example.", a, "NXDOMAIN; example. 60 SOA"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, ".:PORT {\n errors\n ready WEB\n"+strings.ReplaceAll(c.text, "DIR", dir)+"\n}", up)
			for _, q := range c.questions {
				r.want(q.name, q.typ, q.want)
			}
		})
	}
}

// The most specific zone answers; class CH only where chaos is; a bad request gets its code.
func TestServerBlocks(t *testing.T) {
	up := startUpstream(t)
	r := start(t, ".:PORT {\n ready WEB\n bufsize 600\n forward . UP {\n force_tcp\n}\n}\n"+
		"sub.example:PORT {\n template ANY ANY {\n rcode NXDOMAIN\n}\n}\n"+
		"bind:PORT {\n chaos v1 a b\n}", up)
	r.want("x.sub.example.", mdns.TypeA, "NXDOMAIN")
	r.want("xsub.example.", mdns.TypeA, "NOERROR; xsub.example. 300 A 203.0.113.7")
	if up.tcp.Load() == 0 {
		t.Error("force_tcp asks over UDP")
	}
	exchange := func(change func(*mdns.Msg)) *mdns.Msg {
		m := new(mdns.Msg).SetQuestion("version.bind.", mdns.TypeTXT)
		change(m)
		out, _, err := (&mdns.Client{Timeout: 10 * time.Second}).Exchange(m, r.dns)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	v := exchange(func(m *mdns.Msg) { m.Question[0].Qclass = mdns.ClassCHAOS })
	if len(v.Answer) != 1 || v.Answer[0].(*mdns.TXT).Txt[0] != "v1" {
		t.Errorf("version.bind: %s", v)
	}
	if m := exchange(func(m *mdns.Msg) { m.Opcode = mdns.OpcodeNotify }); m.Rcode != mdns.RcodeNotImplemented {
		t.Errorf("NOTIFY: %s", m)
	}
	m := exchange(func(m *mdns.Msg) { m.SetEdns0(4096, true); m.IsEdns0().SetVersion(1) })
	if m.Rcode != mdns.RcodeBadVers {
		t.Errorf("EDNS version 1: %s", m)
	}
	m = exchange(func(m *mdns.Msg) { m.Question[0].Name = "x.example."; m.SetEdns0(4096, true) })
	if o := m.IsEdns0(); o == nil || !o.Do() {
		t.Errorf("the answer has not the client's EDNS: %s", m)
	}
}

// An expired answer is used where the file allows it, and a failure is not kept longer than it allows.
func TestStale(t *testing.T) {
	up := startUpstream(t)
	r := start(t, ".:PORT {\n ready WEB\n cache {\n success 100 1 1\n servfail 0s\n serve_stale 1h immediate 7s\n}\n"+
		" forward . UP {\n read_timeout 200ms\n}\n}", up)
	r.want("s.example.", mdns.TypeA, "NOERROR; s.example. 1 A 203.0.113.7")
	r.eventually("the answer is stale", func() bool {
		return line(r.ask("s.example.", mdns.TypeA)) == "NOERROR; s.example. 7 A 203.0.113.7"
	})
	r.eventually("it is fetched again", func() bool { return up.count("s.example.") > 1 })
	for range 2 {
		r.want("fail.example.", mdns.TypeA, "SERVFAIL")
	}
	if n := up.count("fail.example."); n != 2 {
		t.Errorf("a failure was asked for %d times, want twice: servfail 0s keeps none", n)
	}
}

// Hostile clients: more questions than max_concurrent, a panic of a plugin, connections without end.
func TestHostile(t *testing.T) {
	up := startUpstream(t)
	r := start(t, ".:PORT {\n ready WEB\n prometheus WEB\n log . {\n class error\n}\n"+
		" forward . UP {\n max_concurrent 2\n read_timeout 1s\n}\n}", up)
	var refused atomic.Int32
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			c := &mdns.Client{Timeout: 15 * time.Second}
			m, _, err := c.Exchange(new(mdns.Msg).SetQuestion(fmt.Sprintf("x%d.silent.example.", i), mdns.TypeA), r.dns)
			if err == nil && m.Rcode == mdns.RcodeRefused {
				refused.Add(1)
			}
		})
	}
	wg.Wait()
	if refused.Load() < 10 {
		t.Errorf("%d of 20 questions refused, want most: max_concurrent is 2", refused.Load())
	}
	if !strings.Contains(r.log.String(), "REFUSED") || !strings.Contains(r.log.String(), "silent.example.") {
		t.Errorf("class error is not logged:\n%s", r.log)
	}
	conns := make([]net.Conn, 0, maxClientConns)
	for range maxClientConns {
		c, err := net.Dial("tcp", r.dns)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	extra, err := net.Dial("tcp", r.dns)
	if err != nil {
		t.Fatal(err)
	}
	conns = append(conns, extra)
	_ = extra.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := extra.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("a client may have more than %d connections: %v", maxClientConns, err)
	}
	for _, c := range conns {
		c.Close()
	}
	m, _, err := (&mdns.Client{Timeout: 10 * time.Second}).Exchange(new(mdns.Msg).SetQuestion("after.example.", mdns.TypeA), r.dns)
	if err != nil || m.Rcode != mdns.RcodeSuccess || len(m.Answer) != 1 {
		t.Errorf("after the attack: %v %v", m, err)
	}
}

// The order of addresses changes from answer to answer, and no record is lost.
func TestLoadBalance(t *testing.T) {
	r := start(t, ".:PORT {\n ready WEB\n loadbalance\n hosts {\n 192.0.2.1 m.example\n 192.0.2.2 m.example\n 192.0.2.3 m.example\n}\n}", nil)
	orders := map[string]bool{}
	for range 60 {
		var got []string
		for _, rr := range r.ask("m.example.", mdns.TypeA).Answer {
			got = append(got, rr.(*mdns.A).A.String())
		}
		orders[strings.Join(got, " ")] = true
		if slices.Sort(got); strings.Join(got, " ") != "192.0.2.1 192.0.2.2 192.0.2.3" {
			t.Fatalf("the addresses are %v", got)
		}
	}
	if len(orders) < 3 {
		t.Errorf("only %d orders in 60 answers", len(orders))
	}
}
