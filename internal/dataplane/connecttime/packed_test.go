package connecttime

import (
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// A packed list has what the list has, and two are equal only if their lists are.
func TestPacked(t *testing.T) {
	some := []netip.AddrPort{flows.AP("10.244.0.1:80"), flows.AP("10.244.0.1:20480"), flows.AP("[fd00::1]:80"), {}}
	lists := rapid.SliceOfN(rapid.SampledFrom(some), 0, 4)
	rapid.Check(t, func(t *rapid.T) {
		a, b := lists.Draw(t, "a"), lists.Draw(t, "b")
		if got := pack(a).list(); !slices.Equal(got, a) || pack(a).len() != len(a) {
			t.Errorf("%v is %v, %d long, when it was packed", a, got, pack(a).len())
		}
		if (pack(a) == pack(b)) != slices.Equal(a, b) {
			t.Errorf("%v and %v: packed they are equal: %v", a, b, pack(a) == pack(b))
		}
	})
	if n := len(pack(some[:1])); n != 7 {
		t.Errorf("an endpoint of IPv4 takes %d bytes, want 7", n)
	}
}
