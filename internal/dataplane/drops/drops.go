// Package drops counts, for the modes, the packets that reach no endpoint: by their
// destination, in sets of the kernel that such packets fill. No other packet
// meets a counter, no change of a Service touches one, and they are read when
// the counts are read.
package drops

import (
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
)

// Fate is what happens to a lost packet.
type Fate int

// The fates.
const (
	Rejected Fate = iota
	Dropped
)

// Fates are all of them.
var Fates = [...]Fate{Rejected, Dropped}

const (
	// size bounds the destinations counted, of each fate and family, for the
	// rest of which nothing is known.
	size = 1 << 16
	// lifetime is how long a destination without such packets is remembered.
	lifetime = 24 * time.Hour
)

// tally adds up the counts of sets by destination.
type tally struct {
	at  map[svc.Frontend]int
	out []dataplane.DropCount
}

func newTally() *tally { return &tally{at: map[svc.Frontend]int{}} }

// set takes over the count of a destination and a fate; the last one counts.
// Services have only protocols with ports.
func (t *tally) set(p svc.Protocol, to netip.AddrPort, how Fate, packets uint64) {
	if p != svc.TCP && p != svc.UDP && p != svc.SCTP {
		return
	}
	key := svc.Frontend{Protocol: p, Addr: to}
	i, known := t.at[key]
	if !known {
		i = len(t.out)
		t.at[key] = i
		t.out = append(t.out, dataplane.DropCount{Protocol: p, To: to})
	}
	if how == Rejected {
		t.out[i].Rejected = packets
	} else {
		t.out[i].Dropped = packets
	}
}
