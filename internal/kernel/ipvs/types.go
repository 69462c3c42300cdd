package ipvs

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Key identifies a virtual server: protocol and address, or a packet mark and a
// family.
type Key struct {
	Proto svc.Protocol
	Addr  netip.AddrPort
	// Mark is not 0 for a server of all packets with this very mark.
	Mark   uint32
	Family svc.Family
}

// AddressKey is the Key of the server at an address.
func AddressKey(p svc.Protocol, a netip.AddrPort) Key {
	return Key{Proto: p, Addr: a, Family: svc.FamilyOf(a.Addr())}
}

// MarkKey is the Key of the server of a mark.
func MarkKey(mark uint32, f svc.Family) Key { return Key{Mark: mark, Family: f} }

// String returns the form of ipvsadm: "tcp 10.96.0.10:80" or "fwm 12 (IPv4)".
func (k Key) String() string {
	if k.Mark != 0 {
		return fmt.Sprintf("fwm %d (%s)", k.Mark, k.Family)
	}
	return strings.ToLower(k.Proto.String()) + " " + k.Addr.String()
}

// Flags configure a scheduler. Their meaning depends on the scheduler.
type Flags uint32

// Flags that can be asked for, of linux/ip_vs.h.
const (
	flagPersistent Flags = 1
	// Fallback lets sh and mh choose another server when the one that the hash
	// names takes no connections.
	Fallback Flags = 8
)

// Service is a virtual server.
type Service struct {
	Key
	Scheduler string
	Flags     Flags
	// Persistence is for how long a client stays with its server, in whole
	// seconds; 0 is no persistence.
	Persistence time.Duration
}

// Dest is a real server, reached by translation of addresses.
type Dest struct {
	Addr netip.AddrPort
	// Weight 0 takes no new connections.
	Weight uint32
	// Active is how many open connections it has, Connections how many that
	// are open or were until a moment ago. Both are returned by Dests and not sent.
	Active, Connections uint64
}

// Timeouts of idle connections; a value of 0 leaves the kernel's.
type Timeouts struct{ TCP, TCPFin, UDP time.Duration }
