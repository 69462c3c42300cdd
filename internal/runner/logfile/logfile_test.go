package logfile

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// written makes a log of text, one second per record from 12:00:00 on.
func written(t testing.TB, limit Limit, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "log")
	writeTo(t, path, limit, text)
	return path
}

func writeTo(t testing.TB, path string, limit Limit, text string) {
	t.Helper()
	w, err := NewWriter(path, limit)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	w.now = func() time.Time { at = at.Add(time.Second); return at }
	w.Copy(Stdout, strings.NewReader(text), nil)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, path string, q Query) string {
	t.Helper()
	var out bytes.Buffer
	if err := Read(context.Background(), path, q, &out, nil); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestFormat(t *testing.T) {
	path := written(t, Limit{}, "one\n\n"+strings.Repeat("x", maxPiece+3)+"\nend")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := "2026-01-02T12:00:01.000000000Z stdout F one\n" +
		"2026-01-02T12:00:02.000000000Z stdout F \n" +
		"2026-01-02T12:00:03.000000000Z stdout P " + strings.Repeat("x", maxPiece) + "\n" +
		"2026-01-02T12:00:04.000000000Z stdout F xxx\n" +
		"2026-01-02T12:00:05.000000000Z stdout P end\n"
	if d := cmp.Diff(want, string(b)); d != "" {
		t.Error(d)
	}
}

func TestRead(t *testing.T) {
	path := written(t, Limit{}, "a\nbb\nccc\ndddd\n")
	n := func(i int64) *int64 { return &i }
	for _, c := range []struct {
		name string
		q    Query
		want string
	}{
		{"all", Query{}, "a\nbb\nccc\ndddd\n"},
		{"tail", Query{Tail: n(2)}, "ccc\ndddd\n"},
		{"tail of more than there is", Query{Tail: n(9)}, "a\nbb\nccc\ndddd\n"},
		{"no tail", Query{Tail: n(0)}, ""},
		{"since", Query{Since: time.Date(2026, 1, 2, 12, 0, 3, 0, time.UTC)}, "ccc\ndddd\n"},
		{"limit", Query{LimitBytes: 4}, "a\nbb"},
		{"timestamps", Query{Tail: n(1), Timestamps: true}, "2026-01-02T12:00:04.000000000Z dddd\n"},
		{"stream", Query{Stream: Stderr}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if d := cmp.Diff(c.want, read(t, path, c.q)); d != "" {
				t.Error(d)
			}
		})
	}
	if got := read(t, path+"-missing", Query{}); got != "" {
		t.Errorf("a missing log gave %q", got)
	}
}

// What goes in comes out, whatever the chunks and as long as nothing was
// dropped; the disk holds no more than the limit.
func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		path := filepath.Join(dir, fmt.Sprint(rapid.IntRange(0, 1<<40).Draw(rt, "name")))
		text := strings.Join(rapid.SliceOfN(rapid.StringMatching(`[a-z ]{0,60}\n?`), 0, 40).Draw(rt, "text"), "")
		writeTo(t, path, Limit{Bytes: 400, Files: 100}, text)
		defer Remove(path)
		if d := cmp.Diff(text, read(t, path, Query{})); d != "" {
			rt.Fatal(d)
		}
		n := int64(rapid.IntRange(0, 50).Draw(rt, "tail"))
		lines := strings.SplitAfter(text, "\n")
		if lines[len(lines)-1] == "" {
			lines = lines[:len(lines)-1]
		}
		want := strings.Join(lines[max(0, len(lines)-int(n)):], "")
		if d := cmp.Diff(want, read(t, path, Query{Tail: &n})); d != "" {
			rt.Fatal(d)
		}
	})
}

func TestRotationIsBounded(t *testing.T) {
	path := written(t, Limit{Bytes: 1000, Files: 3}, strings.Repeat("0123456789\n", 1000))
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) != 3 {
		t.Fatalf("%v, %v; want 3 files", files, err)
	}
	for _, f := range files {
		if st, err := os.Stat(f); err != nil || st.Size() > 1000 {
			t.Errorf("%s: %d bytes, %v", f, st.Size(), err)
		}
	}
}

func TestFollowAcrossRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, err := NewWriter(path, Limit{Bytes: 300, Files: 50})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	r, out := io.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = Read(t.Context(), path, Query{Follow: true, Done: done}, out, nil)
		out.Close()
	})
	in, feed := io.Pipe()
	wg.Go(func() { w.Copy(Stdout, in, nil) })
	buf := make([]byte, 64)
	for i := range 40 {
		want := fmt.Sprintf("line %d\n", i)
		fmt.Fprint(feed, want)
		if n, err := io.ReadFull(r, buf[:len(want)]); err != nil || string(buf[:n]) != want {
			t.Fatalf("read %q, %v; want %q", buf[:n], err, want)
		}
	}
	feed.Close()
	close(done)
	if rest, err := io.ReadAll(r); err != nil || len(rest) != 0 {
		t.Errorf("then %q, %v", rest, err)
	}
	wg.Wait()
}

// FuzzRead: a log file may hold anything after a crash; reading it must not fail.
func FuzzRead(f *testing.F) {
	f.Add([]byte("2026-01-02T12:00:01.000000000Z stdout F one\nhalf"), int64(1))
	f.Add([]byte("\n\n  \n x y z\n"), int64(3))
	f.Fuzz(func(t *testing.T, b []byte, tail int64) {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		read(t, path, Query{Tail: &tail, Timestamps: true})
		read(t, path, Query{Since: time.Now()})
	})
}
