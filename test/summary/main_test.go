package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A failed test is named once more at the end, with what it said first.
func TestFailureIsNamedWithItsReason(t *testing.T) {
	var out bytes.Buffer
	r := &report{out: &out, output: map[string][]string{}}
	for _, line := range []string{
		"=== RUN   TestX\n", "    x_test.go:1: want 1, got 2\n", "    x_test.go:2: the kernel has:\n", "\n", "a\n", "b\n", "c\n",
	} {
		r.add(event{Action: "output", Package: "p", Test: "TestX", Output: line})
	}
	r.add(event{Action: "fail", Package: "p", Test: "TestX"})
	r.add(event{Action: "pass", Package: "p", Test: "TestY"})
	out.Reset()
	if code := r.close(time.Second); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	want := "failed: p TestX\n        x_test.go:1: want 1, got 2\n        x_test.go:2: the kernel has:\n        a\n        b\n" +
		"in 1s\n1 passed, 1 failed, 0 skipped\n"
	if got := out.String(); got != want {
		t.Errorf("the end is\n%s\nwant\n%s", got, want)
	}
	if strings.Count(out.String(), "TestY") != 0 {
		t.Error("it names what passed")
	}
}

// Slow packages and tests are named, the slowest first, without the parts of tests.
func TestSlowTestsAreNamed(t *testing.T) {
	var out bytes.Buffer
	r := &report{out: &out, output: map[string][]string{}}
	for name, seconds := range map[string]float64{"TestA": 11, "TestA/part": 10.5, "TestB": 9, "TestC": 12} {
		r.add(event{Action: "pass", Package: "p", Test: name, Elapsed: seconds})
	}
	r.add(event{Action: "pass", Package: "p", Elapsed: 13})
	out.Reset()
	if r.close(time.Second); !strings.HasPrefix(out.String(), "slow: 13s p\nslow: 12s p TestC\nslow: 11s p TestA\nin 1s\n") {
		t.Errorf("the end is\n%s", out.String())
	}
}

// Lines of two files that are written side by side are all read.
func TestReadsSideBySide(t *testing.T) {
	dir, lines := t.TempDir(), make(chan string)
	var reading sync.WaitGroup
	for _, name := range []string{"a", "b"} {
		pipe := filepath.Join(dir, name)
		if err := syscall.Mkfifo(pipe, 0o600); err != nil {
			t.Fatal(err)
		}
		reading.Go(func() {
			if err := read(pipe, lines); err != nil {
				t.Error(err)
			}
		})
		reading.Go(func() {
			if err := os.WriteFile(pipe, []byte(strings.Repeat(name+"\n", 10_000)), 0); err != nil {
				t.Error(err)
			}
		})
	}
	go func() {
		reading.Wait()
		close(lines)
	}()
	got := map[string]int{}
	for line := range lines {
		got[line]++
	}
	if len(got) != 2 || got["a"] != 10_000 || got["b"] != 10_000 {
		t.Errorf("read %v, want 10,000 of each", got)
	}
}

// What a test's own file said last is named, too, however long the logs are that follow it.
func TestLastWordsOfATest(t *testing.T) {
	lines := []string{"=== RUN   TestX\n", "    x_test.go:1: began\n"}
	for range 20 {
		lines = append(lines, "    rig.go:3: a line of a log\n")
	}
	lines = append(lines, "    x_test.go:2: want 1, got 2\n", "    process.go:9: log of the server:\n", "        level=INFO\n",
		"--- FAIL: TestX (1.00s)\n")
	if got, want := complaint(lines), "\n        x_test.go:2: want 1, got 2"; !strings.HasSuffix(got, want) {
		t.Errorf("it prints%s", got)
	}
}

// A process that did not end is named, though a file of helpers says so.
func TestProcessThatDoesNotEnd(t *testing.T) {
	const why = "process.go:41: ip netns exec a fairlead server did not end within 2m0s"
	lines := []string{"    x_test.go:1: a\n", "    x_test.go:2: b\n", "    x_test.go:3: c\n", "    x_test.go:4: d\n", "    " + why + "\n"}
	if got := complaint(lines); !strings.HasSuffix(got, why) {
		t.Errorf("it prints%s", got)
	}
}

// A test that runs when its package ends, as at the time-out, is named with its output.
func TestUnfinishedTestsAreNamed(t *testing.T) {
	var out bytes.Buffer
	r := &report{out: &out, output: map[string][]string{}}
	r.add(event{Action: "output", Package: "p", Test: "TestX", Output: "panic: test timed out after 14m0s\n"})
	r.add(event{Action: "output", Package: "p2", Test: "TestOther", Output: "x\n"})
	r.add(event{Action: "fail", Package: "p"})
	if code := r.close(time.Second); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	want := "failed: p TestX\n        panic: test timed out after 14m0s\n"
	if got := out.String(); !strings.Contains(got, want) || strings.Contains(got, "TestOther") {
		t.Errorf("it prints\n%s", got)
	}
}
