package store

import (
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/backup"
)

// A backup has the keys that links lead to, and neither the temporary files of a write that was cut
// off nor an editor's; a link that leads nowhere is an error.
func TestBackupOfKeys(t *testing.T) {
	t.Parallel()
	dir, elsewhere := t.TempDir(), t.TempDir()
	for _, d := range []string{"pki", "pki/old"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"version", "pki/ca.crt", "pki/ca.crt~", "pki/.server.key-123", "pki/#ca.crt#"} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	own := filepath.Join(elsewhere, "own.key")
	if err := os.WriteFile(own, []byte("own"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(own, filepath.Join(dir, "pki/ca.key")); err != nil {
		t.Fatal(err)
	}
	small, err := readSmall(dir)
	if got := slices.Sorted(maps.Keys(small)); err != nil || !slices.Equal(got, []string{"pki/ca.crt", "pki/ca.key", "version"}) {
		t.Errorf("%v, %v", got, err)
	}
	if got := string(small["pki/ca.key"]); got != "own" {
		t.Errorf("the file behind a link has %q", got)
	}
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	if _, err := readSmall(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link that leads nowhere: %v", err)
	}
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := readSmall(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a link to a directory: %v", err)
	}
}

// Each night has one backup, days without a night have one, too, and seven stay.
func TestNightlyBackups(t *testing.T) {
	t.Parallel()
	dir, err := OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if _, err := pki.Open(dir.File("pki"), time.Now); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir.File("pki/.server.key-123"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	store, err := Start(t.Context(), dir.File("etcd"), Options{Quota: DefaultQuota, Log: log, UnsafeNoFsync: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Stop()
	start := time.Date(2026, 3, 1, 10, 0, 0, 0, time.Local)
	n := &nightly{dir: dir.Path, release: "v0", keep: 7, endpoints: store.Endpoints, log: log, started: start.Add(-time.Hour)}
	if n.due(n.started) || !n.due(n.started.Add(backupCheck)) {
		t.Error("the first backup is due 10 minutes after the start")
	}
	if err := n.make(t.Context(), start); err != nil {
		t.Fatal(err)
	}
	made := 1
	leftover := filepath.Join(dir.Path, backupDirectory, backingUp+"1")
	if err := os.Mkdir(leftover, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(leftover, time.Time{}, time.Now().Add(-2*backupTimeout)); err != nil {
		t.Fatal(err)
	}
	for now := start; now.Before(start.AddDate(0, 0, 9)); now = now.Add(backupCheck) {
		if !n.due(now) {
			continue
		}
		if made++; now.Hour() != backupHour {
			t.Errorf("made at %s", now)
		}
		if err := n.make(t.Context(), now); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(leftover); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the work of a process that was killed is still there: %v", err)
	}
	list := n.list()
	if made != 10 || len(list) != 7 {
		t.Errorf("made %d, want 10; %v", made, list)
	}
	for _, name := range list {
		m, err := CheckBackup(filepath.Join(dir.Path, backupDirectory, name))
		if err != nil || m.Version != "v0" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir.Path, backupDirectory, "notes.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if len(n.list()) != 7 {
		t.Error("another file counts as a backup")
	}
	testDue(t, n, start.AddDate(0, 0, 10))
}

// A machine that is off at night makes a backup each morning, and a backup with a time to come
// neither counts as one nor costs another its place.
func testDue(t *testing.T, n *nightly, day time.Time) {
	for range 3 {
		n.started = time.Date(day.Year(), day.Month(), day.Day(), 8, 0, 0, 0, time.Local)
		day = day.AddDate(0, 0, 1)
		if n.due(n.started.Add(backupCheck / 2)) {
			t.Error("one is due at once after the start")
		}
		made := 0
		for now := n.started.Add(backupCheck); now.Hour() < 18; now = now.Add(backupCheck) {
			if n.due(now) {
				made++
				if err := n.make(t.Context(), now); err != nil {
					t.Fatal(err)
				}
			}
		}
		if made != 1 {
			t.Errorf("made %d on a day of a machine that is off at night", made)
		}
	}
	for i := range n.keep {
		name := day.AddDate(1, 0, i).UTC().Format(backupPrefix + backupStamp + backupSuffix)
		if err := os.WriteFile(filepath.Join(n.dir, backupDirectory, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	now := day.Add(30 * time.Hour)
	if !n.due(now) {
		t.Error("none is due beside backups with a time to come")
	}
	if err := n.make(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	if got := n.until(now); len(got) != n.keep || !backupTime(got[len(got)-1]).Equal(now) {
		t.Errorf("beside backups with a time to come are %v", got)
	}
}

// What cannot all be moved in is moved back, and a part that changes while it is read is an error.
func TestRestoreIsUndone(t *testing.T) {
	t.Parallel()
	work, dir := t.TempDir(), t.TempDir()
	for file, text := range map[string]string{work + "/version": "new", work + "/pki": "new", dir + "/version": "old"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{dir + "/etcd", work + "/etcd", work + "/etcd.old/full"} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := moveIn(work, dir, "version", "node-token", "pki", "etcd"); err == nil {
		t.Error("a directory has replaced one that is not empty")
	}
	for file, want := range map[string]string{work + "/version": "new", work + "/pki": "new", dir + "/version": "old"} {
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s has %q, %v, want %q", file, got, err, want)
		}
	}
	part, err := backup.PartOf("version", strings.NewReader("1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := writePart(filepath.Join(work, "part"), part, strings.NewReader("2")); err == nil {
		t.Error("a part with another hash is restored")
	}
}

// What backups and restores have left that were killed, copies of the store, goes with the data.
func TestRemoveDataRemovesLeftovers(t *testing.T) {
	path := t.TempDir()
	for _, dir := range []string{backingUp + "1", restoring + "1"} {
		if err := os.Mkdir(filepath.Join(path, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for file, text := range map[string]string{"version": "1\n", backingUp + "1/db": "", "mine": ""} {
		if err := os.WriteFile(filepath.Join(path, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := RemoveData(path); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(path); err != nil || len(left) != 1 || left[0].Name() != "mine" {
		t.Errorf("left: %v, %v", left, err)
	}
}
