package proxy

import (
	"log/slog"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
)

const (
	// checkInterval is the least time between two looks at what the kernel does not
	// report changes of.
	checkInterval = time.Second
	// checkShare is how many times as long as a look takes it is until the next one,
	// so that they take 5 % of a processor at most.
	checkShare = 20
)

// checks decides when to look whether other programs have changed what a
// dataplane.Checker wrote.
type checks struct {
	checker dataplane.Checker // nil: the kernel reports everything
	timer   *time.Timer
	most    time.Duration // between two looks
	alarms  int           // with no longer than most between two of them
	alarmed time.Time     // the last one
	log     *slog.Logger
}

// newChecks returns checks of what d writes; most is after how long everything is
// compared anyway.
func newChecks(d dataplane.Applier, most time.Duration, log *slog.Logger) *checks {
	c := &checks{timer: newStoppedTimer(), most: most, log: log}
	if c.checker, _ = d.(dataplane.Checker); c.checker != nil {
		c.timer.Reset(checkInterval)
	}
	return c
}

// intact looks, and sets the timer for the next time. Every alarm doubles the wait until
// there has been none for the time of c.most: tables of iptables are other programs',
// too, whose changes do not matter here, and a comparison costs much more than a look.
func (c *checks) intact() bool {
	start := time.Now()
	ok, err := c.checker.Intact()
	wait := max(checkInterval, checkShare*time.Since(start))
	switch {
	case err != nil:
		c.log.Debug("cannot look whether rules were changed; they are compared periodically", "err", err)
		ok, wait = true, c.most
	case ok:
		if time.Since(c.alarmed) > c.most {
			c.alarms = 0
		}
	default:
		wait <<= min(c.alarms, 10)
		c.alarms++
		c.alarmed = time.Now()
	}
	c.timer.Reset(min(wait, c.most))
	return ok
}
