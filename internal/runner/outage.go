package runner

import (
	"context"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/runner/status"
	"github.com/fairlead/fairlead/internal/svc"
)

// outage keeps the Pods reported as not ready while the node fails to connect them
// (docs/design/019-broken-paths.md).
type outage struct {
	state status.Outage
	wake  loop.Signal // the network may have failed or recovered
}

// run follows failure, which wake announces, until ctx ends. It calls changed with the new reason, "" at the end of an
// outage. An outage begins after svc.NotReadyHold of failures, and ends at once.
func (o *outage) run(ctx context.Context, failure func() error, changed func(why string)) {
	var since time.Time // of the failures; zero for none
	down := false
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
		case <-timer.C:
		}
		err, why := failure(), ""
		switch now := time.Now(); {
		case err == nil:
			since = time.Time{}
		case since.IsZero():
			since = now
			timer.Reset(svc.NotReadyHold)
			continue
		case now.Sub(since) < svc.NotReadyHold:
			continue
		default:
			why = "the node is not Ready: " + strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		if down != (why != "") { // the first reason stays: others may change all the time
			down = !down
			o.state.Set(why)
			changed(why)
		}
	}
}
