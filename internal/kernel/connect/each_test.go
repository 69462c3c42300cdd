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
	const lists, endpoints = 5000, 4
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
	found := make(map[[2]uint32]int, lists*endpoints)
	slots := &counting{Map: p.maps.Slots}
	if err := each(slots, func(k *programSlotKey, v *programEndpoint) {
		if v.addrPort() == at[k.Slot] {
			found[[2]uint32{k.List, k.Slot}]++
		}
	}); err != nil {
		t.Fatal(err)
	}
	for k, n := range found {
		if n != 1 {
			t.Errorf("%v is read %d times", k, n)
		}
	}
	if len(found) != lists*endpoints {
		t.Errorf("%d entries are read, want %d", len(found), lists*endpoints)
	}
	if slots.calls > 20 {
		t.Errorf("%d system calls for %d entries, want 20 at most", slots.calls, lists*endpoints)
	}
}

// BenchmarkRead is a read of 5,000 lists of 4 endpoints: in batches, and entry by entry.
func BenchmarkRead(b *testing.B) {
	p, err := Open(Config{Cgroup: testbed.Group(b).Dir, FS: testbed.BPFFS(b)})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	for list := range uint32(5000) {
		if err := p.PutSlots(list+1, make([]netip.AddrPort, 4)); err != nil {
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
			var v programEndpoint
			it := p.maps.Slots.Iterate()
			for it.Next(&k, &v) {
				_ = v
			}
			if err := it.Err(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
