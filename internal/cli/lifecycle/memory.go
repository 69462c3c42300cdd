package lifecycle

import (
	"context"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/residence"
)

// This file keeps the memory of a process small: its heap is smaller than Go's default, and
// memory that only the start needed is released. $GOGC turns the first off; $GOMEMLIMIT is a
// limit as usual.

// gcPercent keeps the heap small at the cost of more frequent collections: all
// components together have 195 MB in place of 237 MB with 1,000 Services of 10
// endpoints.
const gcPercent = 50

// KeepHeapSmall sets gcPercent.
func KeepHeapSmall() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// While a DNS server starts nothing is collected before it has taken startMemory,
// and from then on startGCPercent applies. The lists of a thousand Services take
// less than that, and collecting would be a third of the work until the first
// answer.
const (
	startMemory    = 64 << 20
	startGCPercent = 100
)

// CollectLater applies startMemory and startGCPercent until started is called.
func CollectLater() (started func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	limit := debug.SetMemoryLimit(-1)
	collect := func(percent int) {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	}
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(min(limit, startMemory))
	var mu sync.Mutex
	over := false
	// The cleanup runs after the first collection.
	runtime.AddCleanup(new([16]byte), func(percent int) {
		mu.Lock()
		defer mu.Unlock()
		if !over {
			collect(percent)
		}
	}, startGCPercent)
	return func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
		collect(gcPercent)
	}
}

// LargeLoad is the number of service ports from which the proxy releases memory
// once they are programmed, and not only when the process has settled: that may be
// before a large load has ended, and the lists it is made from are several times
// as large as what remains (at 50,000 Services of 10 endpoints 386 MB in place of
// 229).
const LargeLoad = 1000

// ReleaseMemory releases the memory that only the start of the process needed: of
// an API server with nothing in it, 24 MB of 158 (9 MB of heap, 15 MB of pages of
// the program).
func ReleaseMemory(log *slog.Logger) {
	if err := residence.Trim(); err != nil {
		log.Debug("cannot release the memory of the start", "err", err)
	}
}

// A process is under load if it has taken 1/loadShare of a processor for restPeriod, and rests if it has taken less than 1/restShare. It
// releases its memory once after a load, restPause after the last time at the earliest, if it has allocated spareMost bytes since, and a
// quarter of its heap.
const (
	restPeriod = 5 * time.Second
	restPause  = 12 // periods
	loadShare  = 20
	restShare  = 100
	spareMost  = 8 << 20
)

// ReleaseAtRest releases memory when the process rests after a load, until ctx ends. Go collects what a load has left only after half as
// much again is allocated, or two minutes, and gives free memory back slowly: a load balancer whose clients keep their connections, and
// are silent, would keep the buffers and stacks of their requests.
func ReleaseAtRest(ctx context.Context, log *slog.Logger) { releaseAtRest(ctx, log, restPeriod) }

func releaseAtRest(ctx context.Context, log *slog.Logger, period time.Duration) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	before, r := time.Duration(0), rest{period: period, loaded: true, last: time.Now()} // the start is a load
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, err := residence.ProcessorTime()
		if err != nil {
			log.Debug("cannot tell whether the process rests", "err", err)
			return
		}
		allocated, live := heap()
		if r.due(time.Now(), now-before, allocated, live) {
			debug.FreeOSMemory() // the pages of the program stay: a request may need them at once
		}
		before = now
	}
}

// rest decides when a process releases its memory.
type rest struct {
	period   time.Duration
	loaded   bool      // since last
	last     time.Time // when memory was released
	released uint64    // allocated by then
}

// due reports whether the process must release memory now, at the end of a period. took is the processor time of that period; allocated
// and live are the results of heap.
func (r *rest) due(now time.Time, took time.Duration, allocated, live uint64) bool {
	r.loaded = r.loaded || took >= r.period/loadShare
	if !r.loaded || took >= r.period/restShare || now.Sub(r.last) < restPause*r.period ||
		allocated-r.released < max(spareMost, live/4) {
		return false
	}
	r.loaded, r.last, r.released = false, now, allocated
	return true
}

// heap returns how many bytes were allocated since the process began, and how many the last collection has found in use.
func heap() (allocated, live uint64) {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64(), s[1].Value.Uint64()
}
