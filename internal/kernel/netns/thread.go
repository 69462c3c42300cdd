package netns

import (
	"errors"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread calls f on an operating system thread that no other goroutine has used
// or will use for anything, and waits for it. It is never the process's first
// thread: that one cannot end, and /proc/PID shows its namespaces as the namespaces of
// the process.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			last(done, f)
			return
		}
		// Holding the first thread here forces the next goroutine elsewhere.
		inner := make(chan error, 1)
		go func() {
			runtime.LockOSThread()
			last(inner, f)
		}()
		err := <-inner
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// last calls f at the end of a locked goroutine's life. The runtime ends the
// thread with the goroutine, because it is still locked.
func last(done chan<- error, f func() error) {
	finished := false
	defer func() {
		if !finished { // runtime.Goexit: a test's Fatal, for example
			done <- errors.New("the function ended its goroutine")
		}
	}()
	err := f()
	finished = true
	done <- err
}
