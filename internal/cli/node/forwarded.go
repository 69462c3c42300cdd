package node

import (
	"context"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/preflight"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// forwardedPeriod is how long a look at the machine's forwarding counts, where the
	// kernel reports no change: of iptables' legacy variant.
	forwardedPeriod = 10 * time.Second
	// forwardedPause is the least time between looks, if another program changes something
	// all the time.
	forwardedPause = 200 * time.Millisecond
)

// A machine may have very many rules: after a look the node rests lookShare times as long before the next one, changeShare
// times after a change, maxRest at most.
const (
	lookShare   = 100
	changeShare = 10
	maxRest     = time.Minute
)

// forwarded watches that the machine passes packets on, and repairs what it may.
type forwarded struct {
	log *slog.Logger
	// look returns what drops packets of Pods and Services, as preflight.DropsForwarded.
	look func(ctx context.Context) (reason, message string, err error)
	// moved is set after the kernel reported a change, changed when condition differs.
	moved, changed loop.Signal

	// looked and repairAt belong to the one goroutine that looks: whether it has looked before, and when it last logged a repair.
	looked   bool
	repairAt time.Time

	mu   sync.Mutex
	took time.Duration // by the last look
	last corev1.NodeCondition
}

// newForwarded watches such packets.
func newForwarded(log *slog.Logger, packets preflight.Packets) *forwarded {
	look := func(ctx context.Context) (string, string, error) { return preflight.DropsForwarded(ctx, packets) }
	first := corev1.NodeCondition{
		Type: svc.PacketsForwarded, Status: corev1.ConditionUnknown, Reason: "Unknown", Message: "the node has not looked yet",
	}
	return &forwarded{log: log, look: look, moved: loop.NewSignal(), changed: loop.NewSignal(), last: first}
}

// run looks at once, again as soon as the kernel reports a change, and periodically, until ctx ends.
func (f *forwarded) run(ctx context.Context) error {
	if stop, err := link.WatchForwarding(f.moved.Set); err != nil {
		f.log.Warn("cannot watch the machine's forwarding; looking at it periodically", "err", err, "period", forwardedPeriod)
	} else {
		defer stop()
	}
	if stop, err := watchPolicies(f.moved.Set); err != nil {
		f.log.Warn("cannot watch chains that drop packets; looking at them periodically", "err", err, "period", forwardedPeriod)
	} else {
		defer stop()
	}
	for {
		f.refresh(ctx)
		began := time.Now()
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(f.rest(forwardedPause, changeShare)):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-f.moved:
		case <-time.After(f.rest(forwardedPeriod, lookShare) - time.Since(began)):
		}
	}
}

// rest returns how long the last look counts: share times as long as it took, maxRest at most, and at least some time.
func (f *forwarded) rest(least time.Duration, share int) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return max(least, min(f.took*time.Duration(share), maxRest))
}

// watchPolicies calls changed after a change of a chain that forwarded packets pass.
func watchPolicies(changed func()) (stop func(), err error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	if err := c.WatchHook(nftables.Forward, []string{"FORWARD", "forward"}, changed); err != nil {
		_ = c.Close()
		return nil, err
	}
	return func() { _ = c.Close() }, nil
}

// refresh looks now, and sets changed if the condition is another one. The look may take seconds, in which condition answers.
func (f *forwarded) refresh(ctx context.Context) {
	began := time.Now()
	next := f.now(ctx)
	f.looked = true
	f.mu.Lock()
	before := f.last
	f.last, f.took = next, time.Since(began)
	f.mu.Unlock()
	if before.Status == next.Status && before.Message == next.Message {
		return
	}
	if next.Status == corev1.ConditionFalse {
		f.log.Error("packets of Pods are dropped", "reason", next.Message)
	}
	f.changed.Set()
}

// condition is the Node condition PacketsForwarded, as the last look found it: a Lease is renewed after it.
func (f *forwarded) condition() corev1.NodeCondition {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

// now looks, and repairs what it may.
func (f *forwarded) now(ctx context.Context) corev1.NodeCondition {
	c := corev1.NodeCondition{
		Type: svc.PacketsForwarded, Status: corev1.ConditionTrue, Reason: "Forwarded", Message: "the machine forwards packets of Pods",
	}
	reason, drops, err := f.look(ctx)
	switch {
	case !f.repaired():
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "ForwardingOff",
			"the machine forwards no packets: run 'sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1'"
	case err != nil:
		c.Status, c.Reason, c.Message = corev1.ConditionUnknown, "Unknown", err.Error()
	case reason != "":
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, reason, drops
	}
	return c
}

// repaired reports whether the machine forwards, after it was told to if another program had switched that off.
func (f *forwarded) repaired() bool {
	if link.Forwards() {
		return true
	}
	if err := link.Forward(); err != nil || !link.Forwards() {
		return false
	}
	// The first time an agent switches it on.
	if now := time.Now(); f.looked && now.Sub(f.repairAt) >= forwardedPeriod {
		f.repairAt = now
		f.log.Warn("another program has switched forwarding off; it is on again")
	}
	return true
}
