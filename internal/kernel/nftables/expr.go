package nftables

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Reg is one of the sixteen 32-bit registers, 0 to 15. Values of more than
// four bytes lie in consecutive ones.
type Reg uint8

func (r Reg) number() uint32 { return uint32(r) + 8 } // NFT_REG32_00

// Program is the expressions of a rule in the making. Its methods append one
// each; names of the kernel's expressions are in their comments.
type Program struct{ enc expressions }

// expressions encodes one expression after the other.
type expressions struct {
	netlink.Encoder
	elem, data int // where the open expression and its data begin
}

// Bytes is the encoded program, for Rule.Exprs.
func (p *Program) Bytes() []byte { return p.enc.Buf }

func (e *expressions) begin(name string) {
	e.elem = e.Nest(unix.NFTA_LIST_ELEM)
	e.String(unix.NFTA_EXPR_NAME, name)
	e.data = e.Nest(unix.NFTA_EXPR_DATA)
}

func (e *expressions) end() {
	e.Close(e.data)
	e.Close(e.elem)
}

// Network loads n bytes at an offset of the IP header (payload).
func (p *Program) Network(to Reg, offset, n uint32) *Program {
	return payload(p, to, unix.NFT_PAYLOAD_NETWORK_HEADER, offset, n)
}

// End is one of the two ends of a packet's way.
type End uint8

// The ends.
const (
	Source End = iota
	Destination
)

// Port loads "th sport" or "th dport" (payload), which are at the same places in
// TCP, UDP and SCTP.
func (p *Program) Port(to Reg, of End) *Program {
	return payload(p, to, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2*uint32(of), 2)
}

// The bits of TCPFlags.
const (
	TCPFin = 0x01
	TCPSyn = 0x02
	TCPRst = 0x04
	TCPAck = 0x10
)

// TCPFlags loads the flags of a TCP segment (payload).
func (p *Program) TCPFlags(to Reg) *Program {
	return payload(p, to, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1)
}

func payload(p *Program, to Reg, base, offset, n uint32) *Program {
	p.enc.begin("payload")
	p.enc.Uint32(unix.NFTA_PAYLOAD_DREG, to.number())
	p.enc.Uint32(unix.NFTA_PAYLOAD_BASE, base)
	p.enc.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
	p.enc.Uint32(unix.NFTA_PAYLOAD_LEN, n)
	p.enc.end()
	return p
}

// The keys of Meta.
const (
	MetaMark    = unix.NFT_META_MARK
	MetaOif     = unix.NFT_META_OIF
	MetaOifName = unix.NFT_META_OIFNAME
	MetaIif     = unix.NFT_META_IIF
	MetaIifName = unix.NFT_META_IIFNAME
	MetaL4Proto = unix.NFT_META_L4PROTO
	MetaNFProto = unix.NFT_META_NFPROTO
)

// Meta loads the kernel's metadata of the packet (meta).
func (p *Program) Meta(to Reg, key uint32) *Program {
	return load(p, "meta", unix.NFTA_META_KEY, key, unix.NFTA_META_DREG, to)
}

// load adds an expression that loads what key names, with the numbers of the two attributes.
func load(p *Program, expression string, ofKey uint16, key uint32, ofRegister uint16, to Reg) *Program {
	p.enc.begin(expression)
	p.enc.Uint32(ofKey, key)
	p.enc.Uint32(ofRegister, to.number())
	p.enc.end()
	return p
}

// SetMark writes the packet's mark (meta).
func (p *Program) SetMark(from Reg) *Program {
	p.enc.begin("meta")
	p.enc.Uint32(unix.NFTA_META_KEY, MetaMark)
	p.enc.Uint32(unix.NFTA_META_SREG, from.number())
	p.enc.end()
	return p
}

// Trace makes the kernel report the rules that the packet meets from here on to who subscribes to traces (meta nftrace set 1).
func Trace(p *Program) *Program {
	p.Value(0, []byte{1})
	p.enc.begin("meta")
	p.enc.Uint32(unix.NFTA_META_KEY, unix.NFT_META_NFTRACE)
	p.enc.Uint32(unix.NFTA_META_SREG, Reg(0).number())
	p.enc.end()
	return p
}

// Transparent loads whether the socket that the packet belongs to is transparent.
// It ends the rule if there is no socket (socket). Since Linux 4.18.
func (p *Program) Transparent(to Reg) *Program {
	const ofKey, transparent, ofRegister = 1, 0, 2 // NFTA_SOCKET_KEY, NFT_SOCKET_TRANSPARENT, NFTA_SOCKET_DREG
	return load(p, "socket", ofKey, transparent, ofRegister, to)
}

// FromKind matches packets that came by a device of a kind, such as "bridge" (meta iifkind). Since Linux 5.0.
func FromKind(p *Program, kind string) *Program {
	const iifKind = 26 // NFT_META_IIFKIND
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, kind)
	return p.Meta(0, iifKind).Equal(0, name)
}

// FromInterface matches packets that came by the interface of a name, or by one whose name begins with it (meta iifname).
// Locally made packets came by none.
func FromInterface(name string, prefix bool) *Program {
	value := []byte(name)
	if !prefix {
		value = make([]byte, unix.IFNAMSIZ)
		copy(value, name)
	}
	return new(Program).Meta(0, MetaIifName).Equal(0, value)
}

// TransparentProxy gives the packet to the transparent socket (IP_TRANSPARENT) that is bound to the address and port in the
// registers, or to the one that its connection has already; its addresses stay (tproxy). It ends the rule if there is no
// such socket. It is for packets of TCP and UDP in chains of prerouting. Since Linux 4.19.
func TransparentProxy(p *Program, f Family, addr, port Reg) *Program {
	p.enc.begin("tproxy")
	p.enc.Uint32(1, uint32(f))     // NFTA_TPROXY_FAMILY
	p.enc.Uint32(2, addr.number()) // NFTA_TPROXY_REG_ADDR
	p.enc.Uint32(3, port.number()) // NFTA_TPROXY_REG_PORT
	p.enc.end()
	return p
}

// SetSource writes an address of n bytes to an offset of the IP header, as the packet's source, and a port as its source port
// (payload). The packet must be of UDP.
func SetSource(p *Program, f Family, offset, n uint32, addr, port Reg) *Program {
	write := func(from Reg, base, offset, n, sumType, sumAt, flags uint32) {
		p.enc.begin("payload")
		p.enc.Uint32(unix.NFTA_PAYLOAD_SREG, from.number())
		p.enc.Uint32(unix.NFTA_PAYLOAD_BASE, base)
		p.enc.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		p.enc.Uint32(unix.NFTA_PAYLOAD_LEN, n)
		p.enc.Uint32(unix.NFTA_PAYLOAD_CSUM_TYPE, sumType)
		p.enc.Uint32(unix.NFTA_PAYLOAD_CSUM_OFFSET, sumAt)
		p.enc.Uint32(unix.NFTA_PAYLOAD_CSUM_FLAGS, flags)
		p.enc.end()
	}
	sum := uint32(unix.NFT_PAYLOAD_CSUM_INET)
	if f == IPv6 { // whose header has none
		sum = unix.NFT_PAYLOAD_CSUM_NONE
	}
	write(addr, unix.NFT_PAYLOAD_NETWORK_HEADER, offset, n, sum, 10, unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR)
	write(port, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2, unix.NFT_PAYLOAD_CSUM_INET, 6, 0)
	return p
}

// SetHops writes the time to live of a packet of IPv4, the hop limit of IPv6, without the checksum: it is for packets that
// Duplicate sends (payload).
func SetHops(p *Program, f Family, from Reg) *Program {
	p.enc.begin("payload")
	p.enc.Uint32(unix.NFTA_PAYLOAD_SREG, from.number())
	p.enc.Uint32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER)
	p.enc.Uint32(unix.NFTA_PAYLOAD_OFFSET, hopsAt(f))
	p.enc.Uint32(unix.NFTA_PAYLOAD_LEN, 1)
	p.enc.Uint32(unix.NFTA_PAYLOAD_CSUM_TYPE, unix.NFT_PAYLOAD_CSUM_NONE)
	p.enc.end()
	return p
}

// Hops loads what SetHops writes (payload).
func Hops(p *Program, f Family, to Reg) *Program { return p.Network(to, hopsAt(f), 1) }

func hopsAt(f Family) uint32 {
	if f == IPv6 {
		return 7
	}
	return 8
}

// Duplicate sends a copy of the packet, untracked, by the machine's routes to the address in a register, with one hop less in a chain of
// prerouting (dup). Its checksum of IPv4 is computed again. Since Linux 4.3.
func Duplicate(p *Program, to Reg) *Program {
	const ofAddress = 1 // NFTA_DUP_SREG_ADDR
	p.enc.begin("dup")
	p.enc.Uint32(ofAddress, to.number())
	p.enc.end()
	return p
}

// Hash loads a number from 0 to modulus-1 that follows from n bytes that begin at a register: the same on all machines of one
// byte order (hash, of Jenkins). Since Linux 4.9.
func Hash(p *Program, from, to Reg, n, modulus uint32) *Program {
	const ofSource, ofRegister, ofLen, ofModulus, ofSeed = 1, 2, 3, 4, 5 // NFTA_HASH_SREG, _DREG, _LEN, _MODULUS, _SEED
	p.enc.begin("hash")
	p.enc.Uint32(ofSource, from.number())
	p.enc.Uint32(ofRegister, to.number())
	p.enc.Uint32(ofLen, n)
	p.enc.Uint32(ofModulus, modulus)
	p.enc.Uint32(ofSeed, hashSeed)
	p.enc.end()
	return p
}

// hashSeed is the same in all versions: nodes must agree.
const hashSeed = 0x6661696c

// Transport loads n bytes at an offset of the transport header (payload).
func Transport(p *Program, to Reg, offset, n uint32) *Program {
	return payload(p, to, unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, n)
}

// Untracked keeps connection tracking from the packet (notrack).
func (p *Program) Untracked() *Program {
	p.enc.begin("notrack")
	p.enc.end()
	return p
}

// Equal goes on if a register has the value v (cmp).
func (p *Program) Equal(r Reg, v []byte) *Program { return compare(p, r, unix.NFT_CMP_EQ, v) }

// NotEqual goes on if a register has another value than v (cmp).
func (p *Program) NotEqual(r Reg, v []byte) *Program { return compare(p, r, unix.NFT_CMP_NEQ, v) }

func compare(p *Program, r Reg, op uint32, v []byte) *Program {
	p.enc.begin("cmp")
	p.enc.Uint32(unix.NFTA_CMP_SREG, r.number())
	p.enc.Uint32(unix.NFTA_CMP_OP, op)
	p.enc.value(unix.NFTA_CMP_DATA, v)
	p.enc.end()
	return p
}

// Mask computes r = r & mask ^ xor in place (bitwise).
func (p *Program) Mask(r Reg, mask, xor []byte) *Program {
	p.enc.begin("bitwise")
	p.enc.Uint32(unix.NFTA_BITWISE_SREG, r.number())
	p.enc.Uint32(unix.NFTA_BITWISE_DREG, r.number())
	p.enc.Uint32(unix.NFTA_BITWISE_LEN, uint32(len(mask)))
	p.enc.value(unix.NFTA_BITWISE_MASK, mask)
	p.enc.value(unix.NFTA_BITWISE_XOR, xor)
	p.enc.end()
	return p
}

func (e *expressions) value(typ uint16, v []byte) {
	at := e.Nest(typ)
	e.Bytes(unix.NFTA_DATA_VALUE, v)
	e.Close(at)
}

// InSet goes on if the value that begins at r is in the set (lookup).
func (p *Program) InSet(set string, r Reg) *Program {
	p.enc.begin("lookup")
	p.enc.String(unix.NFTA_LOOKUP_SET, set)
	p.enc.Uint32(unix.NFTA_LOOKUP_SREG, r.number())
	p.enc.end()
	return p
}

// Map loads what the map has for the value that begins at from (lookup). It
// ends the rule if there is nothing.
func (p *Program) Map(set string, from, to Reg) *Program {
	p.enc.begin("lookup")
	p.enc.String(unix.NFTA_LOOKUP_SET, set)
	p.enc.Uint32(unix.NFTA_LOOKUP_SREG, from.number())
	p.enc.Uint32(unix.NFTA_LOOKUP_DREG, to.number())
	p.enc.end()
	return p
}

// VerdictMap applies the verdict map's verdict for the value at from (lookup).
func (p *Program) VerdictMap(set string, from Reg) *Program {
	p.enc.begin("lookup")
	p.enc.String(unix.NFTA_LOOKUP_SET, set)
	p.enc.Uint32(unix.NFTA_LOOKUP_SREG, from.number())
	p.enc.Uint32(unix.NFTA_LOOKUP_DREG, 0) // NFT_REG_VERDICT
	p.enc.end()
	return p
}

// Remember adds an element by the packet, or renews the time of the one that is
// there and keeps its data (dynset update). timeout is in milliseconds. It ends
// the rule if the map is full.
func (p *Program) Remember(set string, key, data Reg, timeout uint64) *Program {
	return dynset(p, set, unix.NFT_DYNSET_OP_UPDATE, key, data, timeout)
}

// Forget removes an element by the packet, if it is there (dynset delete).
func (p *Program) Forget(set string, key, data Reg) *Program {
	return dynset(p, set, 2, key, data, 0) // NFT_DYNSET_OP_DELETE
}

func dynset(p *Program, set string, op uint32, key, data Reg, timeout uint64) *Program {
	p.enc.begin("dynset")
	p.enc.String(unix.NFTA_DYNSET_SET_NAME, set)
	p.enc.Uint32(unix.NFTA_DYNSET_OP, op)
	p.enc.Uint32(unix.NFTA_DYNSET_SREG_KEY, key.number())
	p.enc.Uint32(unix.NFTA_DYNSET_SREG_DATA, data.number())
	if timeout != 0 {
		p.enc.Uint64(unix.NFTA_DYNSET_TIMEOUT, timeout)
	}
	p.enc.end()
	return p
}

// Refresh adds an element by the packet to a dynamic set, or renews its time
// (dynset update). timeout is in milliseconds. It ends the rule if the set is full.
func (p *Program) Refresh(set string, key Reg, timeout uint64) *Program {
	p.enc.begin("dynset")
	p.enc.String(unix.NFTA_DYNSET_SET_NAME, set)
	p.enc.Uint32(unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_UPDATE)
	p.enc.Uint32(unix.NFTA_DYNSET_SREG_KEY, key.number())
	p.enc.Uint64(unix.NFTA_DYNSET_TIMEOUT, timeout)
	p.enc.end()
	return p
}

// Count adds the packet to the counter of an element of a dynamic set, which it
// makes if it is not there, and renews the element's time (dynset update with a
// counter). timeout is in milliseconds. It ends the rule if the set is full.
func (p *Program) Count(set string, key Reg, timeout uint64) *Program {
	p.enc.begin("dynset")
	p.enc.String(unix.NFTA_DYNSET_SET_NAME, set)
	p.enc.Uint32(unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_UPDATE)
	p.enc.Uint32(unix.NFTA_DYNSET_SREG_KEY, key.number())
	p.enc.Uint64(unix.NFTA_DYNSET_TIMEOUT, timeout)
	at := p.enc.Nest(unix.NFTA_DYNSET_EXPR)
	p.enc.String(unix.NFTA_EXPR_NAME, "counter")
	p.enc.Close(p.enc.Nest(unix.NFTA_EXPR_DATA))
	p.enc.Close(at)
	p.enc.end()
	return p
}

// Limit ends the rule for packets beyond rate a second, after burst (limit).
func Limit(p *Program, rate uint64, burst uint32) *Program {
	const ofRate, ofUnit, ofBurst = 1, 2, 3 // NFTA_LIMIT_RATE, NFTA_LIMIT_UNIT, NFTA_LIMIT_BURST
	p.enc.begin("limit")
	p.enc.Uint64(ofRate, rate)
	p.enc.Uint64(ofUnit, 1) // seconds
	p.enc.Uint32(ofBurst, burst)
	p.enc.end()
	return p
}

// Log hands the first bytes of the packet to the receiver of a group of nfnetlink_log, if there is one (log).
func Log(p *Program, group uint16, prefix string, bytes uint32) *Program {
	const ofGroup, ofPrefix, ofBytes = 1, 2, 3 // NFTA_LOG_GROUP, NFTA_LOG_PREFIX, NFTA_LOG_SNAPLEN
	p.enc.begin("log")
	p.enc.Uint16(ofGroup, group)
	p.enc.String(ofPrefix, prefix)
	p.enc.Uint32(ofBytes, bytes)
	p.enc.end()
	return p
}

// Value loads a constant (immediate).
func (p *Program) Value(to Reg, v []byte) *Program {
	p.enc.begin("immediate")
	p.enc.Uint32(unix.NFTA_IMMEDIATE_DREG, to.number())
	p.enc.value(unix.NFTA_IMMEDIATE_DATA, v)
	p.enc.end()
	return p
}

// The kinds of Number.
const (
	NumberIncrement = unix.NFT_NG_INCREMENTAL
	NumberRandom    = unix.NFT_NG_RANDOM
)

// Number loads a number from offset to offset+modulus-1 (numgen).
func (p *Program) Number(to Reg, kind, modulus, offset uint32) *Program {
	p.enc.begin("numgen")
	p.enc.Uint32(unix.NFTA_NG_DREG, to.number())
	p.enc.Uint32(unix.NFTA_NG_MODULUS, modulus)
	p.enc.Uint32(unix.NFTA_NG_TYPE, kind)
	p.enc.Uint32(unix.NFTA_NG_OFFSET, offset)
	p.enc.end()
	return p
}

// DNAT sends the connection to the address and port in the registers (nat).
func (p *Program) DNAT(f Family, addr, port Reg) *Program {
	p.enc.begin("nat")
	p.enc.Uint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
	p.enc.Uint32(unix.NFTA_NAT_FAMILY, uint32(f))
	p.enc.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, addr.number())
	p.enc.Uint32(unix.NFTA_NAT_REG_PROTO_MIN, port.number())
	p.enc.end()
	return p
}

// Redirect sends the connection to this machine, to the port in the register:
// to 127.0.0.1 or ::1 what comes from the machine itself, else to an address of
// the interface it came in by (redir).
func (p *Program) Redirect(port Reg) *Program {
	p.enc.begin("redir")
	p.enc.Uint32(unix.NFTA_REDIR_REG_PROTO_MIN, port.number())
	p.enc.end()
	return p
}

// RedirectAddress is Redirect that leaves ports as they are, for protocols that have none.
func RedirectAddress(p *Program) *Program {
	p.enc.begin("redir")
	p.enc.end()
	return p
}

// Masquerade gives the connection this machine's address and a random port
// (masq): a port in order is open to a race of two packets
// (kubernetes/kubernetes#56903).
func (p *Program) Masquerade() *Program {
	p.enc.begin("masq")
	p.enc.Uint32(unix.NFTA_MASQ_FLAGS, unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY)
	p.enc.end()
	return p
}

// Rejection is an answer to a packet that is not let through.
type Rejection struct {
	kind uint32
	code uint8
}

// ResetTCP is a reset. The packet must be of TCP.
func ResetTCP() Rejection { return Rejection{kind: unix.NFT_REJECT_TCP_RST} }

// PortUnreachable is ICMP port unreachable.
func PortUnreachable(f Family) Rejection {
	code := uint8(3) // ICMP_PORT_UNREACH
	if f == IPv6 {
		code = 4 // ICMPV6_PORT_UNREACH
	}
	return Rejection{kind: unix.NFT_REJECT_ICMP_UNREACH, code: code}
}

// Reject drops the packet and answers it (reject).
func (p *Program) Reject(with Rejection) *Program {
	p.enc.begin("reject")
	p.enc.Uint32(unix.NFTA_REJECT_TYPE, with.kind)
	p.enc.Uint8(unix.NFTA_REJECT_ICMP_CODE, with.code)
	p.enc.end()
	return p
}

// AddressType loads the routing type of an address (fib). TypeLocal is the type
// of this machine's addresses.
func (p *Program) AddressType(to Reg, of End) *Program {
	which := uint32(unix.NFTA_FIB_F_SADDR)
	if of == Destination {
		which = unix.NFTA_FIB_F_DADDR
	}
	p.enc.begin("fib")
	p.enc.Uint32(unix.NFTA_FIB_FLAGS, which)
	p.enc.Uint32(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
	p.enc.Uint32(unix.NFTA_FIB_DREG, to.number())
	p.enc.end()
	return p
}

// TypeLocal is RTN_LOCAL as AddressType loads it.
const TypeLocal = unix.RTN_LOCAL

// The codes of verdicts (nf_tables.h, netfilter.h).
const (
	verdictDrop   = 0
	verdictJump   = -3 // NFT_JUMP
	verdictGoto   = -4 // NFT_GOTO
	verdictReturn = -5 // NFT_RETURN
)

// Goto goes on in another chain without coming back (immediate).
func (p *Program) Goto(chain string) *Program { return immediate(p, verdictGoto, chain) }

// Jump goes on in another chain and comes back (immediate).
func (p *Program) Jump(chain string) *Program { return immediate(p, verdictJump, chain) }

// Return goes back to where the chain was called (immediate).
func (p *Program) Return() *Program { return immediate(p, verdictReturn, "") }

// Drop drops the packet (immediate).
func (p *Program) Drop() *Program { return immediate(p, verdictDrop, "") }

func immediate(p *Program, code int32, chain string) *Program {
	p.enc.begin("immediate")
	p.enc.Uint32(unix.NFTA_IMMEDIATE_DREG, 0) // NFT_REG_VERDICT
	at := p.enc.Nest(unix.NFTA_IMMEDIATE_DATA)
	verdict(&p.enc.Encoder, code, chain)
	p.enc.Close(at)
	p.enc.end()
	return p
}

func verdict(e *netlink.Encoder, code int32, chain string) {
	at := e.Nest(unix.NFTA_DATA_VERDICT)
	e.Uint32(unix.NFTA_VERDICT_CODE, uint32(code))
	if chain != "" {
		e.String(unix.NFTA_VERDICT_CHAIN, chain)
	}
	e.Close(at)
}

// DeviceKey is the name of a network device as the kernel holds it in registers: 16 bytes, filled up with zeros.
func DeviceKey(name string) []byte {
	padded := make([]byte, unix.IFNAMSIZ)
	copy(padded, name)
	return padded
}

// Uint32 is v as the kernel holds it in a register.
func Uint32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// PrefixMask is the netmask of a prefix, in the length of its address.
func PrefixMask(p netip.Prefix) []byte {
	m := make([]byte, p.Addr().BitLen()/8)
	for i := range p.Bits() {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}
