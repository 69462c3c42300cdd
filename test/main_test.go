// Package test runs the whole binary as its users do: fairlead, kubectl and curl
// as processes, in namespaces of their own.
package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// bin is where the binaries are: $FAIRLEAD_BIN, which make test sets, or a
// directory they were built into.
var bin string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if bin = os.Getenv("FAIRLEAD_BIN"); bin != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "fairlead-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	for where, pkgs := range map[string][]string{"..": {"./cmd/fairlead", "./examples/backend"}, "kubectl": {"."}} {
		cmd := exec.Command("go", append([]string{"build", "-o", dir + "/"}, pkgs...)...)
		cmd.Dir, cmd.Stderr = where, os.Stderr
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if err := cmd.Run(); err != nil {
			fmt.Fprintln(os.Stderr, "build:", err)
			return 1
		}
	}
	bin = dir
	return m.Run()
}

// until polls check until it is nil; its last error fails the test.
func until(t *testing.T, what string, within time.Duration, check func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s: %v", within, what, err)
		}
		<-tick.C
	}
}

// process is a started command with its output so far.
type process struct {
	*exec.Cmd
	stdout, stderr *os.File
	done           chan struct{}
	err            error
}

// start runs a command in the background until the test ends.
func start(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{Cmd: cmd, done: make(chan struct{})}
	for name, f := range map[string]**os.File{"stdout": &p.stdout, "stderr": &p.stderr} {
		file, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		*f = file
	}
	cmd.Stdout, cmd.Stderr = p.stdout, p.stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.stop(t)
		if t.Failed() {
			t.Logf("%s\nstdout:\n%s\nstderr:\n%s", strings.Join(cmd.Args, " "), read(p.stdout), read(p.stderr))
		}
	})
	return p
}

// stop ends the process by SIGTERM and waits for it.
func (p *process) stop(t *testing.T) {
	t.Helper()
	p.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(60 * time.Second):
		p.Process.Signal(syscall.SIGQUIT)
		t.Errorf("%s did not stop within a minute", p.Args[0])
		<-p.done
	}
}

func read(f *os.File) string {
	text, err := os.ReadFile(f.Name())
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// output runs a command that must succeed, within a minute.
func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	out, stderr, code := result(t, cmd)
	if code != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", strings.Join(cmd.Args, " "), code, out, stderr)
	}
	return strings.TrimSpace(out)
}

// result runs a command within a minute.
func result(t *testing.T, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	timer := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", strings.Join(cmd.Args, " "), err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// program is one of the binaries.
func program(name string) string { return filepath.Join(bin, name) }

// TestDemo runs what make demo runs: its own checks say whether every result is
// right.
func TestDemo(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "run", "./demo", "--bin", bin, "--manifest", "../examples/my-service.yaml")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "all as it should be") {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("\n%s", out)
}
