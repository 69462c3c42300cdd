package dns

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// upstreamServer is a resolver on loopback that behaves as the test wants.
type upstreamServer struct {
	addr netip.AddrPort
	udp  atomic.Int64 // questions that came
	tcp  atomic.Int64
	// answer is called on its own goroutine for each question; nil means
	// silence.
	answer func(w mdns.ResponseWriter, m *mdns.Msg, n int64)
}

func (u *upstreamServer) ServeDNS(w mdns.ResponseWriter, m *mdns.Msg) {
	if strings.HasSuffix(m.Question[0].Name, loopSuffix+".") {
		_ = w.WriteMsg(new(mdns.Msg).SetRcode(m, mdns.RcodeNameError))
		return
	}
	n := u.udp.Add(1)
	if w.RemoteAddr().Network() == "tcp" {
		u.udp.Add(-1)
		n = u.tcp.Add(1)
	}
	u.answer(w, m, n)
}

func startUpstream(t testing.TB, answer func(w mdns.ResponseWriter, m *mdns.Msg, n int64)) *upstreamServer {
	t.Helper()
	u := &upstreamServer{answer: answer}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u.addr = l.Addr().(*net.TCPAddr).AddrPort()
	pc, err := net.ListenPacket("udp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, srv := range []*mdns.Server{{Listener: l, Handler: u}, {PacketConn: pc, Handler: u}} {
		up := make(chan struct{})
		srv.NotifyStartedFunc = func() { close(up) }
		done := make(chan struct{})
		go func() { defer close(done); _ = srv.ActivateAndServe() }()
		<-up
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			_ = srv.ShutdownContext(ctx)
			<-done
		})
	}
	return u
}

// answerWith answers with records in zone-file text; owners are the name asked
// for unless they say something else.
func answerWith(records ...string) func(mdns.ResponseWriter, *mdns.Msg, int64) {
	return func(w mdns.ResponseWriter, m *mdns.Msg, _ int64) {
		r := new(mdns.Msg).SetReply(m)
		r.RecursionAvailable, r.Compress = true, true
		for _, rec := range records {
			rec = strings.Replace(rec, "@", m.Question[0].Name, 1)
			rr, err := mdns.NewRR(rec)
			if err != nil {
				panic(err)
			}
			switch {
			case rr.Header().Rrtype == mdns.TypeSOA:
				r.Ns = append(r.Ns, rr)
			default:
				r.Answer = append(r.Answer, rr)
			}
		}
		if len(r.Ns) > 0 && len(r.Answer) == 0 {
			r.Rcode = mdns.RcodeNameError
		}
		if o := m.IsEdns0(); o != nil {
			r.SetEdns0(1232, o.Do())
		}
		_ = w.WriteMsg(r)
	}
}

func upstreams(us ...*upstreamServer) (out []netip.AddrPort) {
	for _, u := range us {
		out = append(out, u.addr)
	}
	return out
}

// dead is an address of loopback where no server listens.
func dead(t testing.TB) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func firstA(r *mdns.Msg) string {
	for _, rr := range r.Answer {
		if a, ok := rr.(*mdns.A); ok {
			return a.A.String()
		}
	}
	return mdns.RcodeToString[r.Rcode]
}
