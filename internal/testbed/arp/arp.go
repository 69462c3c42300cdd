// Package arp asks a network, as a machine of it, who has an address, and records who claims it (RFC 826).
package arp

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/packet"
	"github.com/fairlead/fairlead/internal/testbed"
)

// MAC is the hardware address of an Ethernet interface.
type MAC [6]byte

// Claim is what one message says.
type Claim struct {
	// MAC is who has the address.
	MAC MAC
	At  time.Time
	// Asked reports whether the message answers a request of the Listener.
	Asked bool
}

// Listener is an interface of a machine that hears the ARP messages of its network. Its methods may be called at
// the same time.
type Listener struct {
	host *testbed.Host
	mac  MAC
	addr netip.Addr
	conn *packet.Conn

	mu     sync.Mutex
	claims map[netip.Addr][]Claim
}

// Listen listens at an interface of a host, and asks with an address of it, until the test ends.
func Listen(t testing.TB, h *testbed.Host, device string, own netip.Addr) *Listener {
	t.Helper()
	l := &Listener{host: h, addr: own, claims: map[netip.Addr][]Claim{}}
	found := deviceOf(t, h, device)
	l.mac = found.MAC
	var err error
	h.Do(func() { l.conn, err = packet.Listen(found.Index, packet.ARP) })
	if err != nil {
		t.Fatal(err)
	}
	var reading sync.WaitGroup
	reading.Go(l.read)
	t.Cleanup(func() {
		_ = l.conn.Close()
		reading.Wait()
	})
	return l
}

// MACOf returns the hardware address of an interface of a host.
func MACOf(t testing.TB, h *testbed.Host, device string) MAC {
	t.Helper()
	return deviceOf(t, h, device).MAC
}

func deviceOf(t testing.TB, h *testbed.Host, name string) link.Interface {
	t.Helper()
	var links []link.Interface
	var err error
	h.Do(func() { links, err = link.Interfaces() })
	i := slices.IndexFunc(links, func(l link.Interface) bool { return l.Name == name })
	if err != nil || i < 0 {
		t.Fatalf("%s has no interface %s: %v", h.Name(), name, err)
	}
	return links[i]
}

func (l *Listener) read() {
	buf := make([]byte, 2000)
	for {
		n, err := l.conn.Receive(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil || n < 42 {
			continue
		}
		l.take(buf[14:n])
	}
}

// take records what a message claims: a reply, or a request for the sender's own address.
func (l *Listener) take(b []byte) {
	sender := netip.AddrFrom4([4]byte(b[14:18]))
	reply := b[7] == 2
	if !reply && sender != netip.AddrFrom4([4]byte(b[24:28])) {
		return // a question
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims[sender] = append(l.claims[sender], Claim{MAC(b[8:14]), time.Now(), MAC(b[18:24]) == l.mac})
}

// Host is the machine that listens.
func (l *Listener) Host() *testbed.Host { return l.host }

// Ask sends one request.
func (l *Listener) Ask(a netip.Addr) {
	own, target := l.addr.As4(), a.As4()
	b := append([]byte{255, 255, 255, 255, 255, 255}, l.mac[:]...)
	b = append(b, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)
	b = append(append(b, l.mac[:]...), own[:]...)
	b = append(append(b, 0, 0, 0, 0, 0, 0), target[:]...)
	_ = l.conn.Send(append(b, make([]byte, 18)...))
}

// Who asks once, and returns who was the first to claim the address within 50 ms.
func (l *Listener) Who(a netip.Addr) (mac MAC, ok bool) {
	begin := time.Now()
	l.Ask(a)
	for deadline := begin.Add(50 * time.Millisecond); time.Now().Before(deadline); <-time.After(time.Millisecond) {
		if got := l.Since(a, begin); len(got) > 0 {
			return got[0].MAC, true
		}
	}
	return mac, false
}

// Since returns what was heard of an address since a time.
func (l *Listener) Since(a netip.Addr, t time.Time) []Claim {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.claims[a], t, func(c Claim, t time.Time) int { return c.At.Compare(t) })
	return slices.Clone(l.claims[a][i:])
}
