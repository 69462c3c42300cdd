package nft

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/plane"
)

// Lost is plane.Counter's. It reads two sets that packets fill: each refused or
// dropped one counts for its destination.
func (p *Plane) Lost(ctx context.Context) ([]plane.Lost, error) {
	p.counting.Lock()
	defer p.counting.Unlock()
	if p.counts == nil {
		return nil, nil
	}
	var out []plane.Lost
	for _, f := range p.families {
		at := map[plane.FrontKey]int{}
		for _, set := range []string{setRefused, setDiscarded} {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			err := p.counts.Elems(f.layout.table, set, func() {}, func(e nftables.Elem) {
				k, _, ok := f.layout.parseFront(e.Key, false)
				if !ok {
					return
				}
				i, known := at[k]
				if !known {
					i = len(out)
					at[k] = i
					out = append(out, plane.Lost{Protocol: k.Proto, To: netip.AddrPortFrom(k.Addr, k.Port)})
				}
				if set == setRefused {
					out[i].Refused = e.Packets
				} else {
					out[i].Dropped = e.Packets
				}
			})
			if err != nil {
				return nil, fmt.Errorf("nft %s: read set %s: %w", f.layout.table, set, err)
			}
		}
	}
	return out, nil
}
