package store

import (
	"log/slog"
	"sync"
	"time"

	"go.uber.org/zap/zapcore"
	"k8s.io/component-base/metrics"
)

const (
	// slowSync is etcd's message that a sync of its log took longer than a second (wal.WAL.sync), in which writes wait.
	slowSync = "slow fdatasync"
	// slowSyncPeriod is the time between two warnings of them.
	slowSyncPeriod = time.Minute
)

//nolint:gochecknoglobals // metric of the process, as all of legacyregistry
var slowSyncs = metrics.NewCounter(&metrics.CounterOpts{
	Name: "fairlead_etcd_slow_syncs_total", StabilityLevel: metrics.ALPHA,
	Help: "Syncs of the embedded etcd's log that took longer than a second. Writes wait for them.",
})

// slowDisk counts slow syncs of the store in dir and warns of them.
type slowDisk struct {
	dir string
	log *slog.Logger

	mu     sync.Mutex
	warned time.Time
}

// synced takes etcd's message of a slow sync.
func (s *slowDisk) synced(fields []zapcore.Field) {
	slowSyncs.Inc()
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.warned) < slowSyncPeriod {
		return
	}
	s.warned = time.Now()
	took := time.Second
	for _, f := range fields {
		if f.Key == "took" && f.Type == zapcore.DurationType {
			took = time.Duration(f.Integer)
		}
	}
	s.log.Warn("the disk is slow: writes wait for it; use a disk whose fsync takes less than 10 ms, or find what else writes to it",
		"dir", s.dir, "fsync", took)
}
