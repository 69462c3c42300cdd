package store

import (
	"context"
	"errors"
	"expvar"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	"go.etcd.io/raft/v3"
)

const (
	// slowLead is the mean duration of a sync from which a leader gives the leadership away: all writes of the cluster wait for its
	// syncs. etcd advises 10 ms (https://etcd.io/docs/latest/faq/).
	slowLead = 100 * time.Millisecond
	// yieldLook is the time between two looks at the syncs, and yieldLooks how many in a row must be slow.
	yieldLook  = time.Second
	yieldLooks = 2
	// maxUnknown is how many looks in a row may find no sync before slow ones are forgotten.
	maxUnknown = 5
	// yieldMemory is how long a server that was too slow to lead is not chosen by another slow one. When all were, the leader stays.
	yieldMemory = 10 * time.Minute
)

// syncs are the syncs of etcd's log in this process so far.
type syncs struct {
	count uint64
	took  float64 // seconds
}

// since returns the mean duration of the syncs after earlier ones, and whether there were any.
func (s syncs) since(before syncs) (mean time.Duration, known bool) {
	if s.count <= before.count {
		return 0, false
	}
	return time.Duration((s.took - before.took) / float64(s.count-before.count) * float64(time.Second)), true
}

// syncHistogram returns etcd's own histogram of the syncs (wal.walFsyncSec), which it does not export: the registry returns it when
// one of the same name is registered.
func syncHistogram() (prometheus.Metric, error) {
	mine := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "etcd_disk_wal_fsync_duration_seconds", Help: "The latency distributions of fsync called by WAL.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
	})
	var there prometheus.AlreadyRegisteredError
	err := prometheus.Register(mine)
	if !errors.As(err, &there) {
		prometheus.Unregister(mine)
		return nil, errors.Join(errors.New("etcd has no such metric"), err)
	}
	theirs, ok := there.ExistingCollector.(prometheus.Metric)
	if !ok {
		return nil, errors.New("etcd's metric is of another kind")
	}
	return theirs, nil
}

func readSyncs(m prometheus.Metric) (s syncs) {
	var d dto.Metric
	if m.Write(&d) == nil {
		s.count, s.took = d.GetHistogram().GetSampleCount(), d.GetHistogram().GetSampleSum()
	}
	return s
}

// tooSlow remembers which servers gave the leadership away because their disks were slow. It is safe for concurrent use.
type tooSlow struct {
	mu   sync.Mutex
	when map[uint64]time.Time // by the member's ID
}

// note takes in the value of handOverKey: the ID of a member, empty if the leadership is handed over for another reason.
func (t *tooSlow) note(value []byte) {
	id, err := strconv.ParseUint(string(value), 16, 64)
	if err != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.when == nil {
		t.when = map[uint64]time.Time{}
	}
	t.when[id] = time.Now()
}

func (t *tooSlow) has(id uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	at, ok := t.when[id]
	return ok && time.Since(at) < yieldMemory
}

// yield gives the leadership away while the disk is slow, until ctx ends.
func (m *embedded) yield(ctx context.Context, s *etcdserver.EtcdServer) {
	metric, err := syncHistogram()
	if err != nil {
		m.opts.Log.Error("cannot measure the syncs of etcd's log; a server with a slow disk may lead", "err", err)
		return
	}
	tick := time.NewTicker(yieldLook)
	defer tick.Stop()
	last, slow, unknown := readSyncs(metric), 0, 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := readSyncs(metric)
		mean, known := now.since(last)
		last = now
		switch leads := s.Leader() == s.MemberID(); {
		case !leads || known && mean < slowLead || unknown == maxUnknown:
			slow, unknown = 0, 0
		case known:
			slow, unknown = slow+1, 0
		default: // it may wait for a sync
			unknown++
		}
		if slow < yieldLooks {
			continue
		}
		// From the election timeout on, the others elect one, and a hand-over would only be in their way.
		if to := m.quicker(s); to != nil && mean < peerElection*time.Millisecond {
			slow = 0
			m.giveAway(ctx, s, to, mean.Round(time.Millisecond))
		}
	}
}

// giveAway has another member lead, and all others know why.
func (m *embedded) giveAway(ctx context.Context, s *etcdserver.EtcdServer, to *membership.Member, fsync time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, handOverTimeout)
	defer cancel()
	err := m.announceHandOver(ctx, s, strconv.FormatUint(uint64(s.MemberID()), 16))
	if err == nil && s.Leader() != s.MemberID() {
		return // another one was elected, or this server was about to restart
	}
	if err == nil {
		err = s.MoveLeader(ctx, uint64(s.MemberID()), uint64(to.ID))
	}
	if err != nil {
		m.slow.note([]byte(strconv.FormatUint(uint64(to.ID), 16))) // it may be slow as well: the next try is with another one
		m.opts.Log.Warn("the disk is slow, and another server cannot be made the leader", "fsync", fsync, "server", to.Name, "err", err)
		return
	}
	m.opts.Log.Warn("the disk is slow: another server leads now", "fsync", fsync, "server", to.Name)
}

// quicker returns the member that can lead soonest and was not too slow for that, nil if there is none.
func (m *embedded) quicker(s *etcdserver.EtcdServer) (best *membership.Member) {
	published, ok := expvar.Get("raft.status").(expvar.Func) // of the last etcd of this process
	if !ok {
		return nil
	}
	status, ok := published().(raft.Status)
	if !ok {
		return nil
	}
	most := uint64(0)
	for _, member := range s.Cluster().Members() {
		other := uint64(member.ID)
		p, ok := status.Progress[other]
		if !ok || member.IsLearner || member.ID == s.MemberID() || !p.RecentActive || m.slow.has(other) {
			continue
		}
		if best == nil || p.Match > most { // it has more of the log
			best, most = member, p.Match
		}
	}
	return best
}
