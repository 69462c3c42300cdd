package direct

import (
	"hash/fnv"

	"github.com/fairlead/fairlead/internal/table"
)

// spread returns for each slot of a table of so many the index of a hop, each hop in proportion to its endpoints, which some hop must
// have. Only the names decide (Maglev: Eisenbud and others, NSDI 2016, section 3.4; a hop with fewer endpoints misses turns).
func spread(hops []table.Hop, size int) []uint16 {
	type turn struct{ next, step, due int }
	turns := make([]turn, len(hops))
	most := 0
	for i, h := range hops {
		a, b := hashes(h.Node)
		turns[i] = turn{next: int(a % uint64(size)), step: 1 + int(b%uint64(size-1))}
		most = max(most, h.Endpoints)
	}
	out, taken := make([]uint16, size), make([]bool, size)
	for left, round := size, 1; left > 0; round++ {
		for i := range hops {
			t := &turns[i]
			if round*hops[i].Endpoints < t.due+most || left == 0 {
				continue
			}
			t.due += most
			for taken[t.next] {
				t.next = (t.next + t.step) % size
			}
			taken[t.next], out[t.next] = true, uint16(i) //nolint:gosec // a hop has an endpoint, of which there are at most 65,535
			left--
		}
	}
	return out
}

// hashes returns two independent hashes of a name.
func hashes(name string) (uint64, uint64) {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	a := h.Sum64()
	_, _ = h.Write([]byte{0})
	return mix(a), mix(h.Sum64())
}

// mix spreads a hash over all bits (the finalizer of MurmurHash3): names that differ in the last letter have hashes of FNV that are
// close.
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
