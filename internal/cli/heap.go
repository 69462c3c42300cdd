package cli

import (
	"os"
	"runtime/debug"
)

// keepHeapSmall makes the heap of a component that runs for itself grow no
// faster than that of up does.
func keepHeapSmall() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(upGCPercent)
	}
}
