package testbed

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/packet"
)

// Wire is what has passed eth0 of a host. It may be asked at any time, by many.
type Wire struct {
	text   []byte
	hidden []netip.Prefix
	port   uint16

	mu        sync.Mutex
	plain     []string
	encrypted map[bool]int // frames by whether they are of IPv4
}

// Wire reads all frames of eth0 until the test ends. None is to have text in it, or an
// address of hidden; port is that of UDP between those who encrypt.
func (h *Host) Wire(text string, hidden []netip.Prefix, port uint16) *Wire {
	t := h.net.t
	t.Helper()
	w := &Wire{text: []byte(text), hidden: hidden, port: port, encrypted: map[bool]int{}}
	var conn *packet.Conn
	var err error
	index := h.ns.mustLink(t, "eth0").Attrs().Index
	h.Do(func() { conn, err = packet.Listen(index, unix.ETH_P_ALL) })
	must(t, err, "%s: listen to all frames", h.name)
	var reading sync.WaitGroup
	reading.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, err := conn.Receive(buf)
			if err != nil {
				return
			}
			w.add(buf[:n])
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		reading.Wait()
	})
	return w
}

// add takes in an Ethernet frame.
func (w *Wire) add(frame []byte) {
	const ethernet, header4, header6, ports = 14, 20, 40, 4
	var source, destination netip.Addr
	var protocol byte
	var body []byte
	is4 := false
	switch {
	case len(frame) < ethernet:
		return
	case binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_IP && len(frame) >= ethernet+header4+ports:
		ip := frame[ethernet:]
		source, destination = netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20]))
		protocol, body, is4 = ip[9], ip[header4:], true
	case binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_IPV6 && len(frame) >= ethernet+header6+ports:
		ip := frame[ethernet:]
		source, destination = netip.AddrFrom16([16]byte(ip[8:24])), netip.AddrFrom16([16]byte(ip[24:40]))
		protocol, body = ip[6], ip[header6:]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	hides := func(p netip.Prefix) bool { return p.Contains(source) || p.Contains(destination) }
	switch {
	case bytes.Contains(frame, w.text), slices.ContainsFunc(w.hidden, hides):
		w.plain = append(w.plain, fmt.Sprintf("%s to %s, protocol %d, %d bytes", source, destination, protocol, len(frame)))
	case protocol == unix.IPPROTO_UDP && binary.BigEndian.Uint16(body[2:]) == w.port:
		w.encrypted[is4]++
	}
}

// Check returns an error if anything could be read, or if fewer than enough frames of a
// family were encrypted.
func (w *Wire) Check(is4 bool, enough int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case len(w.plain) > 0:
		return fmt.Errorf("%d frames in plain text, the first is %s", len(w.plain), w.plain[0])
	case w.encrypted[is4] < enough:
		return fmt.Errorf("%d frames of WireGuard were seen, want %d at least", w.encrypted[is4], enough)
	}
	return nil
}
