package shim_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed/process"
)

// proportional is the memory of a process in bytes, in which a page that n processes
// share counts as a part in n (Pss of proc_pid_smaps_rollup(5)).
func proportional(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatalf("no Pss in %s", b)
	return 0
}

// smallShim builds the program that 'make build' embeds.
func smallShim(t *testing.T) string {
	t.Helper()
	path := process.Build(t, ".", "./cmd/fairlead-shim", "-trimpath", "-ldflags", "-s -w")
	unix.Sync() // pages not written back count as each process's own
	return path
}

// Twelve Pods with a container each: their shims have at most 2 MB each, for with more
// of them only the share of the program's pages gets smaller.
func TestShimIsSmall(t *testing.T) {
	program := smallShim(t)
	const pods, limit = 12, 2 << 20
	var all []*pod
	for range pods {
		p := newPodOf(t, program)
		p.watch()
		if st := p.start(p.container("echo hello; exec sleep 600")); st.Exited {
			t.Fatalf("the container did not start: %+v", st)
		}
		all = append(all, p)
	}
	sum := 0
	for _, p := range all {
		await(t, "the output", func() bool { return strings.Contains(p.log(), "hello") })
		sum += proportional(t, p.id.Pid)
	}
	t.Logf("%d shims have %d KB each", pods, sum/pods>>10)
	if sum/pods > limit {
		t.Errorf("a shim has %d KB of memory, at most %d are wanted", sum/pods>>10, limit>>10)
	}
}
