// Package process runs the project's programs for tests, as their users do: each
// as a process with a log, on a host of the testbed where one is given.
package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Process is a command that was started.
type Process struct {
	cmd  *exec.Cmd
	t    testing.TB
	log  string // file
	done chan struct{}
	err  error // of Cmd.Wait, once done is closed
}

// Start runs a command in the background. Unless it has ended by then, Stop ends
// it when the test does; its log is shown if the test fails. The kernel kills it
// when this process ends before.
func Start(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	p, err := Begin(t, filepath.Join(t.TempDir(), "log"), cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Stop()
		if t.Failed() {
			t.Logf("%s\n%s", p, p.Log())
		}
	})
	return p
}

// Begin is Start with a file for the log, for a goroutine that must not fail the test. The caller calls End.
func Begin(t testing.TB, file string, cmd *exec.Cmd) (*Process, error) {
	p := &Process{cmd: cmd, t: t, log: file, done: make(chan struct{})}
	// A file and no pipe: nothing waits for grandchildren that hold it open.
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	wait, err := Launch(cmd)
	if err != nil {
		return nil, err
	}
	go func() {
		p.err = wait()
		close(p.done)
	}()
	return p, nil
}

// Launch starts a command that the kernel kills when this process ends. wait, which must
// be called, and once, is Cmd.Wait.
//
// The kernel sends the signal when the thread ends that started the command
// (PR_SET_PDEATHSIG(2const)), and threads end with their namespaces in the middle of a
// test. So one thread starts the command, waits for it, and does nothing else.
func Launch(cmd *exec.Cmd) (wait func() error, err error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started, asked, ended := make(chan error), make(chan struct{}), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			<-asked
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return func() error {
		close(asked)
		return <-ended
	}, nil
}

// String is the command line.
func (p *Process) String() string { return line(p.cmd) }

// Pid returns the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Log returns what the process has written so far.
func (p *Process) Log() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Signal sends a signal.
func (p *Process) Signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Errorf("%s: %v", p, err)
	}
}

// Stopped returns an error unless all threads stand still after SIGSTOP: none is in a system
// call any more.
func (p *Process) Stopped() error {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("%s has no threads: %w", p, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		// proc_pid_stat(5): the state follows the name, which is in parentheses.
		if _, state, _ := strings.Cut(string(text), ") "); !strings.HasPrefix(state, "T") {
			return fmt.Errorf("%s: %s", file, text)
		}
	}
	return nil
}

// Wait waits for the process to end and returns what exec.Cmd.Wait did. One that
// does not end is made to print its goroutines into the log.
func (p *Process) Wait() error {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(testbed.Patience):
		p.t.Errorf("%s did not end within %s", p, testbed.Patience)
		_ = p.cmd.Process.Signal(syscall.SIGQUIT)
		select {
		case <-p.done:
		case <-time.After(10 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.done
		}
	}
	return p.err
}

// Stop ends the process by SIGTERM, after which its exit code must be 0. It does
// nothing to a process that has ended.
func (p *Process) Stop() {
	p.t.Helper()
	if p.Ended() {
		return
	}
	p.Signal(syscall.SIGTERM)
	since := time.Now()
	if err := p.Wait(); err != nil {
		p.t.Errorf("%s ended with %v after SIGTERM", p, err)
	}
	if took := time.Since(since); took > 10*time.Second { // no promise: what a slow stop waits for is in its log
		p.t.Logf("%s took %s to end", p, took.Round(time.Second))
	}
}

// End ends the process by SIGTERM, or by SIGKILL if it has not ended after Patience, whatever its exit code
// is then. It does not fail the test.
func (p *Process) End() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.done:
	case <-time.After(testbed.Patience):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// Code is the exit code of a process that has ended; -1 if a signal ended it.
func (p *Process) Code() int {
	<-p.done
	return p.cmd.ProcessState.ExitCode()
}

// Kill ends the process by SIGKILL, if it still runs.
func (p *Process) Kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("%s: %v", p, err)
	}
	_ = p.Wait() // it was killed
}

// Says waits until the log matches a regular expression, and returns the match
// with its groups.
func (p *Process) Says(pattern string) []string {
	p.t.Helper()
	want := regexp.MustCompile(pattern)
	var found []string
	testbed.Until(p.t, fmt.Sprintf("%s to print %q", p, pattern), func() error {
		ended := p.Ended()
		log := p.Log()
		if found = want.FindStringSubmatch(log); found != nil {
			return nil
		}
		if ended {
			p.t.Fatalf("%s ended with %v and has not printed %q:\n%s", p, p.err, pattern, log)
		}
		return fmt.Errorf("it has printed\n%s", log)
	})
	return found
}

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Result runs a command to its end.
func Result(t testing.TB, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := run(cmd)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", line(cmd), err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// Output runs a command that must succeed, and returns its standard output
// without the white space around it.
func Output(t testing.TB, cmd *exec.Cmd) string {
	t.Helper()
	out, stderr, code := Result(t, cmd)
	if code != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", line(cmd), code, out, stderr)
	}
	return strings.TrimSpace(out)
}

// Try runs a command and returns both of its outputs, without the white space
// around them. The error of a command that fails contains them too.
func Try(cmd *exec.Cmd) (string, error) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := run(cmd)
	text := strings.TrimSpace(out.String())
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", line(cmd), err, text)
	}
	return text, err
}

// run is exec.Cmd.Run for a command that is killed after Patience.
func run(cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	timer := time.AfterFunc(testbed.Patience, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	return cmd.Wait()
}

func line(cmd *exec.Cmd) string { return strings.Join(cmd.Args, " ") }
