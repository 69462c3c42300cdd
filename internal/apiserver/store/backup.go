package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/backup"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

const (
	// backupTimeout bounds one backup.
	backupTimeout = 10 * time.Minute
	// backupDirectory of the data directory has the nightly backups.
	backupDirectory = "backups"
	backupPrefix    = "fairlead-"
	backupSuffix    = ".tar"
	// backingUp begins the name of a directory that a backup is made in.
	backingUp   = ".fairlead-backup-"
	backupHour  = 3 // of the local time
	backupCheck = 10 * time.Minute
	// anyQuota has no store be full, whatever its server's quota is.
	anyQuota = 1 << 40
)

// Backup writes a backup of the data directory at path to file, which must not exist, with mode
// 0600: a consistent snapshot of the embedded etcd, whether its server runs or not, and the keys
// of the cluster. release is the version of fairlead.
func Backup(ctx context.Context, path, file, release string, log *slog.Logger) (*backup.Manifest, error) {
	if _, err := os.Stat(filepath.Join(path, "etcd", "member")); err != nil {
		return nil, fmt.Errorf("there is no store of a server in %s: name its directory with --data-dir; "+
			"that of a server with --etcd-servers is backed up with etcd's own 'etcdctl snapshot save', and its pki directory by a copy", path)
	}
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	dir, err := OpenDir(path)
	var used *inUseError
	switch {
	case errors.As(err, &used): // its server runs: ask that
		socket, release2, err := socketPath(filepath.Join(path, "etcd"))
		if err != nil {
			return nil, err
		}
		defer release2()
		return writeBackup(ctx, path, file, release, []string{"unix://" + socket})
	case err != nil:
		return nil, err
	}
	defer dir.Close()
	if err := removeLeftovers(path, backingUp, 0); err != nil {
		return nil, err
	}
	o := Options{Quota: anyQuota, Log: log}
	at := dir.File("etcd")
	if _, err := members.Load(at); err == nil {
		if at, err = copyStore(dir); err != nil {
			return nil, err
		}
		defer os.RemoveAll(at)
		o.forceNewCluster = true
	}
	store, err := Start(ctx, at, o, nil)
	if err != nil {
		return nil, err
	}
	defer store.Stop()
	return writeBackup(ctx, path, file, release, store.Endpoints)
}

// copyStore returns a copy of the store of one of several servers, which can be read without the
// others, and must not be changed where it is: they may come back.
func copyStore(dir *Dir) (string, error) {
	work, err := os.MkdirTemp(dir.Path, backingUp)
	if err != nil {
		return "", err
	}
	if err := os.CopyFS(filepath.Join(work, "member"), os.DirFS(dir.File("etcd/member"))); err != nil {
		return "", errors.Join(fmt.Errorf("cannot copy the store in %s: %w", dir.Path, err), os.RemoveAll(work))
	}
	return work, nil
}

// writeBackup writes a backup of the data directory at path, whose etcd is at endpoints.
func writeBackup(ctx context.Context, path, file, release string, endpoints []string) (*backup.Manifest, error) {
	if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s exists already: choose another name, or remove it", file)
	}
	work, err := os.MkdirTemp(filepath.Dir(file), backingUp)
	if err != nil {
		return nil, fmt.Errorf("cannot write beside %s: %w", file, plain(err))
	}
	defer os.RemoveAll(work)
	db := filepath.Join(work, backup.Store)
	quiet := snapshot.NewV3(zap.NewNop())
	config := clientv3.Config{Endpoints: endpoints, DialTimeout: etcdDialTimeout, Logger: zap.NewNop()}
	if _, err := quiet.Save(ctx, config, db); err != nil {
		return nil, fmt.Errorf("cannot get a snapshot of the store of %s: %w", path, err)
	}
	status, err := quiet.Status(db)
	if err != nil {
		return nil, fmt.Errorf("the store of %s is damaged: %w", path, err)
	}
	small, err := readSmall(path)
	if err != nil {
		return nil, err
	}
	open := func(name string) (io.ReadCloser, error) {
		if data, ok := small[name]; ok {
			return io.NopCloser(bytes.NewReader(data)), nil
		}
		return os.Open(db)
	}
	m := &backup.Manifest{
		Format: backup.Format, Version: release, Layout: layoutVersion, Created: time.Now().UTC(),
		Revision: status.Revision, Keys: status.TotalKey,
	}
	// The store is the last part: it is the one that a file that is cut short lacks.
	for _, name := range append(slices.Sorted(maps.Keys(small)), backup.Store) {
		content, err := open(name)
		if err != nil {
			return nil, err
		}
		p, err := backup.PartOf(name, content)
		if err = errors.Join(err, content.Close()); err != nil {
			return nil, err
		}
		m.Parts = append(m.Parts, p)
	}
	out := filepath.Join(work, "backup")
	f, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	err = backup.Write(f, m, open)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return nil, fmt.Errorf("cannot write %s: %w", file, err)
	}
	if err := os.Rename(out, file); err != nil {
		return nil, err
	}
	return m, fileio.SyncDir(filepath.Dir(file)) // before an older one is removed
}

// readSmall returns the files of the data directory at path that are parts of a backup beside the
// store. Each is read once: a renewal of a certificate may replace files at the same time.
func readSmall(path string) (map[string][]byte, error) {
	names := []string{"version", "node-token"}
	keys, err := os.ReadDir(filepath.Join(path, "pki"))
	if err != nil {
		return nil, err
	}
	for _, k := range keys {
		// Others are temporary files of an interrupted write or of an editor.
		if name := "pki/" + k.Name(); backup.IsPart(name) && !k.IsDir() {
			names = append(names, name)
		}
	}
	small := map[string][]byte{}
	for _, name := range names {
		file := filepath.Join(path, name)
		info, err := os.Stat(file) // of a link's target, too: a key may be kept elsewhere
		switch {
		case errors.Is(err, fs.ErrNotExist) && name == "node-token":
			continue
		case err != nil:
			return nil, fmt.Errorf("cannot back up: %w", err)
		case !info.Mode().IsRegular():
			return nil, fmt.Errorf("cannot back up %s: it is not a regular file", file)
		}
		if small[name], err = os.ReadFile(file); err != nil {
			return nil, err
		}
	}
	return small, nil
}

// removeLeftovers removes the directories of dir whose names begin with prefix and which are older than age. A
// process that was killed has left them, with keys.
func removeLeftovers(dir, prefix string, age time.Duration) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		if info, err := e.Info(); err != nil || time.Since(info.ModTime()) < age {
			continue // it is gone, or in use
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// nightly are the backups that a server makes by itself.
type nightly struct {
	dir, release string
	keep         int
	endpoints    []string
	log          *slog.Logger
	started      time.Time
}

// BackupNightly makes a backup of the data directory every night until ctx ends, and keeps the last keep of them.
// release is the version of fairlead.
func (e *Store) BackupNightly(ctx context.Context, dir *Dir, release string, keep int, log *slog.Logger) {
	n := nightly{dir: dir.Path, release: release, keep: keep, endpoints: e.Endpoints, log: log, started: time.Now()}
	n.run(ctx)
}

// run makes a backup every night until ctx ends.
func (n *nightly) run(ctx context.Context) {
	if n.keep <= 0 {
		return
	}
	tick := time.NewTicker(backupCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if n.due(now) {
				if err := n.make(ctx, now); err != nil && ctx.Err() == nil {
					n.log.Warn("cannot make the nightly backup; retrying in "+strconv.Itoa(int(backupCheck.Minutes()))+" minutes", "err", err)
				}
			}
		}
	}
}

// due reports whether it is time for a backup: at the usual hour, or later if the machine was off then.
// A backup with a time to come, of a clock that was wrong, does not count.
func (n *nightly) due(now time.Time) bool {
	last := time.Time{}
	if list := n.until(now); len(list) > 0 {
		last = backupTime(list[len(list)-1])
	}
	if now.Local().Hour() == backupHour {
		return now.Sub(last) > 12*time.Hour
	}
	return now.Sub(last) > 26*time.Hour && now.Sub(n.started) >= backupCheck
}

// until returns the names of the backups that were made until now, the oldest first.
func (n *nightly) until(now time.Time) []string {
	return slices.DeleteFunc(n.list(), func(name string) bool { return backupTime(name).After(now) })
}

// list returns the names of the backups that there are, the oldest first.
func (n *nightly) list() (names []string) {
	entries, _ := os.ReadDir(filepath.Join(n.dir, backupDirectory)) // none, before the first
	for _, e := range entries {
		if !backupTime(e.Name()).IsZero() {
			names = append(names, e.Name())
		}
	}
	return names
}

const backupStamp = "20060102T150405Z"

// backupTime returns when the backup of that name was made, zero for other files.
func backupTime(name string) time.Time {
	t, err := time.Parse(backupPrefix+backupStamp+backupSuffix, name)
	if err != nil {
		return time.Time{}
	}
	return t
}

// make makes a backup, and removes the oldest of more than keep.
func (n *nightly) make(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	dir := filepath.Join(n.dir, backupDirectory)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// The lock is this server's: no restore goes on.
	err := errors.Join(removeLeftovers(dir, backingUp, backupTimeout), removeLeftovers(n.dir, restoring, 0))
	if err != nil {
		return err
	}
	store, err := os.Stat(filepath.Join(n.dir, "etcd", "member", "snap", "db"))
	if err != nil {
		return err
	}
	// The snapshot, the backup, and what etcd needs.
	if free, err := fileio.Free(dir); err != nil || free < uint64(2*store.Size())+diskNeed {
		return errors.Join(err, fmt.Errorf("the disk of %s has %d MiB free, too few for a backup beside etcd", dir, free>>20))
	}
	name := now.UTC().Format(backupPrefix + backupStamp + backupSuffix)
	m, err := writeBackup(ctx, n.dir, filepath.Join(dir, name), n.release, n.endpoints)
	if err != nil {
		return err
	}
	n.log.Info("made the nightly backup", "file", filepath.Join(dir, name), "revision", m.Revision, "keys", m.Keys)
	list := n.until(now)
	for _, old := range list[:max(0, len(list)-n.keep)] {
		if err := os.Remove(filepath.Join(dir, old)); err != nil {
			return err
		}
	}
	return nil
}
