package speaker

import (
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/quorum"
)

// peerMACs are the hardware addresses of the cluster's speakers, and of speakers that have left for an hour: neighbours
// may still mention them.
type peerMACs struct {
	mu   sync.RWMutex
	macs map[announce.MAC]time.Time // when it was last seen
}

func (p *peerMACs) has(m announce.MAC) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	_, known := p.macs[m]
	return known
}

// forgetMAC is after how long the hardware address of a speaker that has gone is foreign.
const forgetMAC = time.Hour

func (p *peerMACs) learn(members []quorum.Member, links func(*quorum.Member) []memberLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.macs == nil {
		p.macs = map[announce.MAC]time.Time{}
	}
	now := time.Now()
	for i := range members {
		for _, l := range links(&members[i]) {
			if len(l.MAC) == len(announce.MAC{}) {
				p.macs[announce.MAC(l.MAC)] = now
			}
		}
	}
	for m, seen := range p.macs {
		if now.Sub(seen) > forgetMAC && len(p.macs) > len(members)*maxLinks {
			delete(p.macs, m)
		}
	}
}
