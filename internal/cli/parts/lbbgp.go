package parts

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/fairlead/fairlead/internal/lb/bgp"
)

// bgpPeersValue is the flag --lb-bgp-peer.
type bgpPeersValue []bgp.Peer

func (v *bgpPeersValue) String() string { return strings.Join(v.Values(), " ") }

func (v *bgpPeersValue) Values() (out []string) {
	for _, p := range *v {
		out = append(out, p.String())
	}
	return out
}

func (*bgpPeersValue) Type() string { return "PEER" }

// Set adds a peer.
func (v *bgpPeersValue) Set(text string) error {
	p, err := bgp.ParsePeer(text)
	if err != nil {
		return err
	}
	for _, other := range *v {
		switch {
		case other.Name == p.Name:
			return fmt.Errorf("two peers are called %s; name= tells them apart", p.Name)
		case other.Address == p.Address && cmp.Or(other.Port, bgp.Port) == cmp.Or(p.Port, bgp.Port):
			return fmt.Errorf("%s is already the address of peer %s", p.Address, other.Name)
		}
	}
	*v = append(*v, p)
	return nil
}
