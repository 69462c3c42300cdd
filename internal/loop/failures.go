package loop

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// warnAfter is after how many failures in a row of one key the next one is a warning, whatever it is.
	warnAfter = 8
	// warnPeriod is the least time between two warnings of first failures: an outage concerns all keys.
	warnPeriod = 10 * time.Second
)

// Failures logs the failures of many keys: the first one at once as a warning, unless another client has only been faster, and one
// that does not end once more; others at the level debug. The zero value is ready. Methods may be called at any time.
type Failures struct {
	last atomic.Int64 // when a first failure was a warning, Unix time in nanoseconds
}

// Log logs a failure. requeues is how often the key has failed before, in a row.
func (f *Failures) Log(log *slog.Logger, requeues int, err error, message string, args ...any) {
	level := slog.LevelDebug
	switch {
	case requeues == warnAfter, requeues == 0 && !isRace(err) && f.due():
		level = slog.LevelWarn
	}
	log.Log(context.Background(), level, message, append(args, "err", err, "failures", requeues+1)...)
}

// due reports whether the last warning was warnPeriod ago.
func (f *Failures) due() bool {
	now, last := time.Now().UnixNano(), f.last.Load()
	return (last == 0 || now-last >= int64(warnPeriod)) && f.last.CompareAndSwap(last, now)
}

// isRace reports whether err is normal where several write the same objects: the next attempt has newer ones.
func isRace(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}
