// Command summary reads the output of go test -json, from files side by side or from standard input, and prints what
// a person wants of it: a line for each package, the whole output of what failed, the
// reason of each skip, the slow tests, and closing totals. It exits with 1 when a test failed.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64
}

type report struct {
	out                     io.Writer
	output                  map[string][]string
	passed, failed, skipped int
	broken                  []string
	tests                   []timed // that are not part of another one
	packages                []timed
	skips                   []string
}

// timed is a test or package with the seconds it took. Those of a parallel test begin when go test lets it go on.
type timed struct {
	name    string
	seconds float64
}

// The summary names at most mostSlow tests of at least slow seconds, and as many packages. They decide how long the suite takes.
const mostSlow, slow = 25, 10

func main() {
	start := time.Now()
	r := &report{out: os.Stdout, output: map[string][]string{}}
	lines := make(chan string)
	var reading errgroup.Group
	for _, name := range inputs() {
		reading.Go(func() error { return read(name, lines) })
	}
	failed := make(chan error, 1)
	go func() {
		failed <- reading.Wait()
		close(lines)
	}()
	for line := range lines {
		var e event
		if json.Unmarshal([]byte(line), &e) != nil {
			fmt.Println(line)
			continue
		}
		r.add(e)
	}
	if err := <-failed; err != nil {
		fmt.Fprintln(os.Stderr, "summary: reading the test output:", err)
		os.Exit(1)
	}
	os.Exit(r.close(time.Since(start)))
}

// inputs are the files of the command line.
func inputs() []string {
	if len(os.Args) > 1 {
		return os.Args[1:]
	}
	return []string{os.Stdin.Name()}
}

// read sends each line of a file.
func read(name string, lines chan<- string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		lines <- in.Text()
	}
	return in.Err()
}

func (r *report) add(e event) {
	key := e.Package + e.ImportPath + " " + e.Test
	switch e.Action {
	case "output", "build-output":
		r.output[key] = append(r.output[key], e.Output)
		return
	case "build-fail":
		r.fail(key)
		return
	case "pass", "fail", "skip":
	default:
		return
	}
	if e.Test == "" {
		r.closePackage(e, key)
		return
	}
	if !strings.Contains(e.Test, "/") && e.Elapsed >= slow {
		r.tests = append(r.tests, timed{key, e.Elapsed})
	}
	switch e.Action {
	case "pass":
		r.passed++
	case "fail":
		r.failed++
		r.fail(key)
	case "skip":
		r.skipped++
		r.skips = append(r.skips, key+": "+reason(r.output[key]))
	}
	delete(r.output, key)
}

func (r *report) closePackage(e event, key string) {
	fmt.Fprintf(r.out, "%-5s %s %.1fs\n", e.Action, strings.TrimPrefix(e.Package, "github.com/fairlead/"), e.Elapsed)
	if e.Action == "fail" {
		r.fail(key)
		r.unfinished(e.Package)
	}
	if e.Elapsed >= slow {
		r.packages = append(r.packages, timed{key, e.Elapsed})
	}
	delete(r.output, key)
}

// unfinished reports the tests of a package that were running at its end: tests that took
// longer than -timeout, and the one that has the panic in its output.
func (r *report) unfinished(pkg string) {
	for _, key := range slices.Sorted(maps.Keys(r.output)) {
		if test, ok := strings.CutPrefix(key, pkg+" "); ok && test != "" {
			r.failed++
			r.fail(key)
			delete(r.output, key)
		}
	}
}

func (r *report) fail(key string) {
	why := strings.TrimSpace(key) + complaint(r.output[key])
	r.broken = append(r.broken, why)
	fmt.Fprintf(r.out, "--- %s\n%s--- once more: %s\n", key, strings.Join(r.output[key], ""), why)
}

func (r *report) close(took time.Duration) int {
	slices.Sort(r.skips)
	for _, s := range r.skips {
		fmt.Fprintln(r.out, "skipped:", s)
	}
	for _, all := range [][]timed{r.packages, r.tests} {
		slices.SortFunc(all, func(a, b timed) int { return cmp.Compare(b.seconds, a.seconds) })
		for _, t := range all[:min(mostSlow, len(all))] {
			fmt.Fprintf(r.out, "slow: %.0fs %s\n", t.seconds, strings.TrimSpace(strings.TrimPrefix(t.name, "github.com/fairlead/")))
		}
	}
	for _, b := range r.broken { // near the end, which is all that a reader of a long log sees
		fmt.Fprintln(r.out, "failed:", b)
	}
	fmt.Fprintf(r.out, "in %s\n%d passed, %d failed, %d skipped\n", took.Round(time.Second), r.passed, r.failed, r.skipped)
	if len(r.broken) > 0 || r.passed == 0 {
		return 1
	}
	return 0
}

// complaint is the first lines that a failed test printed, and the last ones that its own file
// printed or that tell of a process that did not end: a reader of only the end of a long log still
// reads what went wrong, though the logs of the test's processes follow it.
func complaint(lines []string) string {
	const first, last = 4, 6
	var all, own []string
	for _, l := range lines {
		l = strings.TrimSpace(l)
		if l == "" || strings.HasPrefix(l, "---") || strings.HasPrefix(l, "===") {
			continue
		}
		if len(l) > 300 {
			l = l[:300] + " ..."
		}
		if len(all) < first {
			all = append(all, l)
		} else if ofTest.MatchString(l) {
			own = append(own, l)
		}
	}
	var out strings.Builder
	for _, l := range slices.Concat(all, own[max(0, len(own)-last):]) {
		out.WriteString("\n        " + l)
	}
	return out.String()
}

// ofTest matches what t.Error and t.Log print of a test's own file, and what the end of a test says of its processes.
var ofTest = regexp.MustCompile(`^(\w+_test\.go:\d+: |\w+\.go:\d+: .* (did not end within|ended with) )`)

// reason is the last line a skipped test printed itself.
func reason(lines []string) string {
	for _, l := range slices.Backward(lines) {
		l = strings.TrimSpace(l)
		if l != "" && !strings.HasPrefix(l, "---") && !strings.HasPrefix(l, "===") {
			return l
		}
	}
	return "no reason given"
}
