package nftables

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Family is the protocol family of a table.
type Family uint8

// The families of tables.
const (
	IPv4 Family = unix.NFPROTO_IPV4
	IPv6 Family = unix.NFPROTO_IPV6
	// Inet tables see packets of both.
	Inet Family = unix.NFPROTO_INET
)

// FamilyOf returns the table family for packets of family f.
func FamilyOf(f svc.Family) Family {
	if f == svc.IPv6 {
		return IPv6
	}
	return IPv4
}

// String returns the family's word in nft(8): "ip", "ip6" or "inet".
func (f Family) String() string {
	switch f {
	case IPv4:
		return "ip"
	case IPv6:
		return "ip6"
	case Inet:
		return "inet"
	}
	return fmt.Sprintf("family(%d)", uint8(f))
}

// Table names a table.
type Table struct {
	Family Family
	Name   string
}

// String returns the table's name in nft(8), such as "ip fairlead".
func (t Table) String() string { return t.Family.String() + " " + t.Name }

// Hook makes a chain a base chain.
type Hook struct {
	// Type is "nat" or "filter".
	Type     string
	Number   uint32
	Priority int32
}

// Is reports whether both are the same place; nil is no hook.
func (h *Hook) Is(o *Hook) bool {
	if h == nil || o == nil {
		return h == o
	}
	return *h == *o
}

// The places of base chains (enum nf_inet_hooks).
const (
	Prerouting  = unix.NF_INET_PRE_ROUTING
	Input       = unix.NF_INET_LOCAL_IN
	Forward     = unix.NF_INET_FORWARD
	Output      = unix.NF_INET_LOCAL_OUT
	Postrouting = unix.NF_INET_POST_ROUTING
)

// The usual priorities of base chains (enum nf_ip_hook_priorities). Connection
// tracking has -200.
const (
	PriorityFirst  = math.MinInt32
	PriorityLast   = math.MaxInt32
	PriorityRaw    = -300
	PriorityDstNAT = -100
	PrioritySrcNAT = 100
)

// Chain is a chain of a table. Base chains accept what falls off their end.
type Chain struct {
	Name string
	Hook *Hook
	// Drops reports the policy of a base chain of another program; AddChain's is to accept.
	Drops bool
}

// Rule is one rule.
type Rule struct {
	// Text is the rule as a person reads it, at most 230 bytes of it are kept.
	// It is stored beside the rule and comes back in a dump.
	Text string
	// Comment shows the text in nft(8) too, as the rule's comment.
	Comment bool
	// Exprs are the encoded expressions, see Program.
	Exprs []byte
}

// Type is a data type by its number in nft(8)'s datatype.h, which prints
// values by it.
type Type uint32

// The data types in use.
const (
	TypeVerdict Type = 1
	TypeNFProto Type = 2
	TypeIPv4    Type = 7
	TypeIPv6    Type = 8
	TypeProto   Type = 12
	TypePort    Type = 13
	TypeMark    Type = 19
	// TypeDevice is the name of a network device (TYPE_IFNAME), see DeviceKey.
	TypeDevice Type = 41
)

func (t Type) size() int {
	switch t {
	case TypeIPv4, TypeMark:
		return 4
	case TypeIPv6, TypeVerdict, TypeDevice:
		return 16
	case TypePort:
		return 2
	}
	return 1
}

// Set is a set, or a map if it has Data.
type Set struct {
	Name string
	// Key and Data are concatenations of types.
	Key, Data []Type
	// Dynamic sets are filled by packets; their elements may time out.
	Dynamic bool
	// Interval sets have ranges: an element for the first value of each, and one with End for the value after its last.
	Interval bool
	// Size bounds the number of elements; 0 is no bound.
	Size    uint32
	Comment string
}

// width is the size of a concatenation: every part but a lone one fills whole
// 32-bit registers.
func width(ts []Type) int {
	if len(ts) == 1 {
		return ts[0].size()
	}
	n := 0
	for _, t := range ts {
		n += (t.size() + 3) &^ 3
	}
	return n
}

// number is the type of a concatenation: nft(8) has 6 bits for each part.
func number(ts []Type) uint32 {
	n := uint32(0)
	for _, t := range ts {
		n = n<<6 | uint32(t)
	}
	return n
}

// Elem is an element of a set or map.
type Elem struct {
	Key  []byte
	Data []byte
	// End ends a range of an Interval set.
	End bool
	// Goto is the chain a verdict map sends packets to, instead of Data.
	Goto string
	// Comment is printed by nft(8), at most 230 bytes.
	Comment string
	// Timeout removes an element of a dynamic set, in milliseconds; 0 is never.
	Timeout uint64
	// Packets is what the element's counter has, if it has one. It is read only.
	Packets uint64
}
