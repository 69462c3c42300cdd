package cgroup_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

// The machine's own controllers may belong to version 1; the guest has version 2, and
// memory that no test here can take from the machine.
func TestMain(m *testing.M) {
	if out := os.Getenv(unitEnv); out != "" {
		runAsUnit(out)
	}
	uml.Main(m, linkProgram)
}

const mounted = "/sys/fs/cgroup"

func tree(t *testing.T) *cgroup.Tree {
	t.Helper()
	if err := unix.Mount("none", mounted, "cgroup2", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	tr, err := cgroup.Open("fairlead-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		tr.Close()
		if _, err := os.Stat(mounted + "/fairlead-test"); !os.IsNotExist(err) {
			t.Errorf("the tree is left: %v", err)
		}
	})
	return tr
}

// group makes a group that is removed at the end.
func group(t *testing.T, tr *cgroup.Tree, l cgroup.Limits) cgroup.Group {
	t.Helper()
	g := tr.Group(strings.ReplaceAll(t.Name(), "/", "-"))
	if err := g.Make(l, false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := errors.Join(g.Kill(ctx), g.Remove()); err != nil {
			t.Error(err)
		}
	})
	return g
}

// start starts a script in g.
func start(t *testing.T, g cgroup.Group, script string) (*exec.Cmd, *strings.Builder) {
	t.Helper()
	dir, err := g.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	var out strings.Builder
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	cmd.WaitDelay = time.Second // its children have the pipe, too
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, &out
}

// What asks for more memory than its group may have is killed, all of it, and counted.
func TestMemory(t *testing.T) {
	g := group(t, tree(t), cgroup.Limits{Memory: 32 << 20})
	// The memory is asked for within one system call: a program that reaches its limit step by step may
	// spend minutes reading the its own pages code again.
	cmd, out := start(t, g, "dd if=/dev/zero of=/dev/null bs=300M count=1 & wait; echo outlived")
	if err := cmd.Wait(); err == nil || strings.Contains(out.String(), "outlived") {
		t.Errorf("300 MB were had under a limit of 32 MiB: %v, %s", err, out)
	}
	if g.OOMKills() == 0 {
		t.Error("the kill is not counted")
	}
}

// A bomb of forks stays within its group's limit, and Kill ends all of it.
func TestForks(t *testing.T) {
	g := group(t, tree(t), cgroup.Limits{PIDs: 20})
	cmd, _ := start(t, g, "i=0; while [ $i -lt 500 ]; do sleep 600 & i=$((i+1)); done; wait")
	deadline := time.Now().Add(30 * time.Second)
	for g.Usage().PIDs < 20 {
		if time.Now().After(deadline) {
			t.Fatalf("%d processes, want 20", g.Usage().PIDs)
		}
		<-time.After(5 * time.Millisecond)
	}
	if n := g.Usage().PIDs; n > 20 {
		t.Errorf("%d processes under a limit of 20", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := g.Kill(ctx); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the first process was not killed")
	}
}

func TestLimitsAsFiles(t *testing.T) {
	g := group(t, tree(t), cgroup.Limits{Memory: 64 << 20, CPU: 500, Weight: 39, PIDs: 100})
	want := map[string]string{
		"memory.max": "67108864", "memory.oom.group": "1", "cpu.weight": "39", "pids.max": "100", "cpu.max": "50000 100000",
	}
	check := func() {
		t.Helper()
		for file, value := range want {
			if b, err := os.ReadFile(filepath.Join(g.Dir(), file)); err != nil || strings.TrimSpace(string(b)) != value {
				t.Errorf("%s is %q, %v; want %q", file, b, err, value)
			}
		}
	}
	check()
	if err := g.Limit(cgroup.Limits{}); err != nil {
		t.Fatal(err)
	}
	want = map[string]string{"memory.max": "max", "pids.max": "max", "cpu.max": "max 100000"}
	check()
}

func TestUsage(t *testing.T) {
	tr := tree(t)
	g := group(t, tr, cgroup.Limits{})
	if !slices.Contains(tr.Names(), t.Name()) {
		t.Errorf("groups are %v", tr.Names())
	}
	cmd, _ := start(t, g, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if u := g.Usage(); u.CPU <= 0 {
		t.Errorf("usage %+v", u)
	}
}

// Without the controllers the error says so.
func TestUnavailable(t *testing.T) {
	if err := unix.Unmount(mounted, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Fatal(err)
	}
	if _, err := cgroup.Open("fairlead-test"); !errors.Is(err, cgroup.ErrUnavailable) {
		t.Errorf("Open = %v, want ErrUnavailable", err)
	}
}
