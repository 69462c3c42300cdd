package nftables

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Header is the layout of a family's packets, as rules look at them.
type Header struct {
	family Family
	// Word is the family's word in nft(8), "ip" or "ip6".
	Word string
	// Addr is the type of an address, Len how many bytes it has.
	Addr Type
	Len  uint32
	// Source and Destination are the offsets of the addresses, in bytes.
	Source, Destination uint32
	// ICMP is the number of the family's protocol of that name.
	ICMP byte
}

// HeaderOf returns the Header of packets of family f.
func HeaderOf(f svc.Family) Header {
	h := Header{family: FamilyOf(f), Addr: TypeIPv4, Len: 4, Source: 12, Destination: 16, ICMP: unix.IPPROTO_ICMP}
	if f == svc.IPv6 {
		h.Addr, h.Len, h.Source, h.Destination, h.ICMP = TypeIPv6, 16, 8, 24, unix.IPPROTO_ICMPV6
	}
	h.Word = h.family.String()
	return h
}

// Regs returns how many registers an address fills.
func (h *Header) Regs() Reg { return Reg(h.Len / 4) }

// Frontend begins a rule by loading the packet's destination (address, protocol,
// port) into the registers from 0 on. FrontendText is its text.
func (h *Header) Frontend() *Program {
	a := h.Regs()
	return new(Program).Network(0, h.Destination, h.Len).Meta(a, MetaL4Proto).Port(a+1, Destination)
}

// FrontendText returns what Frontend loads, as nft(8) writes it.
func (h *Header) FrontendText() string { return h.Word + " daddr . meta l4proto . th dport" }

// InPrefix begins a rule for packets whose address at an offset of the header
// lies in p.
func (h *Header) InPrefix(offset uint32, p netip.Prefix) *Program {
	return h.inPrefix(new(Program), offset, p)
}

// InetPrefix is InPrefix for tables of family Inet.
func (h *Header) InetPrefix(offset uint32, p netip.Prefix) *Program {
	return h.inPrefix(new(Program).Meta(0, MetaNFProto).Equal(0, []byte{byte(h.family)}), offset, p)
}

func (h *Header) inPrefix(prog *Program, offset uint32, p netip.Prefix) *Program {
	prog.Network(0, offset, h.Len)
	if !p.IsSingleIP() {
		prog.Mask(0, PrefixMask(p), make([]byte, h.Len))
	}
	return prog.Equal(0, p.Masked().Addr().AsSlice())
}

// Refusal returns the rules that reject a connection. Unlike iptables, nf_tables
// has reject in NAT chains, since Linux 5.9 in prerouting too; so no other hook has
// to look at each packet for the sake of the rejected ones.
func (h *Header) Refusal() []Rule {
	return []Rule{
		NewRule(new(Program).Meta(0, MetaL4Proto).Equal(0, []byte{unix.IPPROTO_TCP}).Reject(ResetTCP()),
			"meta l4proto tcp reject with tcp reset"),
		NewRule(new(Program).Reject(PortUnreachable(h.family)), "reject"),
	}
}

// NewRule returns the rule of a program, with its text.
func NewRule(p *Program, text string, args ...any) Rule {
	return Rule{Text: fmt.Sprintf(text, args...), Exprs: p.Bytes()}
}
