package lifecycle

import (
	"context"
	"log/slog"
	"time"

	"github.com/fairlead/fairlead/internal/systemd"
)

// watchdog reports to systemd that the components of this process are alive. One goroutine uses it.
type watchdog struct {
	unit       systemd.Unit
	log        *slog.Logger
	components []Component
	missed     int // answers one after the other
}

// mostMissed is how many answers may be missed, one after the other: one may be late on a busy machine.
const mostMissed = 1

// ticks returns when to call look, never where there is no watchdog.
func (w *watchdog) ticks() (c <-chan time.Time, stop func()) {
	if w.unit.Watchdog == 0 {
		return nil, func() {}
	}
	t := time.NewTicker(w.period())
	return t.C, t.Stop
}

// period lets systemd hear twice in time after an answer that was missed.
func (w *watchdog) period() time.Duration { return w.unit.Watchdog / 4 }

// look asks the components, within a period for all of them, and tells systemd.
func (w *watchdog) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, w.period())
	defer cancel()
	w.missed++
	for _, c := range w.components {
		if c.Alive == nil {
			continue
		}
		if err := c.Alive(ctx); err != nil {
			w.log.Error("component does not answer; without an answer systemd restarts this process", "component", c.Name, "err", err)
			if w.missed > mostMissed {
				return
			}
			w.notify(systemd.Alive)
			return
		}
	}
	w.missed = 0
	w.notify(systemd.Alive)
}

// notify reports a state of the process, if it is a unit that does.
func (w *watchdog) notify(state string) {
	if err := w.unit.Notify(state); err != nil {
		w.log.Warn("cannot notify systemd", "state", state, "err", err)
	}
}
