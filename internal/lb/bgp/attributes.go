package bgp

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// MaxCommunities is how many communities a route may have, so that its attributes
// always fit into a message beside some prefixes.
const MaxCommunities = 63

// DefaultLocalPreference is the preference that routers give to a route without one.
const DefaultLocalPreference = 100

// Attributes are what routes have beside their prefix.
type Attributes struct {
	// Communities are for the filters of routers; at most MaxCommunities.
	Communities []Community
	// LocalPreference is only sent to internal peers; nil is 100.
	LocalPreference *uint32
	// ASPathPrepend is how often the AS number is added to the path that external peers get.
	ASPathPrepend int
	// AggregationLength is the length of the prefix that is announced while any address
	// in it is. Zero, or the length of the address, is a route for each address.
	AggregationLength int
	// Peers are the names of the peers that get the route; empty is all.
	Peers []string
}

// prefix returns the route by which an address with attributes t is announced.
func (t Attributes) prefix(a netip.Addr) netip.Prefix {
	bits := a.BitLen()
	if t.AggregationLength > 0 && t.AggregationLength < bits {
		bits = t.AggregationLength
	}
	return netip.PrefixFrom(a, bits).Masked()
}

// isFor reports whether a peer gets the route.
func (t Attributes) isFor(peer string) bool {
	return len(t.Peers) == 0 || slices.Contains(t.Peers, peer)
}

// with returns the attributes of a route that is announced with t and o: the communities of both, the higher preference and the shorter
// path.
func (t Attributes) with(o Attributes) Attributes {
	out := Attributes{AggregationLength: t.AggregationLength, Communities: slices.Concat(t.Communities, o.Communities),
		ASPathPrepend: min(t.ASPathPrepend, o.ASPathPrepend)}
	slices.SortFunc(out.Communities, func(a, b Community) int { return strings.Compare(a.String(), b.String()) })
	out.Communities = slices.Compact(out.Communities)
	if t.LocalPreference != nil || o.LocalPreference != nil {
		out.LocalPreference = new(max(t.localPreference(), o.localPreference()))
	}
	return out
}

// identity is equal for attributes that are equal for every router.
func (t Attributes) identity() string {
	peers := slices.Clone(t.Peers)
	slices.Sort(peers)
	return fmt.Sprint(t.AggregationLength, t.key(), slices.Compact(peers))
}

// key is equal for attributes that a router sees as equal.
func (t Attributes) key() string {
	if len(t.Communities) == 0 && t.LocalPreference == nil && t.ASPathPrepend == 0 {
		return ""
	}
	return fmt.Sprint(t.localPreference(), t.ASPathPrepend, t.Communities)
}

func (t Attributes) localPreference() uint32 {
	if t.LocalPreference == nil {
		return DefaultLocalPreference
	}
	return *t.LocalPreference
}

// Community is a standard community (RFC 1997) of two parts of 16 bits, or a large
// one (RFC 8092) of three parts of 32.
type Community struct {
	Large bool
	Parts [3]uint32
}

// wellKnown are the names that routers' configurations have for some communities.
var wellKnown = map[string]uint16{ // the part after 65535
	"no-export": 0xff01, "no-advertise": 0xff02, "no-export-subconfed": 0xff03, "blackhole": 666,
}

// ParseCommunity reads "64512:100", "64512:1:2" or the name of a well-known
// community.
func ParseCommunity(s string) (Community, error) {
	if low, ok := wellKnown[s]; ok {
		return Community{Parts: [3]uint32{math.MaxUint16, uint32(low)}}, nil
	}
	parts := strings.Split(s, ":")
	c := Community{Large: len(parts) == 3}
	bits := 16
	if c.Large {
		bits = 32
	}
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 10, bits)
		if err != nil || len(parts) < 2 || len(parts) > 3 {
			return Community{}, fmt.Errorf("community %q: want two numbers to 65535 as in 64512:100, "+
				"three to 4294967295 as in 64512:1:2, or one of %s", s, strings.Join(slices.Sorted(maps.Keys(wellKnown)), ", "))
		}
		c.Parts[i] = uint32(n)
	}
	return c, nil
}

// String returns the community in numbers.
func (c Community) String() string {
	if c.Large {
		return fmt.Sprintf("%d:%d:%d", c.Parts[0], c.Parts[1], c.Parts[2])
	}
	return fmt.Sprintf("%d:%d", c.Parts[0], c.Parts[1])
}
