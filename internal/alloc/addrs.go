package alloc

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// maxHostBits bounds the size of an IPv6 range, so that offsets fit in 64 bits.
const maxHostBits = 64

// Addrs is one IP range. The network address is never given out, nor is the
// broadcast address of an IPv4 range. All methods may be called from any
// goroutine.
type Addrs struct {
	prefix netip.Prefix
	first  netip.Addr
	pool   *pool
}

// NewAddrs makes a range in which nothing is taken. Host bits of prefix are
// ignored; an IPv6 prefix must be /64 or longer.
func NewAddrs(prefix netip.Prefix) (*Addrs, error) {
	if !prefix.IsValid() {
		return nil, fmt.Errorf("not a valid IP range: %v", prefix)
	}
	if prefix.Addr().Is4In6() {
		return nil, fmt.Errorf("IP range %s is an IPv4-mapped IPv6 range; write it as IPv4", prefix)
	}
	prefix = prefix.Masked()
	host := prefix.Addr().BitLen() - prefix.Bits()
	if host > maxHostBits {
		return nil, fmt.Errorf("IP range %s is too large: the shortest allowed prefix length is %d", prefix, prefix.Addr().BitLen()-maxHostBits)
	}
	// All but the network address. 1<<64 is 0 in Go, so that a /64 has the
	// right size too.
	size := uint64(1)<<host - 1
	band := uint64(0)
	if size >= 16 { // a /28 and smaller is not split
		band = bandSize(uint64(1)<<host-1, 16, 256, 16)
		if host < 64 {
			band = bandSize(uint64(1)<<host, 16, 256, 16)
		}
	}
	if prefix.Addr().Is4() && size > 0 {
		size--
	}
	return &Addrs{prefix: prefix, first: prefix.Addr().Next(), pool: newPool(size, band)}, nil
}

// Prefix returns the range.
func (r *Addrs) Prefix() netip.Prefix { return r.prefix }

// Allocate takes a. It returns ErrAllocated or a *NotInRangeError.
func (r *Addrs) Allocate(a netip.Addr) error {
	off, ok := r.offset(a)
	if !ok {
		return &NotInRangeError{IP: a.String(), Range: r.prefix.String()}
	}
	if !r.pool.allocate(off) {
		return ErrAllocated
	}
	return nil
}

// AllocateNext takes a random free address. It returns a *FullError if there is
// none.
func (r *Addrs) AllocateNext() (netip.Addr, error) { return r.next(r.pool.next) }

// Peek returns what AllocateNext could take, and takes nothing.
func (r *Addrs) Peek() (netip.Addr, error) { return r.next(r.pool.peek) }

func (r *Addrs) next(choose func() (uint64, bool)) (netip.Addr, error) {
	off, ok := choose()
	if !ok {
		return netip.Addr{}, &FullError{Range: r.prefix.String()}
	}
	return r.at(off), nil
}

// Release frees a. Freeing an address that is not taken, or not of this range,
// does nothing.
func (r *Addrs) Release(a netip.Addr) {
	if off, ok := r.offset(a); ok {
		r.pool.release(off)
	}
}

// Contains reports whether a is an address that this range can give out.
func (r *Addrs) Contains(a netip.Addr) bool {
	_, ok := r.offset(a)
	return ok
}

// offset is the distance of a from the first address that can be given out.
func (r *Addrs) offset(a netip.Addr) (uint64, bool) {
	a = a.Unmap()
	if !r.prefix.Contains(a) || a.WithZone("") != a {
		return 0, false
	}
	off := low64(a) - low64(r.first)
	return off, off < r.pool.size()
}

func (r *Addrs) at(off uint64) netip.Addr {
	n := low64(r.first) + off
	if r.first.Is4() {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(n))
		return netip.AddrFrom4(b)
	}
	b := r.first.As16()
	binary.BigEndian.PutUint64(b[8:], n)
	return netip.AddrFrom16(b)
}

// low64 is the address as a number, without what a /64 or longer prefix fixes.
func low64(a netip.Addr) uint64 {
	if a.Is4() {
		b := a.As4()
		return uint64(binary.BigEndian.Uint32(b[:]))
	}
	b := a.As16()
	return binary.BigEndian.Uint64(b[8:])
}
