package node

import (
	"log/slog"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/preflight"
	"github.com/fairlead/fairlead/internal/svc"
)

// forwardedPeriod is how long a look at the machine's forwarding counts.
const forwardedPeriod = 10 * time.Second

// lookShare is how many times as long as a look the node rests before the next one, maxRest at most: a machine may have very many
// rules.
const (
	lookShare = 100
	maxRest   = time.Minute
)

// forwarded watches that the machine passes packets on, and repairs what it may.
type forwarded struct {
	log *slog.Logger
	// look returns what drops packets of Pods and Services, as preflight.DropsForwarded.
	look func() (reason, message string, err error)

	mu   sync.Mutex
	at   time.Time
	took time.Duration
	last corev1.NodeCondition
}

// newForwarded watches the packets of Pods and Services, whose ranges are given.
func newForwarded(log *slog.Logger, ranges []netip.Prefix) *forwarded {
	return &forwarded{log: log, look: func() (string, string, error) { return preflight.DropsForwarded(ranges) }}
}

// condition is the Node condition PacketsForwarded.
func (f *forwarded) condition() corev1.NodeCondition {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.at) < max(forwardedPeriod, min(f.took*lookShare, maxRest)) {
		return f.last
	}
	before := f.last.Message
	f.last = corev1.NodeCondition{
		Type: svc.PacketsForwarded, Status: corev1.ConditionTrue, Reason: "Forwarded", Message: "the machine forwards packets of Pods",
	}
	began := time.Now()
	reason, drops, err := f.look()
	f.took = time.Since(began)
	switch {
	case !f.repaired():
		f.last.Status, f.last.Reason, f.last.Message = corev1.ConditionFalse, "ForwardingOff",
			"the machine forwards no packets: run 'sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1'"
	case err != nil:
		f.last.Status, f.last.Reason, f.last.Message = corev1.ConditionUnknown, "Unknown", err.Error()
	case reason != "":
		f.last.Status, f.last.Reason, f.last.Message = corev1.ConditionFalse, reason, drops
	}
	if f.last.Status == corev1.ConditionFalse && f.last.Message != before {
		f.log.Error("packets of Pods are dropped", "reason", f.last.Message)
	}
	f.at = time.Now()
	return f.last
}

// repaired reports whether the machine forwards, after it was told to if another program had switched that off.
func (f *forwarded) repaired() bool {
	if link.Forwards() {
		return true
	}
	if err := link.Forward(); err != nil || !link.Forwards() {
		return false
	}
	if !f.at.IsZero() { // the first time an agent switches it on
		f.log.Warn("another program has switched forwarding off; it is on again")
	}
	return true
}
