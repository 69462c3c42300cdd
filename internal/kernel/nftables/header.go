package nftables

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Header says where packets of a family have what rules look at.
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

// HeaderOf is the Header of packets of family f.
func HeaderOf(f svc.Family) Header {
	h := Header{family: FamilyOf(f), Addr: TypeIPv4, Len: 4, Source: 12, Destination: 16, ICMP: unix.IPPROTO_ICMP}
	if f == svc.IPv6 {
		h.Addr, h.Len, h.Source, h.Destination, h.ICMP = TypeIPv6, 16, 8, 24, unix.IPPROTO_ICMPV6
	}
	h.Word = h.family.String()
	return h
}

// Regs is how many registers an address fills.
func (h *Header) Regs() Reg { return Reg(h.Len / 4) }

// Frontend begins a rule by loading where the packet is sent to, address,
// protocol and port, into the registers from 0 on. FrontendText says so.
func (h *Header) Frontend() *Program {
	a := h.Regs()
	return new(Program).Network(0, h.Destination, h.Len).Meta(a, MetaL4Proto).DestinationPort(a + 1)
}

// FrontendText is what Frontend loads, as nft(8) writes it.
func (h *Header) FrontendText() string { return h.Word + " daddr . meta l4proto . th dport" }

// InPrefix begins a rule for packets whose address at an offset of the header
// lies in p.
func (h *Header) InPrefix(offset uint32, p netip.Prefix) *Program {
	prog := new(Program).Network(0, offset, h.Len)
	if !p.IsSingleIP() {
		prog.Mask(0, PrefixMask(p), make([]byte, h.Len))
	}
	return prog.Equal(0, p.Masked().Addr().AsSlice())
}

// Refusal are the rules that answer that there is nobody. Unlike iptables,
// nf_tables takes reject in a NAT chain, since Linux 5.9 in prerouting too; so no
// other hook has to look at each packet for the sake of those that are refused.
func (h *Header) Refusal() []Rule {
	return []Rule{
		NewRule(new(Program).Meta(0, MetaL4Proto).Equal(0, []byte{unix.IPPROTO_TCP}).RejectTCP(), "meta l4proto tcp reject with tcp reset"),
		NewRule(new(Program).RejectPort(h.family), "reject"),
	}
}

// NewRule is the rule with a program, and with its text.
func NewRule(p *Program, text string, args ...any) Rule {
	return Rule{Text: fmt.Sprintf(text, args...), Exprs: p.Bytes()}
}
