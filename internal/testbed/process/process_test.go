package process_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// A process outlives the thread of the test that started it: the signal of its parent's end does not come before that end.
func TestProcessOutlivesTheThreadThatStartsIt(t *testing.T) {
	var p *process.Process
	var thread string
	if err := netns.OnThread(func() error {
		thread = fmt.Sprintf("/proc/self/task/%d", unix.Gettid())
		p = process.Start(t, exec.Command("sh", "-c", `trap "exit 0" TERM; echo up; while :; do sleep 0.1; done`))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	p.Says("up")
	testbed.Until(t, "the end of the thread", func() error {
		if _, err := os.Stat(thread); err == nil {
			return errors.New("it runs")
		}
		return nil
	})
	p.Signal(syscall.SIGTERM)
	if err := p.Wait(); err != nil {
		t.Errorf("the process ended with %v", err)
	}
}
