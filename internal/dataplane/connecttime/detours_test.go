package connecttime

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// An endpoint is known as one that attempts were led away from as long as such a detour is there.
func TestLeadsFrom(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 35))
	var routes []route
	var ends []netip.AddrPort
	for i := range 6 {
		ends = append(ends, flows.AP(fmt.Sprintf("10.244.0.%d:80", i+1)))
		for port := range 4 {
			routes = append(routes, route{flows.AP(fmt.Sprintf("10.244.1.7:%d", 40000+port)), ends[i]})
		}
	}
	d := noDetours()
	for step := range 500 {
		if r.IntN(8) > 0 {
			d.lead(routes[r.IntN(len(routes))], ends[r.IntN(len(ends))])
		} else {
			of := map[route]bool{}
			for _, one := range routes {
				of[one] = r.IntN(3) == 0
			}
			d.keep(of)
		}
		want := map[netip.AddrPort]bool{}
		for one := range d.all {
			want[one.to] = true
		}
		for _, at := range ends {
			if d.leadsFrom(at) != want[at] {
				t.Fatalf("step %d: led from %s: %v, want %v", step, at, !want[at], want[at])
			}
		}
		if len(d.from) != len(want) {
			t.Fatalf("step %d: %d endpoints are remembered, want %d", step, len(d.from), len(want))
		}
	}
}

// A sweep looks at each noted connection, of which there may be 131,072, whatever the number of detours: some milliseconds, where a
// walk over the detours for each of them takes seconds.
func TestManyDetours(t *testing.T) {
	d := noDetours()
	for i := range maxDetours + 1 {
		r := route{netip.AddrPortFrom(web4.Addr(), uint16(i)), netip.AddrPortFrom(web4.Addr(), uint16(i))}
		if room := d.lead(r, web4); room != (i < maxDetours) {
			t.Fatalf("there is room for detour %d: %v", i, room)
		}
	}
	other := flows.AP("10.244.0.1:80")
	if d.leadsFrom(other) || len(d.from) != maxDetours {
		t.Errorf("%d endpoints are remembered, want %d", len(d.from), maxDetours)
	}
	begin := time.Now()
	for range 1 << 17 {
		d.leadsFrom(other)
	}
	if took := time.Since(begin); took > time.Second {
		t.Errorf("the looks took %s, want 1 s at most", took)
	}
}
