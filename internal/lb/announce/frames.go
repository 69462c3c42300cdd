package announce

import (
	"encoding/binary"
	"net/netip"
)

// MAC is a hardware address of Ethernet.
type MAC [6]byte

// String returns the usual form, as 02:00:5e:10:00:00.
func (m MAC) String() string {
	const digits = "0123456789abcdef"
	b := make([]byte, 0, 17)
	for i, c := range m {
		if i > 0 {
			b = append(b, ':')
		}
		b = append(b, digits[c>>4], digits[c&15])
	}
	return string(b)
}

var (
	broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	allNodes  = netip.MustParseAddr("ff02::1")
)

const (
	etherARP  = 0x0806
	etherIPv6 = 0x86dd
	ethernet  = 14 // bytes of the header
	arpLength = 28
	arpAsk    = 1
	arpAnswer = 2

	ipv6Header = 40
	icmpv6     = 58
	solicit    = 135 // RFC 4861, 4.3
	advertise  = 136 // RFC 4861, 4.4
	sourceMAC  = 1   // option of a solicitation
	targetMAC  = 2   // option of an advertisement
	solicited  = 0x40
	override   = 0x20
	hopLimit   = 255 // shows that no router has forwarded the packet
)

// question is a request for the hardware address of an IP address, or what a machine
// says its hardware address is: ARP or NDP.
type question struct {
	// answer is true for an ARP reply and a neighbour advertisement.
	answer bool
	// target is the address asked for, or that is advertised.
	target netip.Addr
	// sender is who asks: the zero Addr if it does not have the address that it asks with
	// yet (RFC 5227, RFC 4862). mac is its hardware address, or the one that is
	// advertised.
	sender netip.Addr
	mac    MAC
}

// parse returns what a frame asks or answers.
func parse(b []byte) (q question, ok bool) {
	if len(b) < ethernet {
		return q, false
	}
	switch body := b[ethernet:]; binary.BigEndian.Uint16(b[12:]) {
	case etherARP:
		return parseARP(body)
	case etherIPv6:
		return parseNDP(body, MAC(b[6:12]))
	}
	return q, false
}

func parseARP(b []byte) (q question, ok bool) {
	// Ethernet, IPv4, with addresses of 6 and 4 bytes (RFC 826).
	if len(b) < arpLength || [6]byte(b) != [6]byte{0, 1, 8, 0, 6, 4} {
		return q, false
	}
	op := binary.BigEndian.Uint16(b[6:])
	if op != arpAsk && op != arpAnswer {
		return q, false
	}
	q = question{
		answer: op == arpAnswer, mac: MAC(b[8:14]),
		sender: netip.AddrFrom4([4]byte(b[14:18])), target: netip.AddrFrom4([4]byte(b[24:28])),
	}
	switch {
	case q.answer:
		q.target, q.sender = q.sender, netip.Addr{}
	case q.sender.IsUnspecified():
		q.sender = netip.Addr{}
	case q.sender == q.target: // a gratuitous request is an announcement
		q.answer, q.sender = true, netip.Addr{}
	}
	return q, true
}

func parseNDP(b []byte, from MAC) (q question, ok bool) {
	if len(b) < ipv6Header+24 || b[6] != icmpv6 || b[7] != hopLimit {
		return q, false
	}
	length := int(binary.BigEndian.Uint16(b[4:]))
	if length < 24 || length > len(b)-ipv6Header {
		return q, false
	}
	body := b[ipv6Header : ipv6Header+length]
	if body[1] != 0 || checksum(b[8:40], body) != 0 {
		return q, false
	}
	q = question{target: netip.AddrFrom16([16]byte(body[8:24])), mac: from}
	option := byte(sourceMAC)
	switch body[0] {
	case solicit:
		if q.sender = netip.AddrFrom16([16]byte(b[8:24])); q.sender.IsUnspecified() {
			q.sender = netip.Addr{}
		}
	case advertise:
		q.answer, option = true, targetMAC
	default:
		return q, false
	}
	if q.target.IsMulticast() || q.target.Is4In6() {
		return q, false
	}
	for o := body[24:]; len(o) >= 8; {
		n := int(o[1]) * 8
		if n == 0 || n > len(o) {
			return q, false
		}
		if o[0] == option {
			q.mac = MAC(o[2:8])
		}
		o = o[n:]
	}
	return q, true
}

// arp builds a frame of ARP.
func arp(to, from MAC, op uint16, senderMAC MAC, sender netip.Addr, targetMAC MAC, target netip.Addr) []byte {
	b := make([]byte, 0, 60)
	b = append(append(b, to[:]...), from[:]...)
	b = binary.BigEndian.AppendUint16(b, etherARP)
	b = append(b, 0, 1, 8, 0, 6, 4)
	b = binary.BigEndian.AppendUint16(b, op)
	s, t := sender.As4(), target.As4()
	b = append(append(b, senderMAC[:]...), s[:]...)
	b = append(append(b, targetMAC[:]...), t[:]...)
	return b[:60] // the least length of a frame
}

// ndp builds a frame of a neighbour solicitation or advertisement for target.
func ndp(toMAC, from MAC, to, source netip.Addr, kind, flags byte, target netip.Addr, option byte) []byte {
	length := 24
	if option != 0 {
		length += 8
	}
	b := make([]byte, 0, ethernet+ipv6Header+length)
	b = append(append(b, toMAC[:]...), from[:]...)
	b = binary.BigEndian.AppendUint16(b, etherIPv6)
	b = append(b, 0x60, 0, 0, 0, 0, byte(length), icmpv6, hopLimit)
	s, d, t := source.As16(), to.As16(), target.As16()
	b = append(append(b, s[:]...), d[:]...)
	body := len(b)
	b = append(b, kind, 0, 0, 0, flags, 0, 0, 0)
	b = append(b, t[:]...)
	if option != 0 {
		b = append(append(b, option, 1), from[:]...)
	}
	binary.BigEndian.PutUint16(b[body+2:], checksum(b[ethernet+8:ethernet+40], b[body:]))
	return b
}

// checksum is that of ICMPv6 (RFC 4443, 2.3): over the two addresses, length and
// next header, and the message. It is 0 for a message with a right one.
func checksum(addresses, message []byte) uint16 {
	sum := uint32(len(message)) + icmpv6
	for _, b := range [][]byte{addresses, message} {
		for ; len(b) > 1; b = b[2:] {
			sum += uint32(b[0])<<8 | uint32(b[1])
		}
		if len(b) == 1 {
			sum += uint32(b[0]) << 8
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// solicitedNode returns the multicast group to which solicitations for a go (RFC
// 4291, 2.7.1).
func solicitedNode(a netip.Addr) netip.Addr {
	b := a.As16()
	return netip.AddrFrom16([16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
}

// multicastMAC returns the hardware address of a group (RFC 2464, 7).
func multicastMAC(group netip.Addr) MAC {
	b := group.As16()
	return MAC{0x33, 0x33, b[12], b[13], b[14], b[15]}
}

// reply returns the frame that answers q from own.
func reply(q question, own MAC) []byte {
	if q.target.Is4() {
		sender := q.sender
		if !sender.IsValid() {
			sender = netip.IPv4Unspecified()
		}
		return arp(q.mac, own, arpAnswer, own, q.target, q.mac, sender)
	}
	if !q.sender.IsValid() {
		return ndp(multicastMAC(allNodes), own, allNodes, q.target, advertise, override, q.target, targetMAC)
	}
	return ndp(q.mac, own, q.sender, q.target, advertise, solicited|override, q.target, targetMAC)
}

// announcement returns the frames that tell everybody on a network that own has a: for
// ARP a request and a reply, since there are neighbours that heed only one of them
// (RFC 5944, 4.6), and a request to each gateway, which has to note the sender (RFC 826).
func announcement(a netip.Addr, own MAC, gateways []netip.Addr) [][]byte {
	if a.Is6() {
		return [][]byte{ndp(multicastMAC(allNodes), own, allNodes, a, advertise, override, a, targetMAC)}
	}
	out := [][]byte{arp(broadcast, own, arpAsk, own, a, MAC{}, a), arp(broadcast, own, arpAnswer, own, a, broadcast, a)}
	for _, gw := range gateways {
		if gw.Is4() {
			out = append(out, arp(broadcast, own, arpAsk, own, a, MAC{}, gw))
		}
	}
	return out
}

// probe returns the frame that asks who has a without claiming it.
func probe(a netip.Addr, own MAC) []byte {
	if a.Is6() {
		group := solicitedNode(a)
		return ndp(multicastMAC(group), own, group, netip.IPv6Unspecified(), solicit, 0, a, 0)
	}
	return arp(broadcast, own, arpAsk, own, netip.IPv4Unspecified(), MAC{}, a)
}
