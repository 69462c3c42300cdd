package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestSmall makes every measurement in little with the real programs, and so
// keeps the bench true. Peers that have been built take part.
func TestSmall(t *testing.T) {
	if testing.Short() {
		t.Skip("builds fairlead and runs for half a minute")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	dir := t.TempDir()
	fairlead := filepath.Join(os.Getenv("FAIRLEAD_BIN"), "fairlead")
	if os.Getenv("FAIRLEAD_BIN") == "" {
		fairlead = filepath.Join(dir, "fairlead")
		build(ctx, t, "..", fairlead, "./cmd/fairlead")
	}
	program := filepath.Join(dir, "bench")
	build(ctx, t, ".", program, ".")

	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, "--small", "--without-peers", "--fairlead", fairlead, "--peers", "bin")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s%s", err, stderr.String(), out)
	}
	t.Logf("%s", out)
	lines := strings.Split(string(out), "\n")
	for _, r := range runs() {
		name, found := r.name, false
		for _, line := range lines {
			cells := strings.Split(line, "|")
			if len(cells) < 4 || strings.TrimSpace(cells[1]) != name {
				continue
			}
			found = true
			if v := strings.TrimSpace(cells[3]); v == "" || strings.Contains(v, "NaN") || strings.HasPrefix(v, "-") {
				t.Errorf("%s has no value: %s", name, line)
			}
		}
		if missing := (&bench{peers: "bin"}).missing(r); !found && missing == "" {
			t.Errorf("no figure of %s in the table", name)
		}
	}
}

func build(ctx context.Context, t *testing.T, dir, to, what string) {
	t.Helper()
	cmd := exec.CommandContext(ctx, "go", "build", "-o", to, what)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", what, err, out)
	}
}

// make builds every peer that a measurement names, and without one the program
// ends, unless it is told to leave it out.
func TestPeers(t *testing.T) {
	for _, r := range runs() {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		out, err := exec.CommandContext(ctx, "make", "-s", "--no-print-directory", "needs", "RUN="+r.name).CombinedOutput()
		cancel()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		makes, folder := strings.Fields(string(out)), t.TempDir()
		for _, name := range r.programs() {
			if !slices.Contains(makes, "bin/"+name) {
				t.Errorf("make bench RUN=%s builds %q, not %s", r.name, makes, name)
			}
			err := (&bench{peers: folder}).unbuilt([]run{r})
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s without %s: %v", r.name, name, err)
			}
			if err := (&bench{peers: folder, peerless: true}).unbuilt([]run{r}); err != nil {
				t.Errorf("%s, without peers: %v", r.name, err)
			}
			if err := os.WriteFile(filepath.Join(folder, name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := (&bench{peers: folder}).unbuilt([]run{r}); err != nil {
			t.Errorf("%s with all peers: %v", r.name, err)
		}
	}
}

// TestReadme wants a paragraph of README.md for each measurement.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names() {
		if !strings.Contains(string(text), "\n**"+name+".** ") {
			t.Errorf("README.md does not say what %q is and what is expected of it", name)
		}
	}
}

func TestPercentile(t *testing.T) {
	values := []float64{5, 1, 4, 2, 3}
	for p, want := range map[float64]float64{0: 1, 0.2: 1, 0.21: 2, 0.5: 3, 0.99: 5, 1: 5} {
		if got := percentile(values, p); got != want {
			t.Errorf("percentile %v of 1 to 5 is %v, want %v", p, got, want)
		}
	}
}

func TestExpected(t *testing.T) {
	for _, c := range []struct {
		f    figure
		want string
	}{
		{unpaired("x", seconds, 2, expectation{below: 3}), "under 3.00 s: met"},
		{unpaired("x", seconds, 3, expectation{below: 3}), "under 3.00 s: **missed**"},
		{unpaired("x", seconds, 3, expectation{share: 0.5}), ""}, // the peer is not there
		{figure{unit: seconds, fairlead: 1, peer: 2, want: expectation{share: 0.5}}, "ratio at most 0.5: met"},
		{figure{unit: seconds, fairlead: 1.1, peer: 2, want: expectation{below: 2, share: 0.5}}, "under 2.00 s, ratio at most 0.5: **missed**"},
	} {
		if got := c.f.expected(); got != c.want {
			t.Errorf("fairlead %v, peer %v: %q, want %q", c.f.fairlead, c.f.peer, got, c.want)
		}
	}
}

func TestEndpointAddrsAreDistinct(t *testing.T) {
	seen := map[string]bool{}
	for i := range uint32(300_000) {
		a := endpointAddr(i)
		if !strings.HasPrefix(a.String(), "10.") || a.As4()[1] < 128 || seen[a.String()] {
			t.Fatalf("endpoint %d has %s", i, a)
		}
		seen[a.String()] = true
	}
}

func TestChoose(t *testing.T) {
	if got, err := choose("dns,load"); err != nil || len(got) != 2 || got[0].name != "dns" {
		t.Errorf("choose dns,load: %v, %v", got, err)
	}
	if _, err := choose("speed"); err == nil || !strings.Contains(err.Error(), "controllers") {
		t.Errorf("an unknown name is refused with the known ones, got %v", err)
	}
}

// A write that fails, and a caller that gives up, end the wait for the answer.
func TestAfterWrite(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		never := func(ctx context.Context) (time.Time, error) {
			<-ctx.Done()
			return time.Time{}, ctx.Err()
		}
		begin, failure := time.Now(), errors.New("refused")
		if _, err := afterWrite(t.Context(), func() error { return failure }, never); !errors.Is(err, failure) {
			t.Errorf("a write that fails: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		if _, err := afterWrite(ctx, func() error { cancel(); return nil }, never); !errors.Is(err, context.Canceled) {
			t.Errorf("a caller that gives up: %v", err)
		}
		if waited := time.Since(begin); waited != 0 {
			t.Errorf("waited %s", waited)
		}
		took, err := afterWrite(t.Context(), func() error { time.Sleep(time.Second); return nil }, func(context.Context) (time.Time, error) {
			time.Sleep(3 * time.Second)
			return time.Now(), nil
		})
		if took != 3000 || err != nil {
			t.Errorf("an answer after 3 s: %v ms, %v", took, err)
		}
	})
}
