package nflog

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// packet returns an IP packet with the first bytes of a transport's header.
func packet(from, to string, p svc.Protocol, transport ...byte) []byte {
	src, dst := netip.MustParseAddr(from), netip.MustParseAddr(to)
	head := make([]byte, 20)
	head[0], head[9] = 0x45, byte(p)
	copy(head[12:], src.AsSlice())
	if src.Is4() {
		copy(head[16:], dst.AsSlice())
	} else {
		head = make([]byte, 40)
		head[0], head[6] = 0x60, byte(p)
		copy(head[8:], src.AsSlice())
		copy(head[24:], dst.AsSlice())
	}
	return append(head, transport...)
}

// tcp is the header of a TCP segment from port 40000 to port 80, with flags.
func tcp(flags byte) []byte {
	return []byte{0x9c, 0x40, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0}
}

func TestParse(t *testing.T) {
	ap := netip.MustParseAddrPort
	options := packet("192.0.2.1", "10.96.0.1", svc.TCP, append([]byte{1, 1, 1, 1}, tcp(0x02)...)...)
	options[0] = 0x46
	fragment := packet("192.0.2.1", "10.96.0.1", svc.UDP, 0x9c, 0x40, 0, 53)
	fragment[7] = 1
	for _, c := range []struct {
		name string
		head []byte
		want Packet // zero if it is none
	}{
		{"IPv4", packet("192.0.2.1", "10.96.0.1", svc.TCP, tcp(0x02)...), Packet{svc.TCP, ap("192.0.2.1:40000"), ap("10.96.0.1:80"), true}},
		{"options", options, Packet{svc.TCP, ap("192.0.2.1:40000"), ap("10.96.0.1:80"), true}},
		{"not a first segment", packet("192.0.2.1", "10.96.0.1", svc.TCP, tcp(0x12)...),
			Packet{svc.TCP, ap("192.0.2.1:40000"), ap("10.96.0.1:80"), false}},
		{"IPv6", packet("2001:db8::1", "fd00::1", svc.UDP, 0x9c, 0x40, 0, 53),
			Packet{svc.UDP, ap("[2001:db8::1]:40000"), ap("[fd00::1]:53"), false}},
		{"SCTP over IPv6", packet("2001:db8::1", "fd00::1", svc.SCTP, 0x9c, 0x40, 0, 80),
			Packet{svc.SCTP, ap("[2001:db8::1]:40000"), ap("[fd00::1]:80"), false}},
		{"TCP without flags", packet("2001:db8::1", "fd00::1", svc.TCP, tcp(0x02)[:13]...),
			Packet{svc.TCP, ap("[2001:db8::1]:40000"), ap("[fd00::1]:80"), false}},
		{"nothing", nil, Packet{}},
		{"short IPv4", packet("192.0.2.1", "10.96.0.1", svc.TCP)[:19], Packet{}},
		{"short options", options[:22], Packet{}},
		{"header length below the least", append([]byte{0x44}, options[1:]...), Packet{}},
		{"short IPv6", packet("2001:db8::1", "fd00::1", svc.UDP)[:39], Packet{}},
		{"no ports", packet("2001:db8::1", "fd00::1", svc.UDP, 0x9c, 0x40, 0), Packet{}},
		{"extension header", packet("2001:db8::1", "fd00::1", 44, tcp(0x02)...), Packet{}},
		{"later fragment", fragment, Packet{}},
		{"another protocol", packet("192.0.2.1", "10.96.0.1", 1, 8, 0, 0, 0), Packet{}},
		{"another version", append([]byte{0x75}, options[1:]...), Packet{}},
	} {
		var got Packet
		if ok := got.parse(c.head); ok != (c.want != Packet{}) || ok && got != c.want {
			t.Errorf("%s: %t, %+v; want %+v", c.name, ok, got, c.want)
		}
	}
}

// Whatever a packet has, its parts are read or it is none.
func FuzzParse(f *testing.F) {
	f.Add(packet("192.0.2.1", "10.96.0.1", svc.TCP, tcp(0x02)...))
	f.Add(packet("2001:db8::1", "fd00::1", svc.UDP, 0x9c, 0x40, 0, 53))
	f.Fuzz(func(t *testing.T, head []byte) {
		before := bytes.Clone(head)
		var p Packet
		if ok := p.parse(head); ok && (!p.Source.IsValid() || !p.Destination.IsValid()) || !bytes.Equal(before, head) {
			t.Errorf("%x: %+v", before, p)
		}
	})
}
