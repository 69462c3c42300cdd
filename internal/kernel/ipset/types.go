package ipset

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Type is what the elements of a set are.
type Type string

// The types that this package supports.
const (
	HashIP        Type = "hash:ip"
	HashNet       Type = "hash:net"
	HashIPPort    Type = "hash:ip,port"
	HashIPPortIP  Type = "hash:ip,port,ip"
	HashIPPortNet Type = "hash:ip,port,net"
)

// Set is a set. Its name has at most 31 letters.
type Set struct {
	Name   string
	Type   Type
	Family svc.Family
	// Marks is set if elements carry packet marks (ipset's skbinfo), Counters
	// that they count the packets that rules find in them.
	Marks, Counters bool
	// Timeout is for how long elements stay, in whole seconds; 0 means forever.
	Timeout time.Duration
	// Size bounds the number of elements; 0 stands for four million.
	Size uint32
}

// Count is an element of a set with Counters.
type Count struct {
	Element
	Packets uint64
	// Left is the time that the element stays, if the set has a Timeout.
	Left time.Duration
}

// Element is an element; which fields count depends on the set's type. It is
// comparable.
type Element struct {
	// IP is the first part. A hash:net has only Net.
	IP    netip.Addr
	Proto svc.Protocol
	Port  uint16
	// IP2 is the last part of hash:ip,port,ip, Net that of hash:ip,port,net. The
	// kernel has no element for all addresses (/0): see Halves.
	IP2 netip.Addr
	Net netip.Prefix
	// Mark is what a set with Marks gives to packets, as a whole.
	Mark uint32
}

// Halves splits the prefix of all addresses, which no set can have, into two.
func Halves(p netip.Prefix) []netip.Prefix {
	if p.Bits() > 0 {
		return []netip.Prefix{p.Masked()}
	}
	high := p.Addr().AsSlice()
	clear(high)
	low, _ := netip.AddrFromSlice(high)
	high[0] = 0x80
	up, _ := netip.AddrFromSlice(high)
	return []netip.Prefix{netip.PrefixFrom(low, 1), netip.PrefixFrom(up, 1)}
}

// String returns the form of ipset(8): "10.96.0.10,tcp:80,10.244.1.0/24".
func (e Element) String() string {
	var parts []string
	if e.IP.IsValid() {
		parts = append(parts, e.IP.String())
	}
	if e.Proto != 0 {
		parts = append(parts, strings.ToLower(e.Proto.String())+":"+strconv.Itoa(int(e.Port)))
	}
	if e.IP2.IsValid() {
		parts = append(parts, e.IP2.String())
	}
	if e.Net.IsValid() {
		parts = append(parts, e.Net.String())
	}
	s := strings.Join(parts, ",")
	if e.Mark != 0 {
		s += fmt.Sprintf(" skbmark %#x", e.Mark)
	}
	return s
}
