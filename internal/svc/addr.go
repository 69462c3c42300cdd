package svc

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// FamilyOf returns the family of a valid address. An IPv4-mapped IPv6 address
// counts as IPv4; callers keep addresses unmapped.
func FamilyOf(a netip.Addr) Family {
	if a.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// Frontend is a destination that clients send to: a virtual IP, a protocol and
// a port. Its text form is "TCP 10.96.0.10:53" or "UDP [fd00::a]:53".
type Frontend struct {
	Protocol Protocol
	Addr     netip.AddrPort
}

// String returns the text form.
func (f Frontend) String() string { return f.Protocol.String() + " " + f.Addr.String() }

// Compare orders frontends by address, port, then protocol.
func (f Frontend) Compare(o Frontend) int {
	if c := f.Addr.Compare(o.Addr); c != 0 {
		return c
	}
	return cmp.Compare(f.Protocol, o.Protocol)
}

// PortRange is an inclusive range of port numbers. Its text form is
// "30000-32767", the form of --service-node-port-range.
type PortRange struct {
	First, Last uint16
}

// Size is the number of ports in the range.
func (r PortRange) Size() int { return int(r.Last) - int(r.First) + 1 }

// Contains reports whether p lies in the range.
func (r PortRange) Contains(p uint16) bool { return r.First <= p && p <= r.Last }

// String returns "first-last".
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// ParsePortRange reads "first-last" or "first+count"; both ends must be 1 to
// 65535.
func ParsePortRange(s string) (PortRange, error) {
	wrong := fmt.Errorf("%q is not a port range: want FIRST-LAST or FIRST+COUNT within 1 and 65535, for example 30000-32767", s)
	first, rest, dash := strings.Cut(s, "-")
	if !dash {
		var plus bool
		if first, rest, plus = strings.Cut(s, "+"); !plus {
			return PortRange{}, wrong
		}
	}
	lo, err1 := strconv.ParseUint(strings.TrimSpace(first), 10, 16)
	hi, err2 := strconv.ParseUint(strings.TrimSpace(rest), 10, 16)
	if !dash {
		hi += lo
	}
	if err1 != nil || err2 != nil || lo == 0 || hi < lo || hi > 65535 {
		return PortRange{}, wrong
	}
	return PortRange{First: uint16(lo), Last: uint16(hi)}, nil
}
