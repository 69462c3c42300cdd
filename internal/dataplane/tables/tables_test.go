package tables

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
)

func TestKeyBytes(t *testing.T) {
	for _, c := range []struct {
		k    dataplane.FrontKey
		f    svc.Family
		want string
	}{
		{dataplane.FrontKey{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Proto: svc.TCP}, svc.IPv4,
			"\x0a\x60\x00\x0a\x06\x00\x00\x00\x00\x50\x00\x00"},
		{dataplane.FrontKey{Addr: netip.MustParseAddr("fd00::a"), Port: 53, Proto: svc.UDP}, svc.IPv6,
			"\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x0a\x11\x00\x00\x00\x00\x35\x00\x00"},
		{dataplane.FrontKey{Node: true, Port: 30080, Proto: svc.SCTP}, svc.IPv6, "\x84\x00\x00\x00\x75\x80\x00\x00"},
	} {
		b := AppendKey([]byte("before"), c.k)
		if string(b) != "before"+c.want {
			t.Errorf("%s is %x, want %x", c.k, b[6:], c.want)
		}
		k, rest, ok := ParseKey(append(b[6:], "rest"...), c.f, c.k.Node)
		if k != c.k || string(rest) != "rest" || !ok {
			t.Errorf("%x is %s, %q, %t, want %s", b[6:], k, rest, ok, c.k)
		}
	}
}

// What the kernel sends is foreign: whatever it is, it is a key or it is not.
func FuzzParseKey(f *testing.F) {
	f.Add([]byte("\x0a\x60\x00\x0a\x06\x00\x00\x00\x00\x50\x00\x00"), false, false)
	f.Add([]byte("\x84\x00\x00\x00\x75\x80\x00\x00"), true, true)
	f.Fuzz(func(t *testing.T, b []byte, six, node bool) {
		family := svc.IPv4
		if six {
			family = svc.IPv6
		}
		k, rest, ok := ParseKey(b, family, node)
		if ok && (len(AppendKey(nil, k))+len(rest) != len(b) || k.Node != node) {
			t.Errorf("%x is %s and %x", b, k, rest)
		}
	})
}
