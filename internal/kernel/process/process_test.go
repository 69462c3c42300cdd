package process_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func TestIdentity(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	id, err := process.Find(cmd.Process.Pid)
	if err != nil || !id.Alive() {
		t.Fatalf("%v, %v: not alive", id, err)
	}
	// The same pid with another start is another process: it is left alone.
	other := process.ID{Pid: id.Pid, Start: id.Start + 1}
	if other.Alive() {
		t.Error("a process of another time is alive")
	}
	if err := other.Signal(syscall.SIGKILL); err != nil || !id.Alive() {
		t.Errorf("signal to another process: %v, alive %v", err, id.Alive())
	}
	if err := id.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if id.Alive() {
		t.Error("alive after its end")
	}
	for _, gone := range []process.ID{id, {}} {
		if err := gone.Signal(syscall.SIGTERM); err != nil {
			t.Errorf("signal to no process: %v", err)
		}
	}
	if _, err := process.Find(0); err == nil {
		t.Error("found process 0")
	}
}

// Only processes with something of the directory mounted are killed.
func TestKillMountedFrom(t *testing.T) {
	dir, other := filepath.Join(t.TempDir(), "pod-1"), filepath.Join(t.TempDir(), "pod-2")
	start := func(dir string) *exec.Cmd {
		if err := os.MkdirAll(filepath.Join(dir, "etc"), 0o700); err != nil {
			t.Fatal(err)
		}
		source := filepath.Join(dir, "etc", "hosts")
		if err := os.WriteFile(source, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sleep", "60")
		err := mount.Confine(nil, []mount.Bind{{Source: source, Target: "/etc/hosts"}}, func(*os.File) error { return cmd.Start() })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd
	}
	mine, theirs := start(dir), start(other)
	for at, want := range map[string]bool{"/etc/hosts": true, "/etc": true, "/etc/host": false, dir: false} {
		if got := process.MountedAt(at); got != want {
			t.Errorf("something is mounted at %s: %v, want %v", at, got, want)
		}
	}
	id, err := process.Find(theirs.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := process.KillMountedFrom(ctx, dir); err != nil {
		t.Fatal(err)
	}
	if err := mine.Wait(); err == nil || mine.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("ended with %v, want SIGKILL", err)
	}
	if !id.Alive() {
		t.Error("a process of another directory was killed")
	}
}
