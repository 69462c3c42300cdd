package compare

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// serve answers every question with records, over UDP and TCP, until the test ends.
func serve(t *testing.T, rcode int, records ...string) netip.AddrPort {
	t.Helper()
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg).SetRcode(r, rcode)
		for _, text := range records {
			rr, err := dns.NewRR(text)
			if err != nil {
				t.Error(err)
				return
			}
			m.Answer = append(m.Answer, rr)
		}
		_ = w.WriteMsg(m)
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(l.Addr().String())
	c, err := net.ListenPacket("udp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*dns.Server{{Listener: l, Handler: handler}, {PacketConn: c, Handler: handler}} {
		ended := make(chan error, 1)
		go func() { ended <- s.ActivateAndServe() }()
		t.Cleanup(func() {
			_ = s.Shutdown()
			<-ended
		})
	}
	return at
}

// Order, TTLs and the case of names do not count; codes and records do. The error names the question and both answers. A server
// that does not answer hides no fault of another one, and of many faults the first are named.
func TestRun(t *testing.T) {
	t.Parallel()
	like := serve(t, dns.RcodeSuccess, "x.test. 30 IN A 192.0.2.1", "x.test. 30 IN A 192.0.2.2")
	equal := serve(t, dns.RcodeSuccess, "X.test. 5 IN A 192.0.2.2", "x.test. 5 IN A 192.0.2.1")
	fewer := serve(t, dns.RcodeSuccess, "x.test. 30 IN A 192.0.2.1")
	other := serve(t, dns.RcodeSuccess, "x.test. 30 IN A 192.0.2.1", "x.test. 30 IN A 192.0.2.3")
	none := serve(t, dns.RcodeNameError)
	dead := netip.MustParseAddrPort("127.0.0.1:1")
	q, err := ParseQuestion("x.test/A")
	if err != nil {
		t.Fatal(err)
	}
	with := func(servers ...netip.AddrPort) Options {
		return Options{Servers: servers, Like: like, Questions: []Question{q, q}, Within: 2 * time.Second}
	}
	for name, c := range map[string]struct {
		servers []netip.AddrPort
		want    []string
	}{
		"records":           {[]netip.AddrPort{equal, fewer}, []string{"x.test./A: " + fewer.String()}},
		"address":           {[]netip.AddrPort{equal, other}, []string{"192.0.2.3"}},
		"code":              {[]netip.AddrPort{equal, none}, []string{"NXDOMAIN [no records]"}},
		"no reply":          {[]netip.AddrPort{dead}, []string{"127.0.0.1:1 over udp"}},
		"one with no reply": {[]netip.AddrPort{dead, none}, []string{"127.0.0.1:1 over udp", "NXDOMAIN"}},
		"many":              {[]netip.AddrPort{fewer, other, none}, []string{"192.0.2.3", "; and 3 more"}},
	} {
		err := once(t.Context(), with(c.servers...))
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}
		if err != nil && strings.Count(err.Error(), "; "+like.String()+" has") > maxDifferences {
			t.Errorf("%s: the error is long: %v", name, err)
		}
	}
	o := with(equal)
	o.Like = dead
	if err := once(t.Context(), o); err == nil || !strings.Contains(err.Error(), "the reference server 127.0.0.1:1 does not answer") {
		t.Errorf("without a reference: %v", err)
	}
	o = with(equal)
	o.Within = time.Minute
	if err := Run(t.Context(), o); err != nil {
		t.Errorf("equal: %v", err)
	}
	if err := Run(t.Context(), with(none)); err == nil || !strings.Contains(err.Error(), "NXDOMAIN") {
		t.Errorf("at the end of the time: %v", err)
	}
}

func TestParseQuestion(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"x.test", "x.test/NO", "/A", strings.Repeat("a", 64) + ".test/A"} {
		if _, err := ParseQuestion(text); err == nil || !strings.Contains(err.Error(), "want NAME/TYPE") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
