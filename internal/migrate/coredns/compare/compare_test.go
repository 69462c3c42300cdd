package compare_test

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/migrate/coredns/compare"
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

// Order, TTLs and the case of names do not count; codes and records do. The error names the question and both answers.
func TestRun(t *testing.T) {
	like := serve(t, dns.RcodeSuccess, "x.test. 30 IN A 192.0.2.1", "x.test. 30 IN A 192.0.2.2")
	q, err := compare.ParseQuestion("x.test/A")
	if err != nil {
		t.Fatal(err)
	}
	dead := netip.MustParseAddrPort("127.0.0.1:1")
	for name, c := range map[string]struct {
		server netip.AddrPort
		want   string
	}{
		"equal":    {serve(t, dns.RcodeSuccess, "X.test. 5 IN A 192.0.2.2", "x.test. 5 IN A 192.0.2.1"), ""},
		"records":  {serve(t, dns.RcodeSuccess, "x.test. 30 IN A 192.0.2.1"), "x.test./A: "},
		"address":  {serve(t, dns.RcodeSuccess, "x.test. 30 IN A 192.0.2.1", "x.test. 30 IN A 192.0.2.3"), "192.0.2.3"},
		"code":     {serve(t, dns.RcodeNameError), "NXDOMAIN [no records]"},
		"no reply": {dead, "127.0.0.1:1 over udp"},
	} {
		within := time.Minute
		if c.want != "" {
			within = 50 * time.Millisecond
		}
		err := compare.Run(t.Context(), compare.Options{
			Servers: []netip.AddrPort{like, c.server}, Like: like, Questions: []compare.Question{q}, Within: within,
		})
		if (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	for _, text := range []string{"x.test", "x.test/NO", "/A", strings.Repeat("a", 64) + ".test/A"} {
		if _, err := compare.ParseQuestion(text); err == nil || !strings.Contains(err.Error(), "want NAME/TYPE") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
