// Package nszone is a DNS server for tests that has addresses, and TXT records by dynamic updates.
package nszone

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// The key that signs updates, and what tsig-keygen writes for it.
const (
	keyName = "fairlead."
	Secret  = "MDEyMzQ1Njc4OWFiY2RlZj4/"
	KeyFile = "key \"fairlead\" {\n\talgorithm hmac-sha256;\n\tsecret \"" + Secret + "\";\n};\n"
)

// Server answers by TCP.
type Server struct {
	// Addr is where it listens.
	Addr  string
	zone  string
	hosts map[string]netip.Addr

	mu  sync.Mutex
	has []string // NAME VALUE
	// updates counts those that were taken.
	updates int
}

// Start starts a server of a zone with the addresses of hosts. Updates are signed by secret.
func Start(t *testing.T, zone, secret string, hosts map[string]netip.Addr) *Server {
	t.Helper()
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Addr: socket.Addr().String(), zone: dns.Fqdn(zone), hosts: hosts}
	d := dns.Server{
		Listener: socket, Handler: dns.HandlerFunc(s.answer), TsigSecret: map[string]string{keyName: secret},
		MsgAcceptFunc: func(dns.Header) dns.MsgAcceptAction { return dns.MsgAccept }, // also updates
	}
	var running sync.WaitGroup
	running.Go(func() { _ = d.ActivateAndServe() })
	t.Cleanup(func() { _ = socket.Close(); running.Wait() })
	return s
}

// Records returns the TXT records as NAME VALUE, with commas between, and how many updates were taken.
func (s *Server) Records() (records string, updates int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.has, ", "), s.updates
}

// Lead gives a host an address.
func (s *Server) Lead(host string, to netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hosts[host] = to
}

// Put sets the TXT records.
func (s *Server) Put(records ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.has = records
}

func (s *Server) answer(w dns.ResponseWriter, q *dns.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := new(dns.Msg)
	m.SetReply(q)
	signed := q.IsTsig()
	switch {
	case q.Opcode == dns.OpcodeUpdate && (signed == nil || w.TsigStatus() != nil || q.Question[0].Name != s.zone):
		m.Rcode = dns.RcodeNotAuth
	case q.Opcode == dns.OpcodeUpdate:
		s.update(q)
		m.SetTsig(keyName, dns.HmacSHA256, 300, time.Now().Unix())
	default:
		s.lookup(m, q.Question[0])
	}
	_ = w.WriteMsg(m)
}

func (s *Server) update(q *dns.Msg) {
	s.updates++
	for _, r := range q.Ns {
		record := strings.TrimSuffix(r.Header().Name, ".") + " " + r.(*dns.TXT).Txt[0]
		s.has = slices.DeleteFunc(s.has, func(h string) bool { return h == record })
		if r.Header().Class == dns.ClassINET {
			s.has = append(s.has, record)
		}
	}
}

func (s *Server) lookup(m *dns.Msg, q dns.Question) {
	asked := strings.TrimSuffix(strings.ToLower(q.Name), ".")
	header := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET}
	switch a, ok := s.hosts[asked]; {
	case q.Qtype == dns.TypeA && ok:
		m.Answer = append(m.Answer, &dns.A{Hdr: header, A: a.AsSlice()})
	case q.Qtype == dns.TypeTXT:
		for _, record := range s.has {
			if name, value, _ := strings.Cut(record, " "); name == asked {
				m.Answer = append(m.Answer, &dns.TXT{Hdr: header, Txt: []string{value}})
			}
		}
	}
}
