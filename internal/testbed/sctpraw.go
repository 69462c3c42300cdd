package testbed

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"
)

// On a kernel without SCTP sockets, Serve and Ask speak as much of SCTP as a
// question needs: the client's INIT, and the server's INIT ACK with the answer
// in its state cookie (RFC 9260, 3.3.2 and 3.3.3), over raw sockets. Connection
// tracking and translation see a real association begin.

const (
	protocolSCTP = 132
	chunkInit    = 1
	chunkInitAck = 2
	paramCookie  = 7
	sctpHeader   = 12
	initLen      = 20
)

// sctpPacket makes a packet of one INIT or INIT ACK chunk.
func sctpPacket(from, to uint16, peerTag, ownTag uint32, chunk uint8, cookie []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = binary.BigEndian.AppendUint32(b, peerTag)
	b = append(b, 0, 0, 0, 0) // checksum
	n := initLen
	if cookie != nil {
		n += 4 + len(cookie)
	}
	b = append(b, chunk, 0, byte(n>>8), byte(n))
	b = binary.BigEndian.AppendUint32(b, ownTag)
	b = binary.BigEndian.AppendUint32(b, 65536)    // receiver window
	b = append(b, 0, 1, 0, 1)                      // streams
	b = binary.BigEndian.AppendUint32(b, ownTag+1) // first TSN
	if cookie != nil {
		b = append(b, 0, paramCookie, byte((4+len(cookie))>>8), byte(4+len(cookie)))
		b = append(b, cookie...)
		for len(b)%4 != 0 {
			b = append(b, 0)
		}
	}
	// The checksum is CRC32c, lowest byte first (RFC 9260, appendix A).
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// parseSCTP reads a packet made by sctpPacket.
func parseSCTP(b []byte) (from, to uint16, tag uint32, chunk uint8, cookie []byte, ok bool) {
	if len(b) < sctpHeader+initLen {
		return
	}
	from, to = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	c := b[sctpHeader:]
	n := int(binary.BigEndian.Uint16(c[2:]))
	if n < initLen || n > len(c) {
		return
	}
	if n > initLen+4 {
		cookie = c[initLen+4 : n]
	}
	return from, to, binary.BigEndian.Uint32(c[4:]), c[0], cookie, true
}

func rawNetwork(a netip.Addr) string {
	if a.Is4() {
		return fmt.Sprint("ip4:", protocolSCTP)
	}
	return fmt.Sprint("ip6:", protocolSCTP)
}

func ipAddr(a netip.Addr) *net.IPAddr { return &net.IPAddr{IP: a.AsSlice()} }

// serveRawSCTP answers INITs to a port of the host's own addresses.
func (h *Host) serveRawSCTP(name string, port uint16) {
	t := h.net.t
	t.Helper()
	for _, a := range []netip.Addr{h.addr4, h.addr6} {
		var c *net.IPConn
		var err error
		h.Do(func() { c, err = net.ListenIP(rawNetwork(a), ipAddr(a)) })
		must(t, err, "%s: listen on SCTP %s", h.name, a)
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, 2048)
			for {
				n, from, err := c.ReadFromIP(buf)
				if err != nil {
					return
				}
				client, at, tag, chunk, _, ok := parseSCTP(buf[:n])
				if !ok || chunk != chunkInit || at != port {
					continue
				}
				who, _ := netip.AddrFromSlice(from.IP)
				cookie := fmt.Appendf(nil, "%s %s", name, netip.AddrPortFrom(who.Unmap(), client))
				_, _ = c.WriteToIP(sctpPacket(port, client, tag, tag+1, chunkInitAck, cookie), from)
			}
		}()
		t.Cleanup(func() {
			_ = c.Close()
			<-done
		})
	}
}

// askRawSCTP sends an INIT and reads the answer.
func (h *Host) askRawSCTP(ctx context.Context, to netip.AddrPort) (Answer, error) {
	var c *net.IPConn
	var err error
	h.Do(func() { c, err = net.DialIP(rawNetwork(to.Addr()), nil, ipAddr(to.Addr())) })
	if err != nil {
		return Answer{}, err
	}
	defer func() { _ = c.Close() }()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(answerTime)
	}
	if err := c.SetDeadline(deadline); err != nil {
		return Answer{}, err
	}
	port := uint16(20000 + rand.IntN(30000))
	tag := rand.Uint32() | 1
	if _, err := c.Write(sctpPacket(port, to.Port(), 0, tag, chunkInit, nil)); err != nil && !ownRefusal(err) {
		return Answer{}, err
	}
	buf := make([]byte, 2048)
	for {
		n, _, err := c.ReadFromIP(buf)
		if err != nil {
			return Answer{}, err
		}
		from, at, _, chunk, cookie, ok := parseSCTP(buf[:n])
		if ok && chunk == chunkInitAck && from == to.Port() && at == port {
			return parseAnswer(string(cookie))
		}
	}
}
