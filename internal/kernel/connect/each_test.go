package connect

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// counting counts the system calls that read a map, and has the first one fail as for entries that have the same hash.
type counting struct {
	*ebpf.Map
	calls int
}

func (c *counting) BatchLookup(cursor *ebpf.MapBatchCursor, keys, values any, opts *ebpf.BatchOptions) (int, error) {
	if c.calls++; c.calls == 1 {
		return 0, unix.ENOSPC
	}
	return c.Map.BatchLookup(cursor, keys, values, opts)
}

// A large map is read by few system calls, each entry once.
func TestReadsInBatches(t *testing.T) {
	const lists, endpoints = 20_000, 4
	p, err := Open(Config{Cgroup: testbed.Group(t).Dir, FS: testbed.BPFFS(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	at := make([]netip.AddrPort, endpoints)
	for i := range at {
		at[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i)}), 80)
	}
	for list := range uint32(lists) {
		if err := p.PutSlots(list+1, at); err != nil {
			t.Fatal(err)
		}
	}
	found := make(map[[2]uint32]int, lists)
	slots := &counting{Map: p.maps.Slots}
	if err := each(slots, func(k *programSlotKey, v *programBlock) {
		if v.at(1) == at[1] {
			found[[2]uint32{k.List, k.Block}]++
		}
	}); err != nil {
		t.Fatal(err)
	}
	for k, n := range found {
		if n != 1 {
			t.Errorf("%v is read %d times", k, n)
		}
	}
	if len(found) != lists {
		t.Errorf("%d entries are read, want %d", len(found), lists)
	}
	if slots.calls < 3 || slots.calls > 20 {
		t.Errorf("%d system calls for %d entries, want 3 to 20", slots.calls, lists)
	}
}

// BenchmarkRead is a read of 5,000 lists of 4 endpoints: in batches, and entry by entry.
func BenchmarkRead(b *testing.B) {
	p, err := Open(Config{Cgroup: testbed.Group(b).Dir, FS: testbed.BPFFS(b)})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	at := netip.MustParseAddrPort("10.244.0.1:80")
	for list := range uint32(5000) {
		if err := p.PutSlots(list+1, []netip.AddrPort{at, at, at, at}); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("batches", func(b *testing.B) {
		for b.Loop() {
			if err := p.Slots(func(uint32, uint32, netip.AddrPort) {}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("entries", func(b *testing.B) {
		for b.Loop() {
			var k programSlotKey
			var v programBlock
			it := p.maps.Slots.Iterate()
			for it.Next(&k, &v) {
				for i := range uint32(4) {
					_ = v.at(i)
				}
			}
			if err := it.Err(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
