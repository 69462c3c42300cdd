package cli

import (
	"log/slog"
	"os"
	"runtime/debug"

	"github.com/fairlead/fairlead/internal/kernel/residence"
)

// keepHeapSmall makes the heap of a component that runs for itself grow no
// faster than that of up does.
func keepHeapSmall() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(upGCPercent)
	}
}

// giveBack returns the memory that only the start of the process needed.
func giveBack(log *slog.Logger) {
	if err := residence.Trim(); err != nil {
		log.Debug("memory that only the start needed stays", "err", err)
	}
}
