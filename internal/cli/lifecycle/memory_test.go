package lifecycle

import (
	"context"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/residence"
	"github.com/fairlead/fairlead/internal/testbed"
)

// released is how much of the heap the kernel has back, in bytes.
func released() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapReleased
}

// garbage takes memory of the heap, touches it, and drops it.
func garbage(mb int) {
	var all [][]byte
	for range mb {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		all = append(all, b)
	}
	runtime.KeepAlive(all)
}

// collected is how many collections were asked for.
func collected() uint32 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.NumForcedGC
}

// What a load leaves goes back to the kernel when the process rests, each time, and not while it works.
func TestMemoryIsReleasedAtRest(t *testing.T) {
	const mb, period = 64, 200 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		releaseAtRest(ctx, slog.New(slog.DiscardHandler), period)
	}()
	defer func() { cancel(); <-ended }()
	for range 2 {
		garbage(mb)
		before, forced := released(), collected()
		began, err := residence.ProcessorTime()
		if err != nil {
			t.Fatal(err)
		}
		early := false
		for end := time.Now().Add(4 * period); time.Now().Before(end); { // work
			early = early || released() > before+mb<<19
		}
		if took, _ := residence.ProcessorTime(); early && took-began > 2*period { // else others had the processors
			t.Error("memory is released while the process works")
		}
		// Not testbed.Until, whose checks every 20 ms are more than rest.
		for deadline := time.Now().Add(testbed.Patience); collected() == forced || released() < before+mb<<19; time.Sleep(period) {
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes are released after a rest, %d before, of %d MiB", released(), before, mb)
			}
		}
	}
}

// Memory is released once after a load, and not under a light load, however long it lasts.
func TestRest(t *testing.T) {
	now := time.Unix(0, 0)
	r := rest{period: restPeriod, loaded: true, last: now}
	allocated := uint64(0)
	times := func(periods int, took time.Duration) (n int) {
		for range periods {
			now, allocated = now.Add(restPeriod), allocated+spareMost
			if r.due(now, took, allocated, 2*spareMost) {
				n++
			}
		}
		return n
	}
	const idle, light, load = restPeriod / 1000, restPeriod / 40, restPeriod / 4
	for i, c := range []struct {
		periods int
		took    time.Duration
		want    int
	}{{restPause - 1, idle, 0}, {1000, light, 0}, {1000, idle, 1}, {10, load, 0}, {1000, light, 0}, {1, idle, 1}, {1, load, 0}, {10, idle, 0},
		{2, idle, 1}} {
		if got := times(c.periods, c.took); got != c.want {
			t.Errorf("%d: released %d times in %d periods of %s, want %d", i, got, c.periods, c.took, c.want)
		}
	}
}
