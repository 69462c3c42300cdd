package registered

import (
	"context"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/process"
)

// A check leaves no process behind, has nothing of the agent's environment that it does
// not need, and is not protected as the agent is.
func TestCheckLeavesNothing(t *testing.T) {
	t.Setenv("AGENTS_SECRET", "x")
	score, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	was, err := strconv.Atoi(strings.TrimSpace(string(score)))
	if err != nil {
		t.Fatal(err)
	}
	if err := process.SetOOMScoreAdj(os.Getpid(), 7); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = process.SetOOMScoreAdj(os.Getpid(), was) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	code, out, err := execHere(ctx, []string{"sh", "-c", `
		until [ "$(cat /proc/self/oom_score_adj)" = 0 ]; do sleep 0.01; done
		test -n "$PATH" && test -z "$AGENTS_SECRET" || exit 3
		sleep 600 & echo $!`})
	if err != nil || code != 0 {
		t.Fatalf("%d, %s, %v", code, out, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	left, err := process.Find(pid)
	if err == nil {
		err = left.Wait(ctx)
	} else {
		err = nil // reaped already
	}
	if err != nil {
		t.Errorf("the process that the check has started goes on: %v", err)
	}
}
