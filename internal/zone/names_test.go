package zone

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// Names of 255 octets are names, at any place in a message; longer ones are not.
func TestNameLengths(t *testing.T) {
	l63 := strings.Repeat("a", 63)
	for length, ok := range map[int]bool{254: true, 255: true, 256: false, 257: false, 300: false} {
		// Three labels take 192 bytes, the root one, the last label one and its text.
		text := strings.Join([]string{l63, l63, l63, strings.Repeat("b", min(length-194, 63))}, ".")
		if length-194 > 63 {
			text += "." + strings.Repeat("c", length-194-64)
		}
		var n Name
		err := n.ParseText(text)
		if ok && (err != nil || len(n.Wire()) != length || n.String() != text+".") || !ok && (err == nil ||
			err.Error() != "a domain name has at most 255 bytes") {
			t.Errorf("text of %d bytes: %v", length, err)
		}
		var wire []byte
		for label := range strings.SplitSeq(text, ".") {
			wire = append(append(wire, byte(len(label))), label...)
		}
		for _, off := range []int{0, 12, 300} {
			msg := append(append(make([]byte, off), wire...), 0, 9)
			end, got := n.ParseWire(msg, off)
			if got != ok || ok && (end != off+length || n.Labels() != strings.Count(text, ".")+1 || !bytes.Equal(n.Wire(), msg[off:end])) {
				t.Errorf("%d bytes at offset %d: end %d, %v", length, off, end, got)
			}
			if _, got := n.ParseWire(msg[:len(msg)-2], off); got {
				t.Errorf("a name without its end, of %d bytes at offset %d, is accepted", length-1, off)
			}
		}
	}
	for _, off := range []int{1, 2, 100} {
		if _, ok := new(Name).ParseWire([]byte{0}, off); ok {
			t.Errorf("a name at offset %d of one byte is accepted", off)
		}
	}
	for _, c := range []struct {
		name, suffix string
		want         bool
	}{
		{"a.b.c", ".", true}, {".", ".", true}, {"a.b.c", "c", true}, {"a.b.c", "a.b.c", true}, {"a.b.c", "a.b", false},
		{"b.c", "a.b.c", false}, {"ab.c", "b.c", false}, {"x.b.c", "b.d", false},
	} {
		s := parsed(t, c.suffix)
		if got := parsed(t, c.name).HasSuffix(s.Wire(), s.Labels()); got != c.want {
			t.Errorf("%s below %s: %v", c.name, c.suffix, got)
		}
	}
}

// Which bytes are letters, which are escaped, and what can be a label.
func TestNameBytes(t *testing.T) {
	const in = "@AZ[`az{ !~\x7f\xc1\xda\x00."
	const want = "@az[`az{ !~\x7f\xc1\xda\x00."
	for pad := range 17 {
		src := []byte(strings.Repeat("Q", pad) + in)
		dst := make([]byte, len(src)+7)
		lower(dst, src)
		if got := string(dst[:len(src)]); got != strings.Repeat("q", pad)+want {
			t.Errorf("behind %d letters: %q", pad, got)
		}
	}
	for i := range len(in) { // in the loop of single bytes too
		dst := make([]byte, 8)
		if lower(dst, []byte(in[i:i+1])); dst[0] != want[i] {
			t.Errorf("%q became %q", in[i], dst[0])
		}
	}
	if w, ok := appendLabel([]byte("x"), in); !ok || string(w) != "x"+string(rune(len(in)))+want {
		t.Errorf("label %q, %v", w, ok)
	}
	if got := wireText([]byte("\x06 !~\x7f.\\")); got != `\032!~\127\.\\.` {
		t.Errorf("text %s", got)
	}
	for n, ok := range map[int]bool{0: false, 1: true, 63: true, 64: false} {
		if w, got := appendLabel(nil, strings.Repeat("a", n)); got != ok || ok && len(w) != n+1 {
			t.Errorf("label of %d bytes: %d bytes, %v", n, len(w), got)
		}
	}
	for text, want := range map[string]bool{"0": true, "9": true, "0123456789": true, "1/": false, "1:": false, "a1": false, "1a": false} {
		if got := allDigits([]byte(text)); got != want {
			t.Errorf("%s is all digits: %v", text, got)
		}
	}
}

// A name of the zone has at most 255 octets in the longest of the cluster domains.
func TestLongestKeys(t *testing.T) {
	for _, domains := range [][]string{{"cluster.local", "d"}, {"d", "cluster.local"}} {
		z := edgeZone(t, domains...)
		const domain = len("\x07cluster\x05local\x00")
		for _, label := range []string{"a", strings.Repeat("a", 63)} {
			fits := strings.Repeat("x", maxName-domain-1-len(label))
			for base, want := range map[string]bool{fits: true, fits + "x": false, "": true, "\x01b": true, fits[:100]: true} {
				key, ok := below(label, base, z.longestDomain)
				if ok != want || ok && key != string(rune(len(label)))+label+base {
					t.Errorf("%s below %d bytes: %v, %d bytes", label, len(base), ok, len(key))
				}
			}
		}
		a := netip.MustParseAddr("10.1.0.1")
		const dashed = "\x0810-1-0-1"
		l63 := strings.Repeat("h", 63)
		for _, c := range []struct{ hostname, want string }{
			{"", dashed}, {"h", "\x01h"}, {l63, "?" + l63}, {l63 + "h", dashed}, {"h.i", dashed},
		} {
			fits := strings.Repeat("x", maxName-domain-len(c.want))
			for base, want := range map[string]string{"": c.want, fits: c.want + fits, fits + "x": ""} {
				if got := hostKey(a, c.hostname, base, z.longestDomain); got != want {
					t.Errorf("%q below %d bytes: %q", c.hostname, len(base), got)
				}
			}
		}
	}
	// A namespace may be much longer than the Service's name.
	ns := strings.Repeat("n", 63)
	if key, ok := serviceKey(svc.Name{Namespace: ns, Name: "a"}); !ok || key != "\x01a?"+ns+"\x03svc" {
		t.Errorf("key %q, %v", key, ok)
	}
}

// Reverse names with fewer and with more labels than an address has.
func TestReverseNames(t *testing.T) {
	nibbles := func(n int) string { return strings.Repeat("f.", n) + "ip6.arpa" }
	for _, c := range []struct {
		name         string
		ok           bool
		addr         string
		bits         int
		whole, clean bool
	}{
		{".", false, "", 0, false, false},
		{"arpa", false, "", 0, false, false},
		{"in-addr.local", false, "", 0, false, false},
		{"home.arpa", false, "", 0, false, false},
		{"in-addr.arpa", true, "0.0.0.0", 0, false, true},
		{"255.in-addr.arpa", true, "255.0.0.0", 8, false, true},
		{"256.in-addr.arpa", true, "0.0.0.0", 0, false, false},
		{"1.2.3.in-addr.arpa", true, "3.2.1.0", 24, false, true},
		{"1.2.3.4.in-addr.arpa", true, "4.3.2.1", 32, true, true},
		{"0.2.3.4.in-addr.arpa", true, "4.3.2.0", 32, true, true},
		{"01.2.3.4.in-addr.arpa", true, "4.3.2.0", 24, false, false},
		{"0001.2.3.4.in-addr.arpa", true, "4.3.2.0", 24, false, false},
		{"1:.9.3.4.in-addr.arpa", true, "4.3.9.0", 24, false, false},
		{"1/.9.3.4.in-addr.arpa", true, "4.3.9.0", 24, false, false},
		{"1.2.3.4.5.in-addr.arpa", true, "5.4.3.2", 32, false, false},
		{"ip6.arpa", true, "::", 0, false, true},
		{"0.9.a.f.ip6.arpa", true, "fa90::", 16, false, true},
		{"/.f.ip6.arpa", true, "f000::", 4, false, false},
		{":.f.ip6.arpa", true, "f000::", 4, false, false},
		{"g.f.ip6.arpa", true, "f000::", 4, false, false},
		{"`.f.ip6.arpa", true, "f000::", 4, false, false},
		{"11.f.ip6.arpa", true, "f000::", 4, false, false},
		{nibbles(31), true, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0", 124, false, true},
		{nibbles(32), true, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 128, true, true},
		{nibbles(33), true, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 128, false, false},
	} {
		r, ok := parseReverse(parsed(t, c.name))
		if ok != c.ok || ok && (r.addr.String() != c.addr || r.bits != c.bits || r.whole != c.whole || r.clean != c.clean) {
			t.Errorf("%s: %+v, %v, want %+v", c.name, r, ok, c)
		}
	}
}

// A name is in the most specific of the cluster domains, in whatever order they are given.
func TestDomainsBelowOneAnother(t *testing.T) {
	all := []string{"cluster.local", "a.cluster.local", "b.a.cluster.local", "example.com"}
	for turn := range len(all) {
		for _, swap := range []bool{false, true} {
			domains := append(append([]string(nil), all[turn:]...), all[:turn]...)
			if swap {
				domains[1], domains[2] = domains[2], domains[1]
			}
			z := edgeZone(t, domains...)
			z.SetService(edgeService("prod", "dns", "10.96.0.10"))
			for _, d := range all {
				if i := (answering{Zone: z}).domainOf(parsed(t, "x."+d)); i < 0 || wireText(z.domains[i].wire) != d+"." {
					t.Errorf("%v: a name in %s is in domain %d", domains, d, i)
				}
				out, n, r := put(t, z, "dns.prod.svc."+d, typeSRV, false, 512)
				if r.Answers != 1 || wireText(out[n+18:]) != "dns.prod.svc."+d+"." {
					t.Errorf("%v: %s: %+v", domains, d, r)
				}
			}
			if i := (answering{Zone: z}).domainOf(parsed(t, "local")); i != -1 {
				t.Errorf("%v: local is in domain %d", domains, i)
			}
		}
	}
}

// No upstream is asked for a name whose last label is a number.
func TestNumberedNames(t *testing.T) {
	z := edgeZone(t, "cluster.local")
	z.SetNamespace("prod")
	for target, kind := range map[string]Kind{"10.1.2.3": Answered, "web.example.3": Answered, "3.example.com": Elsewhere} {
		z.SetService(edgeExternal("ext", target))
		_, _, r := put(t, z, "ext.prod.svc.cluster.local", typeA, false, 512)
		if r.Kind != kind || (r.Rcode == RcodeNXDomain) != (kind == Answered) {
			t.Errorf("ExternalName %s: %+v", target, r)
		}
		if kind == Elsewhere {
			kind = Searched
		}
		out, _, r := put(t, z, target+".prod.svc.cluster.local", typeA, true, 512)
		if r.Kind != kind || (r.Rcode == RcodeNXDomain) != (kind == Answered) {
			t.Errorf("search of %s: %+v", target, r)
		}
		if kind == Answered { // nothing of the attempt is left
			plain, _, want := put(t, z, target+".prod.svc.cluster.local", typeA, false, 512)
			if !bytes.Equal(out, plain) || r != want {
				t.Errorf("search of %s: %+v %x, without search %+v %x", target, r, out, want, plain)
			}
		}
	}
}

// A search ends at a name of the zone with addresses or a CNAME; one that has neither is not found.
func TestSearchedNames(t *testing.T) {
	z := edgeZone(t, "cluster.local")
	z.SetNamespace("other")
	z.SetService(edgeService("prod", "four", "10.96.0.1"))
	z.SetService(edgeService("prod", "six", "fd00::1"))
	z.SetService(edgeExternal("out", "www.example.com"))
	z.SetService(edgeService("prod", "web", "None"))
	z.SetSlice(edgeSlice("web", "web", "http", "10.1.0.1=one", "fd00::2=two"))
	for _, c := range []struct {
		name    string
		target  string // outside of the zone
		kind    Kind
		answers uint16
	}{
		{"four.prod", "", Answered, 2},
		{"four.prod.svc", "", Answered, 2},
		{"six.prod", "", Answered, 1},
		{"one.web.prod", "", Answered, 2},
		{"two.web.prod", "", Answered, 1},
		{"out.prod", "www.example.com.", Elsewhere, 2},
		{"_udp.four.prod", "_udp.four.prod.", Searched, 1},
		{"_dns._udp.four.prod", "_dns._udp.four.prod.", Searched, 1},
		{"_tcp.web.prod.svc", "_tcp.web.prod.svc.", Searched, 1},
	} {
		_, _, r := put(t, z, c.name+".other.svc.cluster.local", typeA, true, 512)
		target := ""
		if r.Target != nil {
			target = r.Target.String()
		}
		if r.Kind != c.kind || target != c.target || r.Answers != c.answers || r.Rcode != RcodeSuccess || !r.BySearch {
			t.Errorf("%s: %+v with target %q, want %+v", c.name, r, target, c)
		}
	}
}
