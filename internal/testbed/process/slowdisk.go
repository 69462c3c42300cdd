package process

import (
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"
)

// SlowDisk has each fsync of a process take longer, until the result is called.
func SlowDisk(t *testing.T, p *Process, by time.Duration) (end func()) {
	t.Helper()
	s := Start(t, exec.Command("strace", "-f", "-p", strconv.Itoa(p.Pid()), "-o", "/dev/null",
		"-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:delay_enter="+strconv.FormatInt(by.Microseconds(), 10)))
	s.Says("attached")
	return func() {
		s.Signal(os.Interrupt)
		_ = s.Wait() // by the signal
	}
}
