package alloc

import (
	"errors"
	"math"
	"net/netip"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

func mustAddrs(t testing.TB, s string) *Addrs {
	t.Helper()
	r, err := NewAddrs(netip.MustParsePrefix(s))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// behaviour 164: offset = min(max(16, size/16), 256) for IPs.
func TestSizesAndBands(t *testing.T) {
	for _, c := range []struct {
		prefix       string
		size, static uint64
	}{
		{"10.0.0.0/32", 0, 0},
		{"10.0.0.0/31", 0, 0},
		{"10.0.0.0/30", 2, 0},
		{"10.0.0.0/28", 14, 0},
		{"10.0.0.0/27", 30, 16},
		{"10.0.0.0/24", 254, 16},
		{"10.0.0.0/22", 1022, 64},
		{"10.96.0.0/16", 65534, 256},
		{"10.96.0.0/12", 1048574, 256},
		{"fd00::/128", 0, 0},
		{"fd00::/124", 15, 0},
		{"fd00:10:96::/112", 65535, 256},
		{"fd00::/64", math.MaxUint64, 256},
	} {
		r := mustAddrs(t, c.prefix)
		if r.Size() != c.size || r.pool.static.size != c.static {
			t.Errorf("%s: size %d static %d, want %d and %d", c.prefix, r.Size(), r.pool.static.size, c.size, c.static)
		}
	}
	for _, bad := range []netip.Prefix{{}, netip.MustParsePrefix("fd00::/63"), netip.MustParsePrefix("::ffff:10.0.0.0/120")} {
		if _, err := NewAddrs(bad); err == nil {
			t.Errorf("NewAddrs(%v) gave no error", bad)
		}
	}
	_, err := NewAddrs(netip.MustParsePrefix("fd00::/63"))
	if want := "IP range fd00::/63 is too large: the shortest allowed prefix length is 64"; err == nil || err.Error() != want {
		t.Errorf("NewAddrs(fd00::/63) = %v, want %s", err, want)
	}
}

// behaviour 164: offset = min(max(16, size/32), 128) for node ports.
func TestPortBands(t *testing.T) {
	for _, c := range []struct {
		ports  svc.PortRange
		static uint64
	}{
		{svc.PortRange{First: 30000, Last: 32767}, 86},
		{svc.PortRange{First: 30000, Last: 30014}, 0},
		{svc.PortRange{First: 30000, Last: 30015}, 16},
		{svc.PortRange{First: 1, Last: 65535}, 128},
	} {
		if got := NewPorts(c.ports).pool.static.size; got != c.static {
			t.Errorf("%v: static band %d, want %d", c.ports, got, c.static)
		}
	}
}

func TestErrors(t *testing.T) {
	r := mustAddrs(t, "10.0.0.0/30")
	for _, out := range []string{"10.0.0.0", "10.0.0.3", "10.0.0.4", "9.255.255.255", "::1"} {
		err := r.Allocate(netip.MustParseAddr(out))
		if !isNotInRange(err) || isFull(err) || isAllocated(err) {
			t.Errorf("%s: %v", out, err)
		}
	}
	want := "the provided IP (10.0.0.0) is not in the valid range. The range of valid IPs is 10.0.0.0/30"
	if err := r.Allocate(netip.MustParseAddr("10.0.0.0")); err.Error() != want {
		t.Errorf("text %q, want %q", err, want)
	}
	a := netip.MustParseAddr("10.0.0.1")
	if err := r.Allocate(a); err != nil {
		t.Fatal(err)
	}
	if err := r.Allocate(a); !errors.Is(err, ErrAllocated) || err.Error() != "provided IP is already allocated" {
		t.Error(err)
	}
	if b, err := r.AllocateNext(); err != nil || b != netip.MustParseAddr("10.0.0.2") {
		t.Error(b, err)
	}
	var full *FullError
	if _, err := r.AllocateNext(); !errors.As(err, &full) || full.Range != "10.0.0.0/30" {
		t.Error(err)
	}

	p := NewPorts(svc.PortRange{First: 30000, Last: 30000})
	if err := p.Allocate(29999); !isNotInRange(err) ||
		err.Error() != "provided port is not in the valid range. The range of valid ports is 30000-30000" {
		t.Error(err)
	}
	if n, err := p.AllocateNext(); err != nil || n != 30000 {
		t.Error(n, err)
	}
	if err := p.Allocate(30000); !isAllocated(err) || err.Error() != "provided port is already allocated" {
		t.Error(err)
	}
	if _, err := p.AllocateNext(); !isFull(err) || err.Error() != "range is full: 30000-30000" {
		t.Error(err)
	}
}

// Every port of a range is given out once; one that is released is free again.
func TestPortsAreGivenOutOnce(t *testing.T) {
	p := NewPorts(svc.PortRange{First: 30000, Last: 30039})
	seen := map[uint16]bool{}
	for range 40 {
		n, err := p.AllocateNext()
		if err != nil || n < 30000 || n > 30039 || seen[n] || !p.Has(n) {
			t.Fatalf("port %d, %v; taken: %t, given out: %v", n, err, p.Has(n), seen)
		}
		seen[n] = true
	}
	for _, n := range []uint16{30000, 30017, 30039} {
		p.Release(n)
		if p.Has(n) || p.Used() != 39 {
			t.Errorf("%d is taken after its release: %t, %d used", n, p.Has(n), p.Used())
		}
		if again, err := p.AllocateNext(); err != nil || again != n {
			t.Errorf("port %d, %v, want %d, the only free one", again, err, n)
		}
	}
	for _, n := range []uint16{29999, 30040} {
		if p.Release(n); p.Has(n) || p.Used() != 40 {
			t.Errorf("%d is of the range", n)
		}
	}
}

// behaviour 164: the dynamic band is used up before the static one is touched.
func TestDynamicBandFirst(t *testing.T) {
	r := mustAddrs(t, "10.0.0.0/25")
	static := netip.MustParsePrefix("10.0.0.0/28")
	firstDynamic := netip.MustParseAddr("10.0.0.17")
	for n := range r.Size() {
		a, err := r.AllocateNext()
		if err != nil {
			t.Fatal(err)
		}
		inStatic := a.Less(firstDynamic)
		if inStatic != (n >= r.Size()-16) {
			t.Fatalf("choice %d of %d is %s, the static band is %s and 10.0.0.16", n, r.Size(), a, static)
		}
	}
	if _, err := r.AllocateNext(); !isFull(err) {
		t.Error(err)
	}
}

// The last free address of a large range is found, and as fast as any other.
func TestLastFreeOfLargeRange(t *testing.T) {
	r := mustAddrs(t, "10.0.0.0/16")
	last := netip.MustParseAddr("10.0.200.7")
	for a := netip.MustParseAddr("10.0.0.1"); r.Contains(a); a = a.Next() {
		if a != last {
			if err := r.Allocate(a); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 1000 {
		a, err := r.AllocateNext()
		if err != nil || a != last {
			t.Fatal(a, err)
		}
		r.Release(a)
	}
}

// Memory follows what is taken: a /64 with a few addresses has a few words, and
// none when all are freed.
func TestSparse(t *testing.T) {
	r := mustAddrs(t, "fd00::/64")
	var got []netip.Addr
	for range 100 {
		a, err := r.AllocateNext()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, a)
	}
	if n := len(r.pool.dynamic.words); n > 100 {
		t.Errorf("%d words for 100 addresses", n)
	}
	if err := r.Allocate(netip.MustParseAddr("fd00::ffff:ffff:ffff:ffff")); err != nil {
		t.Error("the last address of an IPv6 range is usable:", err)
	}
	r.Release(netip.MustParseAddr("fd00::ffff:ffff:ffff:ffff"))
	for _, a := range got {
		r.Release(a)
	}
	if r.Used() != 0 || len(r.pool.dynamic.words) != 0 {
		t.Error("something is left after all was freed")
	}
	for i, c := range r.pool.dynamic.counts {
		if len(c) != 0 {
			t.Errorf("level %d has %d entries left", i, len(c))
		}
	}
}

func TestPeek(t *testing.T) {
	r := mustAddrs(t, "10.0.0.0/30")
	for range 3 {
		if a, err := r.Peek(); err != nil || !r.Contains(a) || r.Has(a) {
			t.Fatal(a, err)
		}
	}
	if r.Used() != 0 {
		t.Fatal("a peek took an address")
	}
	first, last := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	if err := r.Allocate(first); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if a, err := r.Peek(); a != last || err != nil {
			t.Fatalf("a peek does not see that %s is taken: %s, %v", first, a, err)
		}
	}
	if err := r.Allocate(last); err != nil {
		t.Fatal(err)
	}
	if a, err := r.Peek(); !isFull(err) {
		t.Fatal(a, err)
	}
	p := NewPorts(svc.PortRange{First: 1, Last: 1})
	if n, err := p.Peek(); n != 1 || err != nil || p.Used() != 0 {
		t.Fatal(n, err, p.Used())
	}
}

// The range against a map: the same answers in the same order of calls.
func TestAddrsAgainstMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefix := rapid.SampledFrom([]string{"10.0.0.0/29", "10.1.2.0/26", "10.0.0.0/20", "fd00::/124", "fd00::/120", "fd00::/64"}).Draw(t,
			"range")
		r, err := NewAddrs(netip.MustParsePrefix(prefix))
		if err != nil {
			t.Fatal(err)
		}
		model := map[netip.Addr]bool{}
		addr := rapid.Custom(func(t *rapid.T) netip.Addr {
			a := netip.MustParsePrefix(prefix).Addr()
			for range rapid.IntRange(0, 70).Draw(t, "steps") {
				a = a.Next()
			}
			return a
		})
		valid := func(a netip.Addr) bool {
			p := netip.MustParsePrefix(prefix)
			if !p.Contains(a) || a == p.Addr() {
				return false
			}
			return !a.Is4() || p.Contains(a.Next())
		}
		t.Repeat(map[string]func(*rapid.T){
			"allocate": func(t *rapid.T) {
				a := addr.Draw(t, "addr")
				err := r.Allocate(a)
				switch {
				case !valid(a):
					if !isNotInRange(err) {
						t.Fatalf("%s: %v, want out of range", a, err)
					}
				case model[a]:
					if !isAllocated(err) {
						t.Fatalf("%s: %v, want allocated", a, err)
					}
				case err != nil:
					t.Fatalf("%s: %v", a, err)
				default:
					model[a] = true
				}
			},
			"next": func(t *rapid.T) {
				a, err := r.AllocateNext()
				if uint64(len(model)) == r.Size() {
					if !isFull(err) {
						t.Fatalf("full range gave %v, %v", a, err)
					}
					return
				}
				if err != nil || model[a] || !valid(a) {
					t.Fatalf("next gave %v, %v; taken %v valid %v", a, err, model[a], valid(a))
				}
				model[a] = true
			},
			"release": func(t *rapid.T) {
				a := addr.Draw(t, "addr")
				r.Release(a)
				delete(model, a)
			},
			"": func(t *rapid.T) {
				if r.Used() != uint64(len(model)) {
					t.Fatalf("used %d, want %d", r.Used(), len(model))
				}
				for a := range model {
					if !r.Has(a) {
						t.Fatalf("%s is lost", a)
					}
				}
			},
		})
	})
}

// A set has levels up to the one that is a single block: with fewer nthFree would
// go through many blocks, and more would cost each change something.
func TestLevels(t *testing.T) {
	for size, want := range map[uint64]int{
		1: 1, 1<<12 - 1: 1, 1 << 12: 2, 1<<18 - 1: 2, 1 << 18: 3, 1 << 54: 9, 1<<60 - 1: 9, 1 << 60: 10, math.MaxUint64: 10,
	} {
		if got := len(newSet(size).counts); got != want {
			t.Errorf("a set below %d has %d levels, want %d", size, got, want)
		}
	}
}

// nthFree against counting one by one.
func TestNthFreeAgainstScan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Uint64Range(1, 20000).Draw(t, "size")
		s := newSet(size)
		for _, off := range rapid.SliceOfN(rapid.Uint64Range(0, size-1), 0, 300).Draw(t, "taken") {
			s.add(off)
		}
		if from := rapid.Uint64Range(0, size).Draw(t, "dense from"); from < size {
			for off := from; off < min(size, from+5000); off++ {
				s.add(off)
			}
		}
		if s.used == size {
			return
		}
		n := rapid.Uint64Range(0, size-s.used-1).Draw(t, "n")
		want, left := uint64(0), n
		for ; s.has(want) || left > 0; want++ {
			if !s.has(want) {
				left--
			}
		}
		if got := s.nthFree(n); got != want {
			t.Fatalf("free offset %d of %d is %d, want %d", n, size, got, want)
		}
	})
}

// What is taken behind the free offset that is asked for does not count.
func TestNthFreeBeforeTheTaken(t *testing.T) {
	for _, size := range []uint64{20000, 1 << 20, 1 << 40} {
		s := newSet(size)
		for off := size - 5000; off < size-4900; off++ {
			s.add(off)
		}
		for _, n := range []uint64{0, 4095, 4096, 8000, size - 5001} {
			if got := s.nthFree(n); got != n {
				t.Errorf("free offset %d of %d is %d", n, size, got)
			}
		}
		if got := s.nthFree(size - 5000); got != size-4900 {
			t.Errorf("the free offset behind the taken ones of %d is %d", size, got)
		}
	}
}

func TestConcurrentChoicesDiffer(t *testing.T) {
	p := NewPorts(svc.PortRange{First: 30000, Last: 32767})
	var mu sync.Mutex
	seen := map[uint16]bool{}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 2768 / 16 {
				n, err := p.AllocateNext()
				mu.Lock()
				if err != nil || seen[n] {
					t.Errorf("%d twice or %v", n, err)
				}
				seen[n] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if _, err := p.AllocateNext(); len(seen) != 2768 || !isFull(err) {
		t.Errorf("%d ports given out, then %v", len(seen), err)
	}
}

func BenchmarkAllocateNext(b *testing.B) {
	for _, c := range []struct {
		name string
		fill float64
	}{{"empty", 0}, {"half", 0.5}, {"99percent", 0.99}} {
		b.Run(c.name, func(b *testing.B) {
			r := mustAddrs(b, "10.0.0.0/12")
			for range int(c.fill * float64(r.Size())) {
				if _, err := r.AllocateNext(); err != nil {
					b.Fatal(err)
				}
			}
			b.ResetTimer()
			for range b.N {
				a, err := r.AllocateNext()
				if err != nil {
					b.Fatal(err)
				}
				r.Release(a)
			}
		})
	}
}
