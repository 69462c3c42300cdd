package conntrack

import (
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Flow selects entries of the table by where a client sent its packets and by
// who answers them.
type Flow struct {
	Protocol svc.Protocol
	// OrigDst is where the client sent to. The unspecified address of a family
	// stands for every address, as the frontend of a node port has it.
	OrigDst netip.AddrPort
	// ReplySrc is who answers: the endpoint after a translation, OrigDst
	// itself where there was none. The zero value is anybody.
	ReplySrc netip.AddrPort
}

// String returns for example "UDP 10.96.0.10:53 answered by 10.244.0.5:5353".
func (f Flow) String() string {
	text := f.Protocol.String() + " " + f.OrigDst.String()
	if f.ReplySrc.IsValid() {
		text += " answered by " + f.ReplySrc.String()
	}
	return text
}

// Entry is what counts of one tracked connection.
type Entry struct {
	Protocol svc.Protocol
	// OrigDst is where the client sent to, ReplySrc who answers, or is to answer.
	OrigDst, ReplySrc netip.AddrPort
	// Replied reports that there was an answer, Assured that the connection has lasted: of
	// UDP, with an answer and packets for more than 2 s.
	Replied, Assured bool
	// Marked reports that rules of netfilter have translated the destination. IPVS marks nothing.
	Marked bool
	// Left is when the entry ends without another packet, in whole seconds, rounded down: the
	// whole timeout only in the tick of the packet itself.
	Left time.Duration
}

// Translated reports whether another address answers than was asked, by rules or by IPVS.
func (e *Entry) Translated() bool { return e.OrigDst != e.ReplySrc }
