package process_test

import (
	"context"
	"errors"
	"os/exec"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/process"
)

// The end of a process is seen by one that is not its parent, also before it is waited
// for; a wait that is given up ends at once.
func TestWait(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	id, err := process.Find(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := id.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait of a process that runs = %v, want the deadline", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- id.Wait(t.Context()) }()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the end of the process was not seen")
	}
	for _, gone := range []process.ID{id, {}, {Pid: id.Pid, Start: id.Start + 1}} {
		if err := gone.Wait(t.Context()); err != nil {
			t.Errorf("Wait of no process: %v", err)
		}
	}
}
