package uml

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

const (
	// dirEnv tells the guest's first process where, on the machine, the files
	// are that both sides share. The kernel hands it on from its command line.
	dirEnv = "FAIRLEAD_UML_DIR"
	// testEnv marks the process in the guest that runs the tests.
	testEnv = "FAIRLEAD_UML_TEST"

	program = "linux.uml"
	modules = "/usr/lib/uml/modules"
	memory  = "768M"

	// Page faults and threads of the garbage collector are rounds of ptrace here: the process
	// of the tests collects at four times its live heap more, but at gcLimit bytes in any case.
	// The programs that it starts keep their own settings.
	gcPercent = 400
	gcLimit   = 200 << 20

	// The files of the shared directory.
	jobFile     = "job"     // what to run
	outputFile  = "output"  // what the tests print
	consoleFile = "console" // what the guest's kernel prints
	exitFile    = "exit"    // the exit code, written last

	// grace is how long after -test.timeout the guest may go on. The tests stop
	// themselves at the timeout; only a guest that hangs lives longer.
	grace = 30 * time.Second
	// defaultTimeout is that of go test.
	defaultTimeout = 10 * time.Minute
)

// job is what the guest is to run.
type job struct {
	Args, Env []string
	Dir       string
}

// Main runs the tests of m in the guest and exits with their code. prepare is
// called on the machine before, with the directory that the guest has as Shared:
// programs for the tests can be put there.
func Main(m *testing.M, prepare ...func(dir string) error) { MainWith(m, nil, prepare...) }

// MainWith is Main for a guest whose kernel gets further parameters.
func MainWith(m *testing.M, parameters []string, prepare ...func(dir string) error) {
	switch {
	case os.Getenv(testEnv) != "":
		debug.SetGCPercent(gcPercent)
		debug.SetMemoryLimit(gcLimit)
		testbed.Patience *= 2
		os.Exit(m.Run())
	case os.Getpid() == 1 && os.Getenv(dirEnv) != "":
		guest()
	case stays(os.Args[1:]):
		os.Exit(m.Run())
	}
	code, err := host(parameters, prepare)
	if err != nil {
		fmt.Fprintln(os.Stderr, "uml:", err)
		code = 1
	}
	os.Exit(code)
}

// stays says that the flags ask for something that needs no guest.
func stays(args []string) bool {
	for _, a := range args {
		name, value, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if value != "" && (name == "test.fuzz" || name == "test.list") || name == "test.fuzzworker" {
			return true
		}
	}
	return false
}

// host starts a guest for this program and returns the exit code of the tests.
func host(parameters []string, more []func(dir string) error) (code int, err error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return 0, fmt.Errorf("%w: install User Mode Linux (Debian: user-mode-linux) with test/setup.sh", err)
	}
	dir, err := prepare()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, f := range more {
		if err := f(dir); err != nil {
			return 0, err
		}
	}
	library, err := preload(dir)
	if err != nil {
		return 0, err
	}
	exe, err := os.Executable()
	if err != nil {
		return 0, err
	}
	console, err := os.Create(filepath.Join(dir, consoleFile))
	if err != nil {
		return 0, err
	}
	defer func() { _ = console.Close() }()
	cmd := exec.Command(path, append([]string{"mem=" + memory, "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
		"init=" + exe, dirEnv + "=" + dir, "con=null", "con0=fd:0,fd:1", "quiet", "panic=-1"}, parameters...)...)
	cmd.Env = append(os.Environ(), library...)
	cmd.Stdout, cmd.Stderr = console, console
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start %s: %w", path, err)
	}
	// The guest's clock goes on while it waits for a processor: beside other tests the time-outs of its programs would end too
	// early. Without root there is no right to do this.
	_ = unix.Setpriority(unix.PRIO_PGRP, cmd.Process.Pid, niceness)
	release, err := pin(cmd.Process.Pid)
	if err != nil {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		return 0, errors.Join(err, cmd.Wait())
	}
	defer release()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return follow(dir, cmd.Process.Pid, ended, time.Now().Add(timeout(os.Args[1:])+grace))
}

// niceness is that of a guest's processes.
const niceness = -10

// prepare makes the shared directory.
func prepare() (string, error) {
	if found, _ := filepath.Glob(modules + "/*"); len(found) == 0 {
		return "", fmt.Errorf("no modules in %s: install User Mode Linux (Debian: user-mode-linux) with test/setup.sh", modules)
	}
	here, err := os.Getwd()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "fairlead-uml-")
	if err != nil {
		return "", err
	}
	j := job{Dir: here, Env: os.Environ()}
	for _, a := range os.Args[1:] {
		// go test reads this one to know what a result depends on; it is content
		// with none, and runs the tests again next time.
		if !strings.HasPrefix(strings.TrimLeft(a, "-"), "test.testlogfile=") {
			j.Args = append(j.Args, a)
		}
	}
	text, err := json.Marshal(j)
	if err != nil {
		return "", err
	}
	return dir, errors.Join(
		os.WriteFile(filepath.Join(dir, jobFile), text, 0o600),
		os.WriteFile(filepath.Join(dir, outputFile), nil, 0o600),
		os.Mkdir(filepath.Join(dir, "lib"), 0o700),
		os.Symlink(modules, filepath.Join(dir, "lib", "modules")))
}

func timeout(args []string) time.Duration {
	for _, a := range args {
		if v, ok := strings.CutPrefix(strings.TrimLeft(a, "-"), "test.timeout="); ok {
			if d, err := time.ParseDuration(v); err == nil && d > 0 {
				return d
			}
		}
	}
	return defaultTimeout
}

// follow prints what the tests print until the guest ends, which it must do by
// the deadline.
func follow(dir string, pid int, ended <-chan error, deadline time.Time) (int, error) {
	output, err := os.Open(filepath.Join(dir, outputFile))
	if err != nil {
		return 0, err
	}
	defer func() { _ = output.Close() }()
	look := time.NewTicker(100 * time.Millisecond)
	defer look.Stop()
	// The guest is several processes: what ends this one ends all of them.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(signals)
	var died error
	for running := true; running; {
		select {
		case s := <-signals:
			_ = unix.Kill(-pid, unix.SIGKILL)
			<-ended
			return 0, fmt.Errorf("stopped by signal %s", s)
		case died = <-ended:
			running = false
		case <-look.C:
			if time.Now().After(deadline) {
				_ = unix.Kill(-pid, unix.SIGKILL)
				<-ended
				died, running = errors.New("killed, since it did not end in time"), false
			}
		}
		if _, err := io.Copy(os.Stdout, output); err != nil {
			return 0, err
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, exitFile))
	if err != nil {
		said, _ := os.ReadFile(filepath.Join(dir, consoleFile))
		return 0, fmt.Errorf("the guest ended without a result: %w; its console says:\n%s", errors.Join(err, died),
			bytes.ReplaceAll(said, []byte("\r"), nil))
	}
	return strconv.Atoi(string(text))
}
