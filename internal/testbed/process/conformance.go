package process

import (
	"bufio"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Conformance runs the program of the conformance tests of the Gateway API, with -test.v. None may fail, and some must pass. Its output
// goes into the file log, or one in its directory.
func Conformance(t testing.TB, cmd *exec.Cmd, log string) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(cmp.Or(log, filepath.Join(cmd.Dir, "suite.log")))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd.Stderr = file
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	count := map[string]int{}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		_, _ = fmt.Fprintln(file, lines.Text())
		verdict, test, ok := strings.Cut(strings.TrimSpace(lines.Text()), ": TestConformance/")
		verdict, is := strings.CutPrefix(verdict, "--- ")
		if !ok || !is || strings.Contains(test, "/") {
			continue
		}
		count[verdict]++
		t.Logf("%s %s", verdict, test)
	}
	err = cmd.Wait()
	t.Logf("%d passed, %d failed, %d skipped, in %s", count["PASS"], count["FAIL"], count["SKIP"], time.Since(began).Round(time.Second))
	if err != nil || count["PASS"] == 0 {
		text, _ := os.ReadFile(file.Name())
		t.Errorf("the conformance tests: %v, %d passed; the end of their output:\n%s", err, count["PASS"], text[max(0, len(text)-8000):])
	}
}
