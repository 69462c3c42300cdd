package table

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"unique"

	"github.com/fairlead/fairlead/internal/svc"
)

// Who writes a Service decides how many ports and endpoints it has: what its tables of hops would take together is bounded.
func TestHopsAreBounded(t *testing.T) {
	for _, c := range []struct{ endpoints, most int }{{8, 134}, {9, 16}, {64, 16}, {65, 2}, {5000, 2}} {
		f := forwarding{nextHops: map[nodeName]NextHop{}}
		var all []Candidate
		for i := range c.endpoints {
			node := unique.Make(fmt.Sprintf("n%d", i%100))
			f.nextHops[node] = NextHop{IPv4: netip.AddrFrom4([4]byte{192, 168, 0, byte(i % 100)})}
			at := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
			all = append(all, Candidate{Addr: netip.AddrPortFrom(at, 80), State: Ready, Node: node})
		}
		hops := func(ports int) ([]Hop, []Problem) {
			var said complaints
			got := f.hops(all, func(*Candidate) bool { return true }, Key{Family: svc.IPv4}, svc.TCP, "here", ports, &said)
			return got, said.problems
		}
		if got, said := hops(c.most); len(got) != min(c.endpoints, 100) || len(said) > 0 {
			t.Errorf("%d endpoints and %d ports: %d hops, %v", c.endpoints, c.most, len(got), said)
		}
		got, said := hops(c.most + 1)
		if len(got) > 0 || len(said) != 1 || said[0].Reason != ReasonForwardingIgnored ||
			!strings.Contains(said[0].Message, fmt.Sprintf("%d ports, and it has %d;", c.most, c.most+1)) {
			t.Errorf("%d endpoints and a port too many: %d hops, %v", c.endpoints, len(got), said)
		}
	}
}
