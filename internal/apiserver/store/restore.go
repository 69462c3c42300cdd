package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"

	"github.com/fairlead/fairlead/internal/backup"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// DamagedBackupError is that of a backup with damaged parts. Halves are the good ones that are of
// no use without a damaged one: the key of a certificate, the certificate of a key.
type DamagedBackupError struct {
	File                  string
	Damaged, Halves, Good []string
}

func (e *DamagedBackupError) Error() string {
	what := "nothing of it can be restored"
	if len(e.Good) > 0 {
		what = "--intact-only restores the rest: " + strings.Join(e.Good, ", ")
	}
	return fmt.Sprintf("%s is damaged in %s; %s", e.File, strings.Join(e.Damaged, ", "), what)
}

// LeftOut returns the parts that are not restored.
func (e *DamagedBackupError) LeftOut() []string { return slices.Concat(e.Damaged, e.Halves) }

// otherHalf returns the name of the key of a certificate in pki/, of the certificate of a key, else "".
func otherHalf(name string) string {
	if pair, ok := strings.CutSuffix(name, ".crt"); ok {
		return pair + ".key"
	}
	if pair, ok := strings.CutSuffix(name, ".key"); ok {
		return pair + ".crt"
	}
	return ""
}

// openBackup reads a backup. Its damaged parts are in the DamagedBackupError, nil if it has none.
func openBackup(file string) (*backup.Archive, *os.File, *DamagedBackupError, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, nil, nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, nil, nil, errors.Join(err, f.Close())
	}
	a, err := backup.Open(f, info.Size())
	if err == nil && a.Layout > layoutVersion {
		err = fmt.Errorf("a newer fairlead has made it (%s, layout %d, this one knows up to %d): restore it with that one",
			a.Version, a.Layout, layoutVersion)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, nil, fmt.Errorf("%s: %w", file, err)
	}
	bad := a.Damaged()
	if len(bad) == 0 {
		return a, f, nil, nil
	}
	damage := &DamagedBackupError{File: file}
	for _, p := range bad {
		damage.Damaged = append(damage.Damaged, p.Name)
	}
	for _, p := range a.Parts {
		switch {
		case slices.Contains(bad, p):
		case slices.Contains(damage.Damaged, otherHalf(p.Name)):
			damage.Halves = append(damage.Halves, p.Name)
		default:
			damage.Good = append(damage.Good, p.Name)
		}
	}
	return a, f, damage, nil
}

// CheckBackup returns the manifest of a backup whose parts are as they were written.
func CheckBackup(file string) (*backup.Manifest, error) {
	a, f, damage, err := openBackup(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if damage != nil {
		return &a.Manifest, damage
	}
	return &a.Manifest, nil
}

// revisionBump returns what a restore at now adds to etcd's revision, so that it becomes now in
// microseconds since 1970. Clients have seen revisions after that of the snapshot and must not take
// others for them, nor may revisions of an earlier restore come again: etcd makes fewer than a million
// a second. Up to the year 2255 they are exact in JavaScript, too.
func revisionBump(revision int64, now time.Time) uint64 {
	if bump := now.UnixMicro() - revision; bump > 0 {
		return uint64(bump)
	}
	return 1_000_000_000 // the clock is wrong
}

// restoring begins the name of a directory that a restore works in.
const restoring = "restore-"

// Restore writes a backup into the data directory at path, which has neither keys nor a store. With
// intactOnly damaged parts are left out. No part is written where it returns an error.
func Restore(file, path string, intactOnly bool) (*backup.Manifest, error) {
	a, f, damage, err := openBackup(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if damage != nil && (!intactOnly || len(damage.Good) == 0) {
		return nil, damage
	}
	dir, err := OpenDir(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	for _, name := range []string{"etcd", "pki"} {
		if _, err := os.Lstat(dir.File(name)); !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%s has a directory %s already: stop its server and move it away, or choose another with --data-dir", path, name)
		}
	}
	if err := removeLeftovers(dir.Path, restoring, 0); err != nil {
		return nil, err
	}
	work, err := os.MkdirTemp(dir.Path, restoring)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	if err := os.Mkdir(filepath.Join(work, "pki"), 0o700); err != nil {
		return nil, err
	}
	for i, p := range a.Parts {
		if damage != nil && slices.Contains(damage.LeftOut(), p.Name) {
			continue
		}
		if err := writePart(filepath.Join(work, p.Name), p, a.Content(i)); err != nil {
			return nil, fmt.Errorf("%s of %s cannot be restored: %w", p.Name, file, err)
		}
		if p.Name == backup.Store {
			if err := restoreStore(filepath.Join(work, p.Name), filepath.Join(work, "etcd"), a.Revision); err != nil {
				return nil, fmt.Errorf("%s of %s cannot be restored: %w", p.Name, file, err)
			}
		}
	}
	if err := fileio.SyncDir(filepath.Join(work, "pki")); err != nil {
		return nil, err
	}
	// The store comes last: a server would begin without objects where only the keys are.
	if err := moveIn(work, dir.Path, "version", "node-token", "pki", "etcd"); err != nil {
		return nil, err
	}
	return &a.Manifest, fileio.SyncDir(dir.Path)
}

// moveIn moves what work has of these names into dir, in their order, and what dir had of them into
// work. Where it returns an error all are where they were.
func moveIn(work, dir string, names ...string) error {
	type move struct{ from, to string }
	var done []move
	for _, name := range names {
		from, to := filepath.Join(work, name), filepath.Join(dir, name)
		if _, err := os.Lstat(from); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		for _, m := range []move{{to, from + ".old"}, {from, to}} {
			err := os.Rename(m.from, m.to)
			if errors.Is(err, fs.ErrNotExist) && m.from == to {
				continue // dir has none
			}
			if err != nil {
				for _, d := range slices.Backward(done) {
					err = errors.Join(err, os.Rename(d.to, d.from))
				}
				return err
			}
			done = append(done, m)
		}
	}
	return nil
}

// writePart writes a part to a new file. It is an error if the content is not that of the part.
func writePart(path string, want backup.Part, content io.Reader) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	got, err := backup.PartOf(want.Name, io.TeeReader(content, f))
	if err == nil && got != want {
		err = errors.New("the file has changed since its hashes were checked")
	}
	return errors.Join(err, f.Sync(), f.Close())
}

// restoreStore makes the directory of an etcd of one member out of a snapshot at a revision.
func restoreStore(file, dir string, revision int64) error {
	c := etcdConfig(dir, "", Options{Log: slog.New(slog.DiscardHandler)}, etcdFailures{})
	return snapshot.NewV3(zap.NewNop()).Restore(snapshot.RestoreConfig{
		SnapshotPath: file, Name: c.Name, OutputDataDir: dir, PeerURLs: []string{c.AdvertisePeerUrls[0].String()},
		InitialCluster: c.InitialCluster, InitialClusterToken: c.InitialClusterToken,
		RevisionBump: revisionBump(revision, time.Now()), MarkCompacted: true,
	})
}
