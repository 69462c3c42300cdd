package connecttime

import "net/netip"

// packed is a list of addresses with their ports, in its order: 7 bytes each of IPv4 and 19 of IPv6, where a netip.AddrPort takes
// 32. A target remembers one of each list that is installed, for as long as it is.
type packed string

// pack packs a list of addresses without a zone. The zero AddrPort takes 3 bytes.
func pack(list []netip.AddrPort) packed {
	size := 0
	for _, at := range list {
		size += packedSize(at)
	}
	b := make([]byte, 0, size)
	for _, at := range list {
		b = append(b, byte(packedSize(at)-1))
		b, _ = at.AppendBinary(b) // no AddrPort gives an error
	}
	return packed(b)
}

// packedSize is a byte with the length of the rest, the address, and the port.
func packedSize(at netip.AddrPort) int { return 1 + at.Addr().BitLen()/8 + 2 }

// list is the opposite of pack.
func (p packed) list() []netip.AddrPort {
	out := make([]netip.AddrPort, p.len())
	for i := range out {
		n := 1 + int(p[0])
		_ = out[i].UnmarshalBinary([]byte(p[1:n])) // pack has written it
		p = p[n:]
	}
	return out
}

// len is the length of the list.
func (p packed) len() (n int) {
	for ; p != ""; p = p[1+int(p[0]):] {
		n++
	}
	return n
}
