package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// insideEnv marks the process that runs inside the namespaces.
const insideEnv = "FAIRLEAD_BENCH_INSIDE"

// reexec runs this program again in its own namespaces and returns its exit
// code; without root, as root of a user namespace. In the process namespace it
// is the first process, so that the kernel ends with it all that it started.
func reexec() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	attr := &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Setpgid:    true,
	}
	if os.Geteuid() != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	cmd.SysProcAttr = attr
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		fmt.Fprintf(os.Stderr, "bench: no namespaces of its own: %v (are user namespaces switched off? then run it as root)\n", err)
		return 1
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for first := (time.Time{}); ; {
		select {
		case s := <-signals:
			// A process group and its first process may be sent the same
			// signal; a second one by a person comes later.
			switch {
			case first.IsZero():
				first = time.Now()
			case time.Since(first) > time.Second:
				s = syscall.SIGKILL
			}
			_ = cmd.Process.Signal(s)
		case err := <-done:
			var exit *exec.ExitError
			if errors.As(err, &exit) && exit.ExitCode() >= 0 {
				return exit.ExitCode()
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, "bench:", err)
				return 1
			}
			return 0
		}
	}
}

// settle prepares the namespaces this process woke up in: mounts that no process
// else sees, its own /proc, and an empty /run for the lock files and names of
// the tools.
func settle() error {
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
		data                 string
	}{
		{"", "/", "", syscall.MS_REC | syscall.MS_PRIVATE, ""},
		{"proc", "/proc", "proc", syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC, ""},
		{"run", "/run", "tmpfs", 0, "mode=755"},
	} {
		if err := syscall.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	return nil
}
