package main

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"time"
)

// hogsLine is what the test logs of the requests' times.
var hogsLine = regexp.MustCompile(`99 of 100 requests take (\S+) at most, (\S+) beside hogs`)

// runHogs runs the test of package runner/guest on its own machine.
func (b *bench) runHogs(ctx context.Context) ([]figure, error) {
	out, log, err := b.guest(ctx, "hogs", "initrd")
	if err != nil {
		return nil, err
	}
	found := hogsLine.FindSubmatch(out)
	if found == nil || !bytes.Contains(out, []byte("--- PASS: TestLimits")) {
		err = fmt.Errorf("the test did not pass: see %s", log)
	}
	if found == nil {
		return nil, err
	}
	var took [2]time.Duration
	for i := range took {
		d, e := time.ParseDuration(string(found[i+1]))
		if e != nil {
			return nil, e
		}
		took[i] = d
	}
	return []figure{{
		what: "p99 of requests to a Pod beside hogs of processes, memory and disk", unit: microseconds,
		fairlead: microseconds.in(took[1]), peer: microseconds.in(took[0]), peerName: "hogs asleep", want: expectation{share: 2},
	}}, err
}
