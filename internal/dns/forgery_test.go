package dns

import (
	"fmt"
	"strings"
	"testing"

	mdns "github.com/miekg/dns"
)

// An upstream that does not compress repeats the random case of the question
// in full; clients see lower case.
func TestUncompressedOwnerLosesRandomCase(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, _ int64) {
		r := new(mdns.Msg).SetReply(m)
		rr, _ := mdns.NewRR(m.Question[0].Name + " 100 IN A 192.0.2.1")
		r.Answer = append(r.Answer, rr)
		_ = w.WriteMsg(r)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	r := exchange(t, s, "udp", question("some.long.name.example.com.", mdns.TypeA))
	if n := r.Answer[0].Header().Name; n != "some.long.name.example.com." {
		t.Errorf("the owner is %s", n)
	}
}

// Answers with another id, another question, other case, or a response bit
// that is missing are not taken, also when they come first.
func TestForgedAnswersAreNotTaken(t *testing.T) {
	for what, forge := range map[string]func(r *mdns.Msg){
		"id":       func(r *mdns.Msg) { r.Id++ },
		"name":     func(r *mdns.Msg) { r.Question[0].Name = "evil." + r.Question[0].Name },
		"type":     func(r *mdns.Msg) { r.Question[0].Qtype = mdns.TypeTXT },
		"class":    func(r *mdns.Msg) { r.Question[0].Qclass = mdns.ClassCHAOS },
		"query":    func(r *mdns.Msg) { r.Response = false },
		"opcode":   func(r *mdns.Msg) { r.Opcode = mdns.OpcodeNotify },
		"question": func(r *mdns.Msg) { r.Question = nil },
		"case": func(r *mdns.Msg) {
			n := r.Question[0].Name
			if r.Question[0].Name = strings.ToLower(n); n == r.Question[0].Name {
				r.Question[0].Name = strings.ToUpper(n)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
				if w.RemoteAddr().Network() == "udp" {
					f := new(mdns.Msg).SetReply(m)
					rr, _ := mdns.NewRR(m.Question[0].Name + " 100 IN A 203.0.113.66")
					f.Answer = append(f.Answer, rr)
					forge(f)
					_ = w.WriteMsg(f)
				}
				answerWith("@ 100 IN A 192.0.2.1")(w, m, n)
			})
			s := start(t, Options{Upstream: upstreams(u)})
			for range 3 {
				if got := firstA(exchange(t, s, "udp", question("some.long.name.example.com.", mdns.TypeA))); got != "192.0.2.1" {
					t.Fatalf("answered %s", got)
				}
			}
		})
	}
}

// Only the answer of an upstream from its own address and port counts; others
// do not even wake the socket. A flood of wrong answers ends the try.
func TestFloodOfForgeriesEnds(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, _ int64) {
		f := new(mdns.Msg).SetReply(m)
		for range 4 * maxMismatches {
			f.Id++
			_ = w.WriteMsg(f)
		}
	})
	s := start(t, Options{Upstream: upstreams(u)})
	if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure {
		t.Errorf("answered %v", r)
	}
}

// An upstream that changes the case of names is found out over TCP and used
// without mixed case from then on.
func TestUpstreamThatLowersNames(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		m.Question[0].Name = strings.ToLower(m.Question[0].Name)
		answerWith("@ 0 IN A 192.0.2.1")(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	for i := range 4 {
		if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("mixed%d.example.com.", i), mdns.TypeA))); got != "192.0.2.1" {
			t.Fatalf("answered %s", got)
		}
	}
	if n := u.tcp.Load(); n > 2 {
		t.Errorf("%d questions over TCP: the upstream was not remembered", n)
	}
}
