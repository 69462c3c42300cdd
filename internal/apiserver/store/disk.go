package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/storage/wal"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/component-base/metrics"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// A write that etcd cannot bring to the disk ends it. So the server keeps room in the
// files themselves, where no other program can take it, and stops accepting writes
// while the disk has little left:
//
//   - The log has its current segment, the next one, which etcd allocates, and one more,
//     by the name under which etcd will look for it (etcd's wal.filePipeline alternates
//     between 0.tmp and 1.tmp, and takes an existing file). A failed allocation of a segment
//     ends etcd at the change of segments after that, even if there is room again.
//   - The store has storeSlack beyond what it uses.
//   - A snapshot is a file of some kB, written every snapshotCount writes.
const (
	// diskNeed is the free space in bytes below which writes are rejected: two segments
	// of the log, and the growth of the store's file by its largest transactions.
	diskNeed = 96 << 20
	// diskRoom is the free space from which on they are accepted again.
	diskRoom = 128 << 20
	// segmentSize is that of the log's segments; etcd's own default is twice as much.
	segmentSize = 32 << 20
	// segmentSlack is how far a write may reach beyond the end of its segment.
	segmentSlack = 8 << 20
	// storeSlack is the room of the store's file beyond what is in use, and storeLeast
	// the least with which etcd goes on.
	storeSlack, storeLeast = 32 << 20, 8 << 20
	// snapshotRoom is the free space in bytes that a snapshot needs at most, and
	// snapshotMargin how many writes before it etcd stops without that.
	snapshotRoom, snapshotMargin = 1 << 20, 500
	// lastWrites is how many writes the last segment takes; each has lastWriteSize
	// bytes at most, but for the few deletions of large objects with finalizers.
	lastWrites    = 2000
	lastWriteSize = 4 << 10
	// reservePeriod is the time between two reservations, which cost some system calls, and
	// reserveGrowth how many bytes the store may grow without one: so many are written in less
	// time, and the log gets as many.
	reservePeriod = time.Second
	reserveGrowth = storeSlack / 4
)

// snapshotCount is the number of writes between two snapshots of etcd.
const snapshotCount = 5000

// setSegmentSize sets etcd's variable for the whole process, before its first start.
//
//nolint:gochecknoglobals // see above
var setSegmentSize = sync.OnceFunc(func() { wal.SegmentSizeBytes = segmentSize })

// spareSegments are the names of the log's next segments.
var spareSegments = [2]string{"0.tmp", "1.tmp"} //nolint:gochecknoglobals // constant

// disk watches the file system of the embedded etcd in dir. One goroutine calls run, which
// waits for nothing: a compaction takes seconds, in which the disk may fill. The others may
// be called by any.
type disk struct {
	dir    string
	server func() *etcdserver.EtcdServer
	log    *slog.Logger

	mu    sync.Mutex
	state diskState
	free  uint64
	err   error // of the last look

	// Those of the last reservation.
	reserved     time.Time
	reservedFrom int64 // the store's bytes in use

	mark uint64 // index of the last write that had two spare segments after it
}

//nolint:gochecknoglobals // metrics of the process, as all of legacyregistry
var (
	diskFree = metrics.NewGauge(&metrics.GaugeOpts{
		Name: "fairlead_etcd_disk_free_bytes", StabilityLevel: metrics.ALPHA,
		Help: "Free space of the disk of the embedded etcd.",
	})
	diskLevel = metrics.NewGauge(&metrics.GaugeOpts{
		Name: "fairlead_etcd_disk_full", StabilityLevel: metrics.ALPHA,
		Help: "1 while the disk of the embedded etcd is nearly full and only deletions and renewals of Leases are written, " +
			"2 while nothing is, else 0.",
	})
)

// diskState is what is accepted.
type diskState int

const (
	diskOpen    diskState = iota // everything
	diskLow                      // what does not grow the store
	diskStopped                  // nothing, as any write could be etcd's last
)

// prepareDisk returns an error for users if etcd cannot start in dir for lack of space,
// and has its first spare segment ready.
func prepareDisk(dir string) error {
	log := filepath.Join(dir, "member", "wal")
	if _, err := os.Stat(log); errors.Is(err, fs.ErrNotExist) {
		if free, err := fileio.Free(dir); err != nil || free >= diskNeed {
			return err
		}
		return diskFull(dir, syscall.ENOSPC)
	}
	first, second := filepath.Join(log, spareSegments[0]), filepath.Join(log, spareSegments[1])
	if _, err := os.Stat(first); errors.Is(err, fs.ErrNotExist) {
		_ = os.Rename(second, first) // it need not be there
	}
	if err := fileio.Reserve(first, segmentSize+segmentSlack); err != nil {
		if full := diskFull(dir, err); full != nil {
			return full
		}
		return err
	}
	return nil
}

// run looks until ctx ends.
func (d *disk) run(ctx context.Context) {
	tick := time.NewTicker(spacePeriod)
	defer tick.Stop()
	for {
		d.look()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look finds out how much room there is, and keeps some.
func (d *disk) look() {
	was, _ := d.get()
	inUse := d.server().Backend().SizeInUse()
	d.reservedFrom = min(d.reservedFrom, inUse) // after a compaction
	if was == diskOpen && (time.Since(d.reserved) > reservePeriod || inUse-d.reservedFrom > reserveGrowth) {
		d.reserve()
		d.reserved, d.reservedFrom = time.Now(), inUse
	}
	free, err := fileio.Free(d.dir)
	state := was
	if err == nil {
		state = d.judge(free, was)
	}
	d.set(state, free, err)
}

// reserve keeps room in the files; what fails shows in the free space.
func (d *disk) reserve() {
	log := filepath.Join(d.dir, "member", "wal")
	for _, name := range append(spareSegments[:], lastSegment(log)) {
		_ = fileio.Reserve(filepath.Join(log, name), segmentSize+segmentSlack)
	}
	_ = fileio.Reserve(d.store(), d.server().Backend().Size()+storeSlack)
}

func (d *disk) store() string { return filepath.Join(d.dir, "member", "snap", "db") }

// judge returns the state at free bytes.
func (d *disk) judge(free uint64, was diskState) diskState {
	if free >= diskRoom || was == diskOpen && free >= diskNeed {
		return diskOpen
	}
	index := d.server().AppliedIndex()
	if free >= segmentSize+segmentSlack || d.spares() == len(spareSegments) {
		d.mark = index
	}
	noSegment := index-d.mark > lastWrites
	noSnapshot := free < snapshotRoom && index-d.snapshot() > snapshotCount-snapshotMargin
	allocated, err := fileio.Allocated(d.store())
	noStore := err == nil && free < storeSlack && allocated-d.server().Backend().SizeInUse() < storeLeast
	if noSegment || noSnapshot || noStore {
		return diskStopped
	}
	return diskLow
}

// spares returns the number of segments that the log can begin without more space.
func (d *disk) spares() (n int) {
	for _, name := range spareSegments {
		if size, err := fileio.Allocated(filepath.Join(d.dir, "member", "wal", name)); err == nil && size >= segmentSize {
			n++
		}
	}
	return n
}

// lastSegment returns the name of the log's current segment.
func lastSegment(dir string) (name string) {
	entries, _ := os.ReadDir(dir) // sorted; etcd names them in order
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".wal") {
			name = e.Name()
		}
	}
	return name
}

// snapshot returns the index of the last write that a snapshot has; its file is named
// TERM-INDEX.snap, in hexadecimal.
func (d *disk) snapshot() (last uint64) {
	entries, _ := os.ReadDir(filepath.Join(d.dir, "member", "snap"))
	for _, e := range entries {
		_, index, _ := strings.Cut(strings.TrimSuffix(e.Name(), ".snap"), "-")
		if i, err := strconv.ParseUint(index, 16, 64); err == nil {
			last = max(last, i)
		}
	}
	return last
}

// set records and reports the state.
func (d *disk) set(state diskState, free uint64, err error) {
	d.mu.Lock()
	was, before := d.state, d.err
	d.state, d.free, d.err = state, free, err
	d.mu.Unlock()
	if err != nil {
		if before == nil {
			d.log.Warn("cannot read the free space of the disk; retrying", "after", spacePeriod, "err", err)
		}
		return
	}
	diskFree.Set(float64(free))
	if state == was {
		return
	}
	diskLevel.Set(float64(state))
	switch state {
	case diskOpen:
		d.log.Info("the disk has room again: writes are accepted", "dir", d.dir, "free", free)
	case diskLow:
		d.log.Error("the disk is nearly full: writes are rejected, but for deletions and renewals of Leases",
			"dir", d.dir, "free", free, "need", diskRoom)
	case diskStopped:
		d.log.Error("the disk is full: all writes are rejected", "dir", d.dir, "free", free, "need", diskRoom)
	}
}

// get returns the state and the free space in bytes.
func (d *disk) get() (diskState, uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state, d.free
}

// message describes the problem and its remedy; it is empty without one.
func (d *disk) message() string {
	state, _ := d.get()
	if state == diskOpen {
		return ""
	}
	at, _ := fileio.DiskOf(d.dir) // the names are only a help
	out := fmt.Sprintf("the disk of %s is nearly full (%s, mounted at %s, %d MiB free): ", d.dir, at.Device, at.MountPoint, at.Free>>20)
	if state == diskStopped {
		return out + fmt.Sprintf("all writes are rejected until %d MiB are free", diskRoom>>20)
	}
	return out + fmt.Sprintf("writes are rejected until %d MiB are free; deletions and renewals of Leases go on", diskRoom>>20)
}

// reject returns why a may not be written, or "".
func (d *disk) reject(a admission.Attributes) string {
	state, _ := d.get()
	if state == diskOpen || state == diskLow && (a.GetUserInfo().GetName() == user.APIServerUser || frees(a)) {
		return ""
	}
	return d.message()
}

// frees reports whether a is what may be written while the disk is low: a deletion, the
// end of what is deleted, whose finalizers go, or the renewal of a Lease.
func frees(a admission.Attributes) bool {
	if a.GetOperation() == admission.Delete {
		return true
	}
	object, ok := a.GetObject().(interface{ Size() int })
	if a.GetOperation() != admission.Update || !ok || object.Size() > lastWriteSize {
		return false
	}
	old, ok := a.GetOldObject().(metav1.Object)
	return a.GetResource().Group == coordinationv1.GroupName || ok && old.GetDeletionTimestamp() != nil
}
