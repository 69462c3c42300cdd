package residence_test

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/residence"
)

// fileKB is how much of files is resident in this process, in kilobytes.
func fileKB(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "RssFile:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("no RssFile in /proc/self/status")
	return 0
}

// The program's pages leave the process, and it goes on running.
func TestTrim(t *testing.T) {
	before := fileKB(t)
	if err := residence.Trim(); err != nil {
		t.Fatal(err)
	}
	after := fileKB(t)
	if after >= before {
		t.Errorf("%d kB of files are resident, %d before", after, before)
	}
	if s := strings.Repeat("x", 3); s != "xxx" {
		t.Errorf("the program is not what it was: %q", s)
	}
}
