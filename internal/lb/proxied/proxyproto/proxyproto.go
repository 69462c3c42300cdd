// Package proxyproto reads and writes the headers of the PROXY protocol, versions 1 and 2
// (https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt).
package proxyproto

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
)

// signature begins a header of version 2.
var signature = []byte("\r\n\r\n\x00\r\nQUIT\n")

const (
	// maxV1 is the longest header of version 1, the end of line included (section 2.1).
	maxV1 = 107
	// maxV2 bounds what follows the first 16 bytes of version 2. With all extensions (TLV) that are
	// registered it has some hundred bytes.
	maxV2 = 4096
)

// Header returns the header of a version for a connection from client to at.
func Header(version int, client, at netip.AddrPort) []byte {
	// Both are of one family: of IPv6 if either is.
	c, a := client.Addr().Unmap(), at.Addr().Unmap()
	is4 := c.Is4() && a.Is4()
	if version == 1 {
		family := "TCP6"
		if is4 {
			family = "TCP4"
		} else {
			c, a = netip.AddrFrom16(c.As16()), netip.AddrFrom16(a.As16())
		}
		return fmt.Appendf(nil, "PROXY %s %s %s %d %d\r\n", family, c.WithZone(""), a.WithZone(""), client.Port(), at.Port())
	}
	out := append(bytes.Clone(signature), 0x21) // version 2, PROXY
	if is4 {
		out = append(out, 0x11, 0, 12)
		out = append(append(out, c.AsSlice()...), a.AsSlice()...)
	} else {
		c16, a16 := c.As16(), a.As16()
		out = append(out, 0x21, 0, 36)
		out = append(append(out, c16[:]...), a16[:]...)
	}
	out = binary.BigEndian.AppendUint16(out, client.Port())
	return binary.BigEndian.AppendUint16(out, at.Port())
}

// OwnHeader returns the header of a version for a connection that is the load balancer's own.
func OwnHeader(version int) []byte {
	if version == 1 {
		return []byte("PROXY UNKNOWN\r\n")
	}
	return append(bytes.Clone(signature), 0x20, 0, 0, 0) // LOCAL, without addresses
}

var errHeader = errors.New("no header of the PROXY protocol")

// Read reads a header of either version from r, and not a byte more. ok is false if the
// header reports that the connection is the front's own (LOCAL, UNKNOWN).
func Read(r io.Reader) (client, at netip.AddrPort, ok bool, err error) {
	var buf [16]byte
	if _, err := io.ReadFull(r, buf[:8]); err != nil {
		return client, at, false, errors.Join(errHeader, err)
	}
	if bytes.HasPrefix(buf[:8], []byte("PROXY ")) {
		return readV1(r, buf[:8])
	}
	if !bytes.Equal(buf[:8], signature[:8]) {
		return client, at, false, errHeader
	}
	if _, err := io.ReadFull(r, buf[8:]); err != nil || !bytes.Equal(buf[:12], signature) || buf[12]>>4 != 2 {
		return client, at, false, errors.Join(errHeader, err)
	}
	size := binary.BigEndian.Uint16(buf[14:])
	if size > maxV2 {
		return client, at, false, fmt.Errorf("a header of %d bytes: %w", size, errHeader)
	}
	rest := make([]byte, size)
	if _, err := io.ReadFull(r, rest); err != nil {
		return client, at, false, errors.Join(errHeader, err)
	}
	switch buf[12] & 0xf {
	case 0: // LOCAL
		return client, at, false, nil
	case 1:
	default:
		return client, at, false, errHeader
	}
	length := 0
	switch buf[13] {
	case 0x11:
		length = 4
	case 0x21:
		length = 16
	default:
		return client, at, false, nil // a family that has no addresses here
	}
	if len(rest) < 2*length+4 {
		return client, at, false, errHeader
	}
	addr := func(i int) netip.AddrPort {
		a, _ := netip.AddrFromSlice(rest[i*length : (i+1)*length])
		return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(rest[2*length+2*i:]))
	}
	return addr(0), addr(1), true, nil
}

// readV1 reads the rest of a line that begins with line. It reads byte by byte: what
// follows is the client's.
func readV1(r io.Reader, line []byte) (client, at netip.AddrPort, ok bool, err error) {
	line = bytes.Clone(line)
	var b [1]byte
	for !bytes.HasSuffix(line, []byte("\r\n")) {
		if len(line) == maxV1 {
			return client, at, false, errHeader
		}
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return client, at, false, errors.Join(errHeader, err)
		}
		line = append(line, b[0])
	}
	part := strings.Split(string(line[:len(line)-2]), " ")
	if len(part) >= 2 && part[1] == "UNKNOWN" {
		return client, at, false, nil
	}
	if len(part) != 6 || part[1] != "TCP4" && part[1] != "TCP6" {
		return client, at, false, errHeader
	}
	read := func(addr, port string) netip.AddrPort {
		a, err1 := netip.ParseAddr(addr)
		p, err2 := strconv.ParseUint(port, 10, 16)
		if err1 != nil || err2 != nil || a.Is4() != (part[1] == "TCP4") || a.Zone() != "" {
			err = errHeader
		}
		return netip.AddrPortFrom(a.Unmap(), uint16(p))
	}
	client, at = read(part[2], part[4]), read(part[3], part[5])
	if err != nil {
		return netip.AddrPort{}, netip.AddrPort{}, false, err
	}
	return client, at, true, nil
}
