package zone

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

func edgeZone(t *testing.T, domains ...string) *Zone {
	t.Helper()
	z, err := New(Config{Domains: domains, Reverse: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
		NameServer: svc.Name{Namespace: "kube-system", Name: "kube-dns"}})
	if err != nil {
		t.Fatal(err)
	}
	return z
}

func edgeService(namespace, name string, ips ...string) *corev1.Service {
	s := &corev1.Service{}
	s.Namespace, s.Name = namespace, name
	s.Spec.ClusterIP, s.Spec.ClusterIPs = ips[0], ips
	s.Spec.Ports = []corev1.ServicePort{{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}}
	return s
}

func edgeExternal(name, target string) *corev1.Service {
	s := edgeService("prod", name, "")
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: target}
	return s
}

// edgeSlice is a slice of the Service with one port and endpoints ADDRESS or
// ADDRESS=HOSTNAME.
func edgeSlice(service, name, port string, endpoints ...string) *discoveryv1.EndpointSlice {
	e := &discoveryv1.EndpointSlice{}
	e.Namespace, e.Name, e.Labels = "prod", name, map[string]string{ServiceNameLabel: service}
	number := int32(80)
	e.Ports = []discoveryv1.EndpointPort{{Name: &port, Port: &number}}
	for _, text := range endpoints {
		ip, hostname, named := strings.Cut(text, "=")
		ep := discoveryv1.Endpoint{Addresses: []string{ip}}
		if named {
			ep.Hostname = &hostname
		}
		e.Endpoints = append(e.Endpoints, ep)
	}
	return e
}

func parsed(t *testing.T, text string) *Name {
	t.Helper()
	n := new(Name)
	if err := n.ParseText(text); err != nil {
		t.Fatal(err)
	}
	return n
}

// put asks z for a name and returns the answer, the length of the question, and the reply.
func put(t *testing.T, z *Zone, name string, typ uint16, search bool, limit int) ([]byte, int, Reply) {
	t.Helper()
	q := Question{Name: *parsed(t, name), Type: typ, Search: search}
	msg := append(make([]byte, questionAt), q.Name.Wire()...)
	msg = binary.BigEndian.AppendUint16(msg, typ)
	msg = binary.BigEndian.AppendUint16(msg, classIN)
	out, r := z.Answer(bytes.Clone(msg), &q, limit)
	if len(out) > limit {
		t.Errorf("%s: %d bytes, more than the limit of %d", name, len(out), limit)
	}
	return out, len(msg), r
}

// An answer with too little room is the beginning of the whole answer, up to the
// last record that fits, and is truncated if what is missing is an answer
// (RFC 2181, section 9).
func TestEveryLimit(t *testing.T) {
	z := edgeZone(t, "cluster.local")
	z.SetService(edgeService("kube-system", "kube-dns", "10.96.0.10", "fd00::10"))
	z.SetService(edgeService("prod", "three", "None"))
	z.SetSlice(edgeSlice("three", "three", "http", "10.1.0.1", "10.1.0.2=two", "10.1.0.3", "fd00::1"))
	z.SetService(edgeService("prod", "other", "None"))
	z.SetSlice(edgeSlice("other", "other", "http", "10.1.0.1"))
	z.SetService(edgeExternal("alias", "three.prod.svc.cluster.local"))
	z.SetService(edgeExternal("ports", "_http._tcp.three.prod.svc.cluster.local"))
	z.SetService(edgeExternal("out", "www.example.com"))
	for _, c := range []struct {
		name                           string
		typ                            uint16
		answers, authority, additional uint16
	}{
		{"three.prod.svc.cluster.local", typeA, 3, 0, 0},
		{"three.prod.svc.cluster.local", typeAAAA, 1, 0, 0},
		{"three.prod.svc.cluster.local", typeSRV, 4, 0, 4},
		{"three.prod.svc.cluster.local", typeTXT, 0, 1, 0},
		{"three.prod.svc.cluster.local", typeANY, 1, 0, 0},
		{"alias.prod.svc.cluster.local", typeA, 4, 0, 0},
		{"alias.prod.svc.cluster.local", typeCNAME, 1, 0, 0},
		{"ports.prod.svc.cluster.local", typeSRV, 5, 0, 4},
		{"out.prod.svc.cluster.local", typeA, 1, 0, 0},
		{"dns-version.cluster.local", typeTXT, 1, 0, 0},
		{"1.0.1.10.in-addr.arpa", typePTR, 2, 0, 0},
		{"10.0.96.10.in-addr.arpa", typePTR, 1, 0, 0},
		{"10.0.96.10.in-addr.arpa", typeA, 0, 1, 0},
		{"10.in-addr.arpa", typeSOA, 1, 0, 0},
		{"cluster.local", typeSOA, 1, 0, 0},
		{"cluster.local", typeNS, 1, 0, 2},
		{"nothing.cluster.local", typeA, 0, 1, 0},
	} {
		t.Run(fmt.Sprintf("%s type %d", c.name, c.typ), func(t *testing.T) {
			whole, question, r := put(t, z, c.name, c.typ, false, maxMessage)
			if r.Answers != c.answers || r.Authority != c.authority || r.Additional != c.additional || r.Truncated {
				t.Fatalf("%+v, want %d, %d and %d records", r, c.answers, c.authority, c.additional)
			}
			ends := []int{question}
			for at := question; at < len(whole); {
				at += 12 + int(binary.BigEndian.Uint16(whole[at+10:]))
				ends = append(ends, at)
			}
			if n := int(c.answers + c.authority + c.additional); len(ends) != n+1 || ends[n] != len(whole) {
				t.Fatalf("records end at %d in %d bytes, want %d of them", ends, len(whole), n)
			}
			for limit := question; limit <= len(whole); limit++ {
				fit := 0
				for fit+1 < len(ends) && ends[fit+1] <= limit {
					fit++
				}
				out, _, r := put(t, z, c.name, c.typ, false, limit)
				if !bytes.Equal(out, whole[:ends[fit]]) {
					t.Fatalf("limit %d: not the first %d records of the answer:\n%x\n%x", limit, fit, out, whole)
				}
				answers := min(uint16(fit), c.answers)
				cut := answers < c.answers && c.typ != typeSOA // a SOA record without room is left out
				if r.Answers != answers || r.Answers+r.Authority+r.Additional != uint16(fit) || r.Truncated != cut {
					t.Fatalf("limit %d: %+v, want %d records, %d of them answers", limit, r, fit, answers)
				}
			}
		})
	}
}

// The records of a set that has room go the short way and the long way to the same message.
func TestPartOfAll(t *testing.T) {
	addrs := []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")}
	s := newSRV([]srvTarget{{"\x01a", 80, addrs}, {"\x01b", 81, addrs}}, 25, []byte("\x01d\x00"), 5)
	whole := writer{msg: make([]byte, 40), limit: 512, owner: pointerToQuestion}
	part := writer{msg: make([]byte, 40), limit: 512, owner: pointerToQuestion}
	whole.srv(&s)
	part.srvPart(&s)
	if !bytes.Equal(whole.msg, part.msg) || whole.reply != part.reply || part.reply.Answers != 2 || part.reply.Additional != 4 {
		t.Errorf("%+v\n%x\n%+v\n%x", whole.reply, whole.msg, part.reply, part.msg)
	}
}

// How many records of a set are kept: those with which the largest message still
// has 512 bytes for what comes before, and addresses only of names a pointer reaches.
func TestSetSizes(t *testing.T) {
	domain := []byte("\x01d\x00")
	v4, v6 := []netip.Addr{netip.MustParseAddr("10.1.0.1")}, make([]netip.Addr, 2400)
	for i := range v6 {
		v6[i] = netip.MustParseAddr("fd00::1")
	}
	// records are n targets of 100 bytes, then one of last bytes.
	records := func(n, last int, addrs []netip.Addr) (out []srvTarget) {
		for i := range n {
			out = append(out, srvTarget{host: fmt.Sprintf("%079d", i)})
		}
		return append(out, srvTarget{host: strings.Repeat("x", last-18-len(domain)), addrs: addrs})
	}
	for _, c := range []struct {
		what            string
		targets         []srvTarget
		answers, extras uint16
		cut             bool
	}{
		{"answers that just fit", records(650, 23, nil), 651, 0, false},
		{"answers one byte too long", records(650, 24, nil), 650, 0, true},
		{"name at the last offset pointed at", append(records(122, 69, nil), srvTarget{host: "\x01z", addrs: v4}), 124, 1, false},
		{"name behind that", append(records(122, 70, nil), srvTarget{host: "\x01z", addrs: v4}), 124, 0, false},
		{"addresses that just fit", records(0, 35, v6), 1, 2321, false},
		{"addresses one byte too long", records(0, 36, v6), 1, 2320, false},
	} {
		s := newSRV(c.targets, 1, domain, 5)
		if s.answers != c.answers || s.extras != c.extras || s.cut != c.cut || len(s.body) > maxMessage-512 {
			t.Errorf("%s: %d answers, %d addresses, cut %v in %d bytes, want %d, %d, %v",
				c.what, s.answers, s.extras, s.cut, len(s.body), c.answers, c.extras, c.cut)
		}
	}
}

// Records take no more memory than their bytes.
func TestNoSpareMemory(t *testing.T) {
	four := []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("10.1.0.3")}
	six := []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("fd00::3")}
	for _, c := range []struct{ four, six []netip.Addr }{{four, nil}, {nil, six}, {four, six}, {four[:1], six}, {four, six[:1]}} {
		r := newRecords(append(append([]netip.Addr(nil), c.four...), c.six...), 5)
		if len(r.a) != len(c.four)*sizeA || cap(r.a) != len(r.a) || len(r.aaaa) != len(c.six)*sizeAAAA || cap(r.aaaa) != len(r.aaaa) {
			t.Errorf("%d and %d addresses: %d of %d and %d of %d bytes",
				len(c.four), len(c.six), len(r.a), cap(r.a), len(r.aaaa), cap(r.aaaa))
		}
		if (r.a == nil) != (c.four == nil) || (r.aaaa == nil) != (c.six == nil) {
			t.Errorf("%d and %d addresses: memory for records there are none of", len(c.four), len(c.six))
		}
	}
	s := newSRV([]srvTarget{{"\x03one", 80, four}, {"\x03two", 80, four[:1]}}, 1, []byte("\x07cluster\x05local\x00"), 5)
	if cap(s.body) != len(s.body) {
		t.Errorf("an SRV set has %d of %d bytes", len(s.body), cap(s.body))
	}
}

// The table doubles when it has as many names as places, and not before: chains stay short.
func TestTableSize(t *testing.T) {
	ix := newIndex()
	places := func(when string, want int) {
		t.Helper()
		if have := len(*ix.table.Load()); have != want {
			t.Errorf("%s: %d places, want %d", when, have, want)
		}
	}
	for i := range firstTableSize {
		ix.set(fmt.Sprint(i), &records{})
	}
	places("full", firstTableSize)
	ix.remove("0")
	ix.remove("no such name")
	ix.set("1", &records{})
	ix.set("again", &records{})
	places("full again", firstTableSize)
	ix.set("one more", &records{})
	places("one more", 2*firstTableSize)

	before := ix.table.Load()
	ix.reserve(2 * firstTableSize)
	if ix.table.Load() != before {
		t.Error("room that is there was made again")
	}
	ix.reserve(2*firstTableSize + 1)
	places("one more reserved", 4*firstTableSize)
	n := 0
	ix.each(func(string, *records) { n++ })
	if n != firstTableSize+1 || ix.get("again") == nil || ix.find([]byte("one more")) == nil || ix.get("0") != nil {
		t.Errorf("%d names, want %d", n, firstTableSize+1)
	}

	// Release makes room at once for as many names as the endpoints can have.
	z := edgeZone(t, "cluster.local")
	z.Hold()
	z.SetService(edgeService("prod", "web", "None"))
	var eps []string
	for i := range 200 {
		eps = append(eps, fmt.Sprintf("10.1.0.%d=same", i))
	}
	z.SetSlice(edgeSlice("web", "web", "http", eps...))
	z.Release()
	ix = z.names
	places("after Release", 2*firstTableSize)
}

// A port of a slice without endpoints has no name; one with endpoints has.
func TestPortsWithoutEndpoints(t *testing.T) {
	z := edgeZone(t, "cluster.local")
	z.SetService(edgeService("prod", "web", "None"))
	z.SetSlice(edgeSlice("web", "web-1", "http", "10.1.0.1"))
	z.SetSlice(edgeSlice("web", "web-2", "metrics"))
	for port, rcode := range map[string]uint8{"_http": RcodeSuccess, "_metrics": RcodeNXDomain} {
		if _, _, r := put(t, z, port+"._tcp.web.prod.svc.cluster.local", typeSRV, false, 512); r.Rcode != rcode {
			t.Errorf("%s: %+v", port, r)
		}
	}
}

// Pods of the host network share an address: it is there until the last has gone.
func TestSharedPodAddress(t *testing.T) {
	var p podIndex
	a := netip.MustParseAddr("192.0.2.1")
	one, two := svc.Name{Namespace: "prod", Name: "one"}, svc.Name{Namespace: "prod", Name: "two"}
	p.set(one, []netip.Addr{a})
	p.set(two, []netip.Addr{a})
	p.set(one, nil)
	if !p.has("prod", a) {
		t.Error("the address went with the first pod")
	}
	p.set(two, nil)
	if p.has("prod", a) || len(p.count) != 0 || len(p.pods) != 0 {
		t.Errorf("left behind: %v %v", p.count, p.pods)
	}
}

// Dump has every record once, below the first cluster domain, and names without one.
func TestDump(t *testing.T) {
	z := edgeZone(t, "cluster.local", "example.com")
	z.SetService(edgeService("prod", "web", "10.96.0.1", "fd00::1"))
	z.SetService(edgeExternal("out", "www.example.com"))
	want := `_dns._udp.web.prod.svc.cluster.local.	5	IN	SRV	0 50 53 web.prod.svc.cluster.local.
1.0.96.10.in-addr.arpa.	5	IN	PTR	web.prod.svc.cluster.local.
web.prod.svc.cluster.local.	5	IN	A	10.96.0.1
web.prod.svc.cluster.local.	5	IN	AAAA	fd00::1
out.prod.svc.cluster.local.	5	IN	CNAME	www.example.com.
dns-version.cluster.local.	28800	IN	TXT	"1.1.0"
_udp.web.prod.svc.cluster.local.
ns.dns.cluster.local.`
	got := "\n" + z.Dump()
	for line := range strings.SplitSeq(want, "\n") {
		if strings.Count(got, "\n"+line+"\n") != 1 {
			t.Errorf("not there once: %s", line)
		}
	}
	if t.Failed() || strings.Contains(got, "svc.example.com") {
		t.Errorf("dump:%s", got)
	}
}
