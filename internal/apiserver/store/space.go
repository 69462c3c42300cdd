package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/fairlead/fairlead/internal/apiserver/space"
)

const (
	// DefaultQuota is the default size of the embedded store in bytes.
	DefaultQuota = 4 << 30
	// MinQuota is the smallest size in bytes that leaves room for a few of the
	// largest objects and their history.
	MinQuota = 16 << 20
	// minReserve is the least room in bytes beyond the quota; see hardQuota.
	minReserve = 16 << 20
	// spacePeriod is the time between two looks at the size of the store, which
	// cost two atomic loads.
	spacePeriod = 100 * time.Millisecond
	// fullPeriod is the time between two compactions of a store that is full.
	fullPeriod = time.Second
	// nearPeriod is the least time between two compactions of a store that is nearly
	// full, which is how a deletion is noticed. A compaction visits every object.
	nearPeriod = 10 * time.Second
	// nearFactor is nearPeriod's least multiple of what the last compaction took.
	nearFactor = 10
	// compactions is how many there are at most before a store counts as full.
	compactions = 3
	// settleTimeout bounds the wait for the readers of what a compaction dropped, and
	// settlePause is the time between two looks.
	settleTimeout = 5 * time.Second
	settlePause   = 10 * time.Millisecond
	// spaceTimeout bounds a compaction and the disarming of an alarm.
	spaceTimeout = time.Minute
)

// hardQuota is the size at which etcd itself rejects every write. Users are stopped
// at quota; what lies between is for the system: Leases, endpoints, finalizers.
func hardQuota(quota int64) int64 { return quota + max(quota/4, minReserve) }

//nolint:gochecknoglobals // metrics of the process, as all of legacyregistry
var (
	etcdBytes = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name: "fairlead_etcd_bytes", StabilityLevel: metrics.ALPHA,
		Help: "Size of the embedded etcd: its file, what of it is in use, the quota, and the Events.",
	}, []string{"kind"})
	etcdFull = metrics.NewGauge(&metrics.GaugeOpts{
		Name: "fairlead_etcd_full", StabilityLevel: metrics.ALPHA,
		Help: "1 while the embedded etcd is full and writes of users are rejected, else 0.",
	})
	etcdUpkeep = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "fairlead_etcd_upkeep_total", StabilityLevel: metrics.ALPHA,
		Help: "Compactions by size, defragmentations and NOSPACE alarms lifted.",
	}, []string{"step"})
	eventsRemoved = metrics.NewCounter(&metrics.CounterOpts{
		Name: "fairlead_etcd_events_removed_total", StabilityLevel: metrics.ALPHA,
		Help: "Events that were removed before their time because all Events took more than their share of etcd.",
	})
	registerEtcdMetrics = sync.OnceFunc(func() {
		registerRemoved()
		legacyregistry.MustRegister(etcdBytes, etcdFull, etcdUpkeep, diskFree, diskLevel, slowSyncs)
		legacyregistry.RawMustRegister(etcdMetrics{prometheus.DefaultGatherer})
	})
)

// Space keeps the embedded etcd below its quota: it compacts by size, defragments
// when that pays, and lifts the NOSPACE alarm. One goroutine runs it; full and
// status may be called by any.
type Space struct {
	server   func() *etcdserver.EtcdServer
	disk     *disk
	holdings *holdings
	quota    int64
	log      *slog.Logger

	mu   sync.Mutex
	full bool
	base int64 // least bytes in use since the last compaction; objects take no more

	revision  int64     // of the last compaction
	compacted time.Time // when the last compaction began
	took      time.Duration
}

// newSpace returns the space of the etcd that server returns at each moment. The keys of the API lie below prefix.
func newSpace(server func() *etcdserver.EtcdServer, dir, prefix string, quota int64, log *slog.Logger) *Space {
	registerEtcdMetrics()
	return &Space{server: server, disk: &disk{dir: dir, server: server, log: log}, holdings: newHoldings(prefix, quota, log),
		quota: quota, log: log}
}

// begin is called when an etcd has started, before run.
func (s *Space) begin() {
	s.setBase(s.server().Backend().SizeInUse())
	s.disk.mark, s.disk.reserved = s.server().AppliedIndex(), time.Time{}
}

// fullAt and nearAt are the bytes in use, without history, above which the store is
// full and nearly full. Between fullAt and the quota lies the history that may gather
// until the next compaction.
func (s *Space) fullAt() int64 { return s.quota - s.quota/8 }
func (s *Space) nearAt() int64 { return s.quota / 4 * 3 }

// run works until ctx ends.
func (s *Space) run(ctx context.Context) {
	var looks sync.WaitGroup
	looks.Go(func() { s.disk.run(ctx) })
	looks.Go(func() { s.holdings.run(ctx, embeddedSource{s.server()}) })
	defer looks.Wait()
	tick := time.NewTicker(spacePeriod)
	defer tick.Stop()
	var warned time.Time
	for {
		if err := s.step(ctx); err != nil && ctx.Err() == nil && time.Since(warned) > spaceTimeout {
			s.log.Error("cannot make room in etcd; retrying", "after", spacePeriod, "err", err)
			warned = time.Now()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// step does what the size of the store asks for.
func (s *Space) step(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, spaceTimeout)
	defer cancel()
	state, diskFree := s.disk.get()
	if state == diskStopped {
		return nil // all that follows writes
	}
	size, inUse, alarm := s.server().Backend().Size(), s.server().Backend().SizeInUse(), s.noSpace()
	base := s.setBase(min(s.getBase(), inUse))
	if inUse <= s.fullAt() {
		s.setFull(false, inUse)
	}
	tight, near, since := size > s.quota || alarm || s.isFull(), base > s.nearAt(), time.Since(s.compacted)
	history := s.quota / 4
	if state != diskOpen {
		history = min(history, storeLeast)
	}
	if inUse-base > history || tight && since > fullPeriod || near && since > max(nearPeriod, nearFactor*s.took) {
		if err := s.makeRoom(ctx); err != nil {
			return err
		}
		size, inUse = s.server().Backend().Size(), s.getBase()
	}
	// Free pages are used again; giving them back stops all requests while the rest
	// is copied, so it must pay.
	free := size - inUse
	pays := free > s.quota/4 && size > s.quota/2 || (alarm || size > s.quota) && free > s.quota/16
	if pays && diskFree > uint64(inUse)+diskNeed && s.myTurn(time.Now()) {
		if err := s.server().Defragment(); err != nil {
			return fmt.Errorf("cannot defragment: %w", err)
		}
		etcdUpkeep.WithLabelValues("defragmentation").Inc()
		now := s.server().Backend().Size()
		s.log.Info("etcd was defragmented", "before", size, "after", now)
		size = now
	}
	s.measure(size, inUse)
	if size < hardQuota(s.quota) && s.noSpaceHere() {
		return s.disarm(ctx)
	}
	return nil
}

// turn is the time in which one of several members may defragment, which stops its requests.
const turn = time.Minute

// myTurn reports whether this member may defragment now: the only member always, one of several in its own
// minute. No agreement is needed, which the members of a full store could not write.
func (s *Space) myTurn(now time.Time) bool {
	all := s.server().Cluster().Members() // by their IDs
	i := slices.IndexFunc(all, func(m *membership.Member) bool { return m.ID == s.server().MemberID() })
	return hasTurn(now, max(i, 0), len(all))
}

// hasTurn reports whether it is the turn of the member number i of n.
func hasTurn(now time.Time, i, n int) bool {
	return n <= 1 || now.Unix()/int64(turn/time.Second)%int64(n) == int64(i)
}

// makeRoom compacts, more than once if the store would count as full after that: writes during a compaction
// are history, which does not make a store full.
func (s *Space) makeRoom(ctx context.Context) error {
	for range compactions {
		if err := s.compact(ctx); err != nil {
			return err
		}
		if s.setBase(s.server().Backend().SizeInUse()) <= s.fullAt() {
			break
		}
	}
	s.setFull(s.getBase() > s.fullAt(), s.getBase())
	return nil
}

// compact drops all history. The API server's watches go on from its own cache;
// a list in pages begins again, as after every compaction.
func (s *Space) compact(ctx context.Context) error {
	s.compacted = time.Now()
	// Among several members what the leader compacts all do.
	if rev := s.server().KV().Rev(); rev != s.revision && s.server().Leader() == s.server().MemberID() {
		_, err := s.server().Compact(ctx, &etcdserverpb.CompactionRequest{Revision: rev, Physical: true})
		if err != nil && err.Error() != errCompacted {
			return fmt.Errorf("cannot compact: %w", err)
		}
		s.revision, s.took = rev, time.Since(s.compacted)
		etcdUpkeep.WithLabelValues("compaction").Inc()
	}
	s.settle(ctx)
	return nil
}

// settle makes the bytes in use count what the compaction has freed. bbolt releases a
// page when the next write transaction begins after the last reader of it has ended,
// and etcd counts it at the commit of that transaction. Those readers are requests, and
// etcd's own, which ends in the background after a commit. To call the store full
// because of them would reject writes for nothing. A store that is full already is
// looked at again soon, and need not wait for them.
func (s *Space) settle(ctx context.Context) {
	b, deadline := s.server().Backend(), time.Now().Add(settleTimeout)
	for {
		b.ForceCommit()
		readers := b.OpenReadTxN()
		b.ForceCommit()
		b.ForceCommit()
		// One reader is the one that the commit has begun.
		if b.SizeInUse() <= s.nearAt() || readers <= 1 || s.isFull() || time.Now().After(deadline) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(settlePause):
		}
	}
}

// errCompacted is the text of mvcc.ErrCompacted: another compaction was first.
const errCompacted = "mvcc: required revision has been compacted"

func (s *Space) noSpace() bool {
	return slices.ContainsFunc(s.server().Alarms(), func(a *etcdserverpb.AlarmMember) bool {
		return a.Alarm == etcdserverpb.AlarmType_NOSPACE
	})
}

// noSpaceHere reports whether it is this member that has raised the alarm; others lift their own.
func (s *Space) noSpaceHere() bool {
	return slices.ContainsFunc(s.server().Alarms(), func(a *etcdserverpb.AlarmMember) bool {
		return a.Alarm == etcdserverpb.AlarmType_NOSPACE && a.MemberID == uint64(s.server().MemberID())
	})
}

// disarm lifts the alarm, without which etcd accepts no write.
func (s *Space) disarm(ctx context.Context) error {
	_, err := s.server().Alarm(ctx, &etcdserverpb.AlarmRequest{
		Action: etcdserverpb.AlarmRequest_DEACTIVATE, Alarm: etcdserverpb.AlarmType_NOSPACE, MemberID: uint64(s.server().MemberID()),
	})
	if err != nil {
		return fmt.Errorf("cannot lift the NOSPACE alarm: %w", err)
	}
	etcdUpkeep.WithLabelValues("alarm").Inc()
	s.log.Warn("etcd had no space left; there is room again and its alarm is lifted", "size", s.server().Backend().Size(), "quota", s.quota)
	return nil
}

func (s *Space) measure(size, inUse int64) {
	etcdBytes.WithLabelValues("file").Set(float64(size))
	etcdBytes.WithLabelValues("in_use").Set(float64(inUse))
	etcdBytes.WithLabelValues("quota").Set(float64(s.quota))
	etcdBytes.WithLabelValues("events").Set(float64(s.holdings.ofEvents()))
}

func (s *Space) isFull() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.full
}

func (s *Space) getBase() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.base
}

// setBase returns base.
func (s *Space) setBase(base int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.base = base
	return base
}

func (s *Space) setFull(full bool, inUse int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if full == s.full {
		return
	}
	s.full = full
	if full {
		etcdFull.Set(1)
		s.log.Error("etcd is full: writes of users are rejected until objects are deleted or --etcd-quota-bytes is raised",
			"bytes", inUse, "quota", s.quota)
		return
	}
	etcdFull.Set(0)
	s.log.Info("etcd has room again: writes are accepted", "bytes", inUse, "quota", s.quota)
}

// Check is the check of /readyz for space: an error while no write at all is accepted. While deletions are, the server is
// ready, so that users can make room.
func (s *Space) Check() error {
	if state, _ := s.disk.get(); state == diskStopped {
		return errors.New(s.disk.message())
	}
	if s.noSpace() {
		return errors.New(noSpaceMessage)
	}
	return nil
}

// noSpaceMessage is that of a store whose writes etcd rejects.
const noSpaceMessage = "etcd has raised its NOSPACE alarm: writes are rejected until it is compacted, which is under way"

// status returns what Path shows.
func (s *Space) status() space.Status {
	b := s.server().Backend()
	out := space.Status{SizeBytes: b.Size(), InUseBytes: b.SizeInUse(), QuotaBytes: s.quota, Full: s.isFull()}
	state, free := s.disk.get()
	out.DiskFreeBytes, out.DiskFull = free, state != diskOpen
	switch {
	case out.DiskFull:
		out.Message = s.disk.message()
	case out.Full:
		out.Message = fmt.Sprintf("the store is full, with %d of %d MiB in use: writes of users are rejected; "+
			"delete objects, or start the server with a larger --etcd-quota-bytes", out.InUseBytes>>20, s.quota>>20)
	case s.noSpace():
		out.Message = noSpaceMessage
	case min(s.getBase(), out.InUseBytes) > s.nearAt():
		out.Message = fmt.Sprintf("the store is nearly full, with %d of %d MiB in use", out.InUseBytes>>20, s.quota>>20)
	}
	return out
}

// ServeHTTP answers with the status.
func (s *Space) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.status()) // the client is gone
}
