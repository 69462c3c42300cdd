package main

import (
	"bytes"
	"strings"
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
