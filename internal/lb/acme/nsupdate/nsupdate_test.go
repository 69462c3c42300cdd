package nsupdate

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

const (
	keyText = "key \"fairlead\" {\n\talgorithm hmac-sha256;\n\tsecret \"MDEyMzQ1Njc4OWFiY2RlZj4/\";\n};\n"
	keyName = "fairlead."
)

// server is a server of the zone shop.example that takes updates which the key signs.
type server struct {
	addr string
	mu   sync.Mutex
	has  []string // NAME VALUE
}

func startServer(t *testing.T, secret string) *server {
	t.Helper()
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{addr: socket.Addr().String()}
	d := dns.Server{
		Listener: socket, Handler: dns.HandlerFunc(s.answer), TsigSecret: map[string]string{keyName: secret},
		MsgAcceptFunc: func(dns.Header) dns.MsgAcceptAction { return dns.MsgAccept },
	}
	var running sync.WaitGroup
	running.Go(func() { _ = d.ActivateAndServe() })
	t.Cleanup(func() { _ = socket.Close(); running.Wait() })
	return s
}

func (s *server) answer(w dns.ResponseWriter, q *dns.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := new(dns.Msg)
	m.SetReply(q)
	signed := q.IsTsig()
	switch {
	case q.Opcode == dns.OpcodeUpdate && (signed == nil || w.TsigStatus() != nil || q.Question[0].Name != "shop.example."):
		m.Rcode = dns.RcodeNotAuth
	case q.Opcode == dns.OpcodeUpdate:
		for _, r := range q.Ns {
			record := strings.TrimSuffix(r.Header().Name, ".") + " " + r.(*dns.TXT).Txt[0]
			s.has = slices.DeleteFunc(s.has, func(h string) bool { return h == record })
			if r.Header().Class == dns.ClassINET {
				s.has = append(s.has, record)
			}
		}
		m.SetTsig(keyName, dns.HmacSHA256, fudge, time.Now().Unix())
	default:
		for _, record := range s.has {
			if name, value, _ := strings.Cut(record, " "); dns.Fqdn(name) == q.Question[0].Name {
				m.Answer = append(m.Answer, &dns.TXT{
					Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{value}})
			}
		}
	}
	_ = w.WriteMsg(m)
}

func (s *server) records() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.has, ", ")
}

// Records are added beside others, awaited at all servers of the zone, and removed without the others. A server with another key,
// or of a zone that is not ours, is reported.
func TestUpdates(t *testing.T) {
	t.Parallel()
	key, err := ParseKey(keyText)
	if err != nil {
		t.Fatal(err)
	}
	first, second, other := startServer(t, key.secret), startServer(t, key.secret), startServer(t, "YW5vdGhlciBrZXkgb2YgMTYgYnl0ZXM=")
	zone, err := ParseZone("Shop.Example.=" + first.addr + "," + second.addr)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := ParseZone("bank.example=" + other.addr)
	if err != nil {
		t.Fatal(err)
	}
	u := New([]Zone{{Name: "example", Servers: []string{other.addr}}, zone, foreign}, key)
	const name = "_acme-challenge.shop.example"
	ctx := t.Context()
	for _, value := range []string{"one", "two", "one"} {
		if err := u.Add(ctx, name, value); err != nil {
			t.Fatal(err)
		}
	}
	if got := first.records(); got != name+" two, "+name+" one" {
		t.Errorf("the server has %q", got)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	if err := u.Await(short, name, "one"); err == nil || !strings.Contains(err.Error(), "server "+second.addr+" of zone shop.example does not") {
		t.Errorf("a server of the zone does not have the record: %v", err)
	}
	cancel()
	second.mu.Lock()
	second.has = []string{name + " one"}
	second.mu.Unlock()
	if err := u.Await(ctx, name, "one"); err != nil {
		t.Error(err)
	}
	if err := u.Remove(ctx, name, "one"); err != nil || first.records() != name+" two" {
		t.Errorf("removed: %v, the server has %q", err, first.records())
	}
	if err := u.Add(ctx, "www.bank.example", "x"); err == nil || other.records() != "" {
		t.Errorf("an update with another key: %v, %q", err, other.records())
	}
	if err := u.Add(ctx, "www.test", "x"); err == nil || u.Has("www.test") || !u.Has("a.shop.example") || u.Has("notshop.exampl") {
		t.Errorf("no zone of ours: %v", err)
	}
	if (*Updater)(nil).Has("shop.example") {
		t.Error("no zones have a name")
	}
}

// Keys and zones that cannot be used are rejected, without their secrets.
func TestWrongKeysAndZones(t *testing.T) {
	for _, text := range []string{
		"", "MDEyMzQ1Njc4OWFiY2RlZj4/", strings.Replace(keyText, "hmac-sha256", "hmac-md5", 1),
		strings.Replace(keyText, "MDEyMzQ1Njc4OWFiY2RlZj4/", "MDEyMzQ1", 1), strings.Replace(keyText, "secret", "#secret2", 1),
	} {
		if _, err := ParseKey(text); err == nil || strings.Contains(err.Error(), "MDEy") {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, text := range []string{"", "shop.example", "=127.0.0.1", "*.shop.example=127.0.0.1", "shop.example=127.0.0.1,,"} {
		if z, err := ParseZone(text); err == nil {
			t.Errorf("%q: %+v", text, z)
		}
	}
	z, err := ParseZone("a.example=::1,[::1]:54,ns.example")
	if want := []string{"[::1]:53", "[::1]:54", "ns.example:53"}; err != nil || !slices.Equal(z.Servers, want) {
		t.Errorf("%v: %q", err, z.Servers)
	}
}
