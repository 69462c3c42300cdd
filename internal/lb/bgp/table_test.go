package bgp

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// Each peer gets the routes that are for it, and one route for each prefix: with the communities of all that make it for the peer, and
// the highest local preference.
func TestRoutesOfPeers(t *testing.T) {
	community := func(texts ...string) (out []Community) {
		for _, text := range texts {
			c, err := ParseCommunity(text)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, c)
		}
		return out
	}
	vip, other := netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("198.51.100.8")
	for name, c := range map[string]struct {
		announced map[netip.Addr][]Attributes
		want      map[string]string // routes by peer
	}{
		"to all": {map[netip.Addr][]Attributes{vip: {{}}}, map[string]string{"a": "198.51.100.7/32 100 []", "b": "198.51.100.7/32 100 []"}},
		"to one": {map[netip.Addr][]Attributes{vip: {{Peers: []string{"a"}}}}, map[string]string{"a": "198.51.100.7/32 100 []", "b": ""}},
		"another length for each": {map[netip.Addr][]Attributes{vip: {
			{Peers: []string{"a"}, Communities: community("1:1")}, {Peers: []string{"b"}, AggregationLength: 24},
		}}, map[string]string{"a": "198.51.100.7/32 100 [1:1]", "b": "198.51.100.0/24 100 []"}},
		"two for one peer": {map[netip.Addr][]Attributes{vip: {
			{Communities: community("2:2", "1:1")}, {Peers: []string{"b"}, Communities: community("3:3", "2:2"), LocalPreference: new(uint32(200))},
			{AggregationLength: 24, LocalPreference: new(uint32(50))},
		}}, map[string]string{"a": "198.51.100.0/24 50 [] 198.51.100.7/32 100 [2:2 1:1]",
			"b": "198.51.100.0/24 50 [] 198.51.100.7/32 200 [1:1 2:2 3:3]"}},
		"paths": {map[netip.Addr][]Attributes{
			vip:   {{ASPathPrepend: 3}, {ASPathPrepend: 2, Peers: []string{"b"}}},
			other: {{AggregationLength: 24, ASPathPrepend: 4}, {AggregationLength: 24, Peers: []string{"a"}}},
		}, map[string]string{"a": "198.51.100.0/24 100 [] 198.51.100.7/32 100 [] +3",
			"b": "198.51.100.0/24 100 [] +4 198.51.100.7/32 100 [] +2"}},
		"pools in one prefix": {map[netip.Addr][]Attributes{
			vip:   {{AggregationLength: 24, Peers: []string{"a"}}},
			other: {{AggregationLength: 24, Peers: []string{"b"}, Communities: community("1:1")}},
		}, map[string]string{"a": "198.51.100.0/24 100 []", "b": "198.51.100.0/24 100 [1:1]"}},
	} {
		x := newTable()
		for a, all := range c.announced {
			x.announce(a, []Attributes{{AggregationLength: 20}})
			x.announce(a, all)
			if again := x.announce(a, append(all, all...)); len(again) > 0 {
				t.Errorf("%s: what was announced again changes %s", name, again)
			}
		}
		for peer, want := range c.want {
			var got []string
			for _, p := range x.prefixes() {
				if a, _, ok := x.get(p, peer); ok {
					path := ""
					if a.ASPathPrepend > 0 {
						path = fmt.Sprint(" +", a.ASPathPrepend)
					}
					got = append(got, fmt.Sprint(p, " ", a.localPreference(), " ", a.Communities, path))
				}
			}
			slices.Sort(got)
			if text := strings.Join(got, " "); text != want {
				t.Errorf("%s: %s has %q, want %q", name, peer, text, want)
			}
		}
		for a := range c.announced {
			x.withdraw(a)
			if gone := x.withdraw(a); len(gone) > 0 {
				t.Errorf("%s: what was withdrawn again changes %s", name, gone)
			}
		}
		if left := x.prefixes(); len(left)+len(x.networks()) > 0 {
			t.Errorf("%s: %s are left", name, left)
		}
	}
}
