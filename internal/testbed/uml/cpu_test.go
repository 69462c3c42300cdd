package uml

import (
	"errors"
	"net"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// The guest has one CPU: while one program holds it, the next finds none free.
func TestPin(t *testing.T) {
	first, second := startSleep(t), startSleep(t)
	release, err := pin(first)
	if err != nil {
		t.Fatal(err)
	}
	if free(t) {
		t.Error("CPU 0 is free while a program is kept there")
	}
	none, err := pin(second)
	if err != nil {
		t.Fatalf("with no CPU free: %v", err)
	}
	none()
	if free(t) {
		t.Error("who found no CPU released that of another")
	}
	release()
	if !free(t) {
		t.Error("CPU 0 is held after its release")
	}
	// Above what any process id can be.
	if _, err := pin(1<<22 + 1); !errors.Is(err, unix.ESRCH) {
		t.Errorf("a process that is not there: %v, want ESRCH", err)
	}
	if !free(t) {
		t.Error("CPU 0 is held after an error")
	}
}

// free reports whether nothing holds CPU 0.
func free(t *testing.T) bool {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@fairlead-uml-cpu-0", Net: "unix"})
	if errors.Is(err, unix.EADDRINUSE) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return true
}

// startSleep starts a program that lives as long as the test.
func startSleep(t *testing.T) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd.Process.Pid
}
