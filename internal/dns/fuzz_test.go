package dns

import (
	"encoding/binary"
	"testing"

	mdns "github.com/miekg/dns"
)

// FuzzAnswer: no packet makes the server panic or answer what cannot be read.
func FuzzAnswer(f *testing.F) {
	o := clusterOptions()
	o.Listen = []string{"127.0.0.1:0"}
	s, err := New(o)
	if err != nil {
		f.Fatal(err)
	}
	fill(s.Zone(), objects(f))
	for _, name := range []string{"db.prod.svc.cluster.local.", "ext-db.prod.svc.cluster.local.", "20.0.96.10.in-addr.arpa.",
		"10-1-2-3.prod.pod.cluster.local.", "example.com.", "."} {
		for _, typ := range []uint16{mdns.TypeA, mdns.TypeSRV, mdns.TypePTR, mdns.TypeANY, mdns.TypeSOA} {
			m := question(name, typ)
			b, _ := m.Pack()
			f.Add(b, true)
			m.SetEdns0(1232, true)
			b, _ = m.Pack()
			f.Add(b, false)
		}
	}
	f.Fuzz(func(t *testing.T, req []byte, udp bool) {
		w := s.newWorker(udp, &workerStats{})
		switch w.answer(req) {
		case drop:
			if len(req) >= headerSize && req[2]&0x80 == 0 {
				t.Errorf("a request was dropped: %x", req)
			}
			return
		case reply:
		default:
			return
		}
		if udp && len(w.out) > udpSize {
			t.Errorf("%d bytes over UDP", len(w.out))
		}
		var r mdns.Msg
		if err := r.Unpack(w.out); err != nil {
			t.Errorf("the answer to %x cannot be read: %v\n%x", req, err, w.out)
		}
		if !r.Response || r.Id != binary.BigEndian.Uint16(req) {
			t.Errorf("wrong header: %v", &r)
		}
	})
}

// FuzzReply: no answer of an upstream makes the server panic or send on what
// cannot be read.
func FuzzReply(f *testing.F) {
	name := []byte("\x03www\x07example\x03com\x00")
	for _, records := range [][]string{{"www.example.com. 60 IN A 192.0.2.1"}, {"www.example.com. 60 IN CNAME a.example.com.",
		"a.example.com. 5 IN AAAA 2001:db8::1"}} {
		m := question("www.example.com.", mdns.TypeA)
		m.Response, m.Compress = true, true
		for _, r := range records {
			rr, _ := mdns.NewRR(r)
			m.Answer = append(m.Answer, rr)
		}
		m.SetEdns0(1232, false)
		b, _ := m.Pack()
		f.Add(b, 512)
		m.Extra = append(m.Extra, m.Answer...) // OPT in the middle
		b, _ = m.Pack()
		f.Add(b, 1232)
	}
	a := ask{name: name, typ: mdns.TypeA}
	f.Fuzz(func(t *testing.T, msg []byte, limit int) {
		req := newUpstream(dead(t)).request(a, false)[2:]
		if len(msg) >= 2 {
			copy(req, msg[:2])
		}
		e, err := readReply(msg, req, a)
		if err != nil || e.body == nil {
			return
		}
		out := append(make([]byte, headerSize), req[headerSize:headerSize+len(name)+4]...)
		limit = min(max(limit, minUDP), maxMessage)
		out, an, ns, ar, _ := e.appendTo(out, 1, false, limit)
		if len(out) > limit {
			t.Errorf("%d bytes, limit %d", len(out), limit)
		}
		at := headerSize + len(name) + 4
		for range int(an) + int(ns) + int(ar) {
			r, ok := parseRecord(out, at)
			if !ok || r.typ == typeOPT {
				t.Fatalf("a record is wrong in %x", out)
			}
			at = r.end
		}
		if at != len(out) {
			t.Errorf("%d bytes behind the last record", len(out)-at)
		}
		e.message(name, mdns.TypeA, 1)
	})
}
