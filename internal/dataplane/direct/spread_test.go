package direct

import (
	"fmt"
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

func hopsOf(counts ...int) []table.Hop {
	var out []table.Hop
	for i, n := range counts {
		out = append(out, table.Hop{Node: fmt.Sprintf("node-%d", i), Via: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), Endpoints: n})
	}
	return out
}

func shares(slots []uint16, hops int) []int {
	out := make([]int, hops)
	for _, h := range slots {
		out[h]++
	}
	return out
}

// Each hop has its share of the table, but for a slot or two, and a hop without endpoints none.
func TestSpreadIsEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		counts := rapid.SliceOfN(rapid.IntRange(0, 5), 1, 12).Draw(t, "endpoints")
		counts[0] = max(counts[0], 1)
		hops, total := hopsOf(counts...), 0
		for _, n := range counts {
			total += n
		}
		size := table.HopSlots(hops)
		for i, n := range shares(spread(hops, size), len(hops)) {
			want := float64(size) * float64(counts[i]) / float64(total)
			if n < int(want)-2 || n > int(want)+3 || counts[i] == 0 && n > 0 {
				t.Fatalf("%v in %d slots: hop %d has %d, want %.1f", counts, size, i, n, want)
			}
		}
	})
}

// A hop that leaves moves its own slots, and few others; the next hop's address does not count.
func TestSpreadStays(t *testing.T) {
	for _, n := range []int{3, 8, 20, 60, 200} {
		hops := hopsOf(make([]int, n)...)
		for i := range hops {
			hops[i].Endpoints = 1
		}
		size := table.HopSlots(hops)
		before, moved := spread(hops, size), 0
		for i := range hops {
			hops[i].Via = netip.Addr{}
		}
		for i, h := range spread(hops[:n-1], size) {
			if int(before[i]) != n-1 && h != before[i] {
				moved++
			}
		}
		if moved > size/6 {
			t.Errorf("of %d slots for %d hops, %d moved although their hop stays", size, n, moved)
		}
	}
}

// What the tables are is a contract between nodes of different versions.
func TestSpreadIsThatOfEarlierVersions(t *testing.T) {
	for _, c := range []struct {
		counts []int
		want   string
	}{
		{[]int{1, 1, 1}, "0120100001101010211212102212121222120212210200021102001221000"},
		{[]int{1, 2}, "0111110001111010111010101110101111101011111010011110101111100"},
	} {
		hops := hopsOf(c.counts...)
		text := ""
		for _, h := range spread(hops, table.HopSlots(hops)) {
			text += fmt.Sprint(h)
		}
		if text != c.want {
			t.Errorf("%v: %s, want %s", c.counts, text, c.want)
		}
	}
}

func BenchmarkFrontFor(b *testing.B) {
	for _, counts := range [][]int{{1, 1, 1}, {20, 20, 20}, make([]int, 200)} {
		hops := hopsOf(counts...)
		for i := range hops {
			hops[i].Endpoints = max(hops[i].Endpoints, 1)
		}
		l := newLayout(svc.IPv4)
		p := &table.ServicePort{Frontends: []table.Frontend{{Hops: hops}}}
		b.Run(fmt.Sprintf("%d", table.HopSlots(hops)), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				l.frontFor(p, &p.Frontends[0])
			}
		})
	}
}
