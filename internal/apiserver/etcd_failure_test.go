package apiserver_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// A damaged file of etcd ends the start with what to do, not with a panic.
func TestDamagedEtcd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
	stop()
	db := filepath.Join(dir, "etcd/member/snap/db")
	wals, err := filepath.Glob(filepath.Join(dir, "etcd/member/wal/*.wal"))
	if err != nil || len(wals) == 0 {
		t.Fatal("no log", err)
	}
	for _, c := range []struct {
		name, file string
		change     func([]byte) []byte
	}{
		{"cut short", db, func(b []byte) []byte { return b[:3*4096] }},
		{"zeros", db, func(b []byte) []byte { clear(b[2*4096:]); return b }},
		{"other pages", db, func(b []byte) []byte {
			for i := 2 * 4096; i < len(b); i++ {
				b[i] = 0xa5
			}
			return b
		}},
		{"empty", db, func([]byte) []byte { return nil }},
		{"no store", db, func(b []byte) []byte { return []byte(strings.Repeat("x", len(b))) }},
		{"log", wals[0], func(b []byte) []byte {
			for i := 64; i < 4096; i++ {
				b[i] ^= 0xff
			}
			return b
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			good, err := os.ReadFile(c.file)
			if err != nil {
				t.Fatal(err)
			}
			defer os.WriteFile(c.file, good, 0o600)
			if err := os.WriteFile(c.file, c.change(append([]byte(nil), good...)), 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := apiserver.New(apiserver.Options{DataDir: dir, UnsafeNoFsync: true, Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
			defer cancel()
			err = s.Run(ctx)
			if err == nil || !strings.Contains(err.Error(), "damaged") || !strings.Contains(err.Error(), ".old; mv ") {
				t.Errorf("got %v", err)
			}
			t.Log(err)
		})
	}
}

// A full disk ends the server with the name of the disk and what it needs.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("mounts a file system in a namespace of its own, which needs root")
	}
	dir := t.TempDir()
	cmd := onDisk(dir, "40m")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	wait, err := process.Launch(cmd)
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(2*waitTimeout, func() { cmd.Process.Kill() })
	defer timer.Stop()
	text, _ := io.ReadAll(out)
	err = wait()
	want := fmt.Sprintf("the disk of %s/etcd is full (fulldisk, mounted at %s", dir, dir)
	if err == nil || !strings.HasPrefix(string(text), want) {
		t.Errorf("got %q, %v; want %q", text, err, want)
	}
}

// onDisk is a server, in its own process, with a file system of that size as its
// data directory.
func onDisk(dir, size string) *exec.Cmd {
	cmd := exec.Command("unshare", "-m", "sh", "-c", `mount -t tmpfs -o "size=$2" fulldisk "$1" && exec "$0"`, os.Args[0], dir, size)
	cmd.Env = append(os.Environ(), serveEnv+"="+dir)
	return cmd
}
