package lifecycle

import (
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"sync"

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
