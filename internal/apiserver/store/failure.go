package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/raft/v3"
	"go.uber.org/zap/zapcore"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// etcdStopTimeout bounds the stop of an etcd that has failed, whose loops may
// wait for the one that has ended.
const etcdStopTimeout = 2 * time.Second

// etcdFailures takes the place of the ends that etcd makes of itself, a panic or
// the exit of the process: the goroutine ends, and the first error is handed over.
type etcdFailures struct {
	dir    string
	ch     chan error // of capacity 1
	single bool       // without peers
}

// unscanned begins raft's message when an election is due while etcd applies its first entries and has already
// compacted some of them (raft v3.7 hup and etcd v3.7 applyAll, which does not wait for raft to advance). Raft looks
// there for changes of the members that are not applied, and would take it for a damaged log.
const unscanned = "error scanning unapplied entries"

// harmless reports whether etcd goes on after a message of level panic: without peers no change of the members
// has to be waited for.
func (f etcdFailures) harmless(message string) bool {
	return f.single && strings.HasPrefix(message, unscanned) && strings.HasSuffix(message, raft.ErrCompacted.Error())
}

var _ zapcore.CheckWriteHook = etcdFailures{}

// OnWrite is called after a message of level panic or fatal; it returns only from a harmless one.
func (f etcdFailures) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	if f.harmless(e.Message) {
		return
	}
	err := errors.New(e.Message)
	for _, x := range fields {
		if cause, ok := x.Interface.(error); ok {
			err = fmt.Errorf("%s: %w", e.Message, cause)
		}
	}
	f.report(err)
	runtime.Goexit()
}

func (f etcdFailures) report(err error) {
	select {
	case f.ch <- err:
	default: // what came first is the cause
	}
}

// start starts etcd; the error is for users.
func (f etcdFailures) start(c *embed.Config) (*embed.Etcd, error) {
	started := make(chan *embed.Etcd, 1)
	go func() {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() {
			if r := recover(); r != nil {
				f.report(fmt.Errorf("%v", r))
			}
		}()
		e, err := embed.StartEtcd(c)
		if err != nil {
			f.report(err)
			return
		}
		started <- e
	}()
	select {
	case e := <-started:
		return e, nil
	case err := <-f.ch:
		if full := diskFull(f.dir, err); full != nil {
			return nil, full
		}
		return nil, damaged(f.dir, err)
	}
}

// await waits until the only etcd is ready, which replays its log first.
func (f etcdFailures) await(ctx context.Context, e *embed.Etcd, log *slog.Logger) error {
	late := time.NewTicker(etcdStartReport)
	defer late.Stop()
	for {
		select {
		case <-e.Server.ReadyNotify():
			return nil
		case err := <-e.Err():
			return f.explain(err)
		case err := <-f.ch:
			f.report(err) // for stop
			return f.explain(err)
		case <-ctx.Done():
			return ctx.Err()
		case <-late.C:
			log.Warn("waiting for the embedded etcd to read its log: is the disk very slow?", "directory", f.dir)
		}
	}
}

// stop closes an etcd, which may have failed, or may still wait for others. A leader hands over first, for as long as raft tries that: an
// election timeout. All servers may be stopping at this moment, and etcd would wait 7 s for the one that it has chosen.
func (f etcdFailures) stop(e *embed.Etcd) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-e.Server.ReadyNotify():
		default:
			e.Server.Stop() // Close would wait until it is ready (etcd v3.7, embed/serve.go)
		}
		e.Close()
	}()
	cfg := &e.Server.Cfg
	late := time.NewTimer(time.Duration(cfg.ElectionTicks) * time.Duration(cfg.TickMs) * time.Millisecond)
	defer late.Stop()
	for {
		select {
		case <-done:
			return
		case <-late.C:
			go e.Server.HardStop() // it ends when Close does
		case err := <-f.ch:
			f.report(err)
			select {
			case <-done:
			case <-time.After(etcdStopTimeout):
			}
			return
		}
	}
}

// explain returns the error of an etcd that has run, for users.
func (f etcdFailures) explain(err error) error {
	if full := diskFull(f.dir, err); full != nil {
		return full
	}
	return fmt.Errorf("the embedded etcd in %s failed: %w", f.dir, err)
}

// diskFull returns the error for users if err is of a full disk, else nil.
func diskFull(dir string, err error) error {
	if !errors.Is(err, syscall.ENOSPC) {
		return nil
	}
	d, _ := fileio.DiskOf(dir) // the names are only a help
	return fmt.Errorf("the disk of %s is full (%s, mounted at %s, %d MiB free): etcd needs at least %d MiB; "+
		"free that much or use a larger disk with --data-dir, and start again; acknowledged writes are kept",
		dir, d.Device, d.MountPoint, d.Free>>20, diskNeed>>20)
}

func damaged(dir string, err error) error {
	from := "a backup"
	n := nightly{dir: filepath.Dir(dir)}
	if list := n.list(); len(list) > 0 {
		from = "the last night's backup, " + filepath.Join(n.dir, backupDirectory, list[len(list)-1])
	}
	return fmt.Errorf("the embedded etcd in %s cannot be opened, its files may be damaged: %w; the keys in %s are not concerned; "+
		"restore both from %s (mkdir %[5]s.old; mv %[1]s %[3]s %[5]s.old/; see 'fairlead restore --help'), or move only the store away "+
		"(mv %[1]s %[1]s.damaged) to begin without objects", dir, err, filepath.Join(n.dir, "pki"), from, n.dir)
}

// checkStore walks through the file of etcd's store. Opening a damaged one ends the
// process by a panic in a goroutine of the library; here it is an error. A store
// that does not exist is fine.
func checkStore(path string) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%s: %v", path, r)
		}
	}()
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: time.Second})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer db.Close()
	tx, err := db.Begin(false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tx.Rollback()) }()
	buckets := 0
	err = tx.ForEach(func(name []byte, b *bolt.Bucket) error {
		buckets++
		var before []byte
		c := b.Cursor()
		for k, _ := c.First(); k != nil; k, _ = c.Next() {
			if bytes.Compare(before, k) > 0 {
				return fmt.Errorf("%s: the keys of bucket %q are out of order", path, name)
			}
			before = k
		}
		return nil
	})
	if err == nil && buckets == 0 {
		return fmt.Errorf("%s holds no buckets", path)
	}
	return err
}
