package resolvconf

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

const before = "# of this machine\nsearch example.com\n" +
	"nameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver 192.0.2.3\noptions rotate edns0\n"

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "resolv.conf")
	put(t, path, text)
	return path
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func writer(path string) *Writer {
	return NewWriter(path, netip.MustParseAddr("10.96.0.10"), slog.New(slog.DiscardHandler))
}

func mustWrite(t *testing.T, path string) {
	t.Helper()
	if err := writer(path).write(); err != nil {
		t.Fatal(err)
	}
}

func TestRender(t *testing.T) {
	got := string(render("/x", []byte(before), netip.MustParseAddr("10.96.0.10")))
	want := mark + "/x\nnameserver 10.96.0.10\nsearch example.com\nnameserver 192.0.2.1\nnameserver 192.0.2.2\noptions edns0\n"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// The original survives whatever ends a process, and any number of starts.
func TestTheOriginalIsNeverLost(t *testing.T) {
	path := file(t, before)
	if Original(path) != path {
		t.Errorf("the original of an original is %s", Original(path))
	}
	for range 3 { // killed and started again
		mustWrite(t, path)
		if got := get(t, Original(path)); got != before || Original(path) == path {
			t.Fatalf("the original, at %s, is\n%s", Original(path), got)
		}
	}
	if err := Restore(path); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || get(t, path) != before || info.Mode().Perm() != 0o600 {
		t.Errorf("restored: %v, %v\n%s", err, info, get(t, path))
	}
	if _, err := os.Stat(path + suffix); err == nil {
		t.Error("the copy is left")
	}
	if err := Restore(path); err != nil || get(t, path) != before {
		t.Errorf("restored twice: %v", err)
	}

	// Killed after the copy, before the file: the file counts, also a later one.
	put(t, path+suffix, before)
	put(t, path, "nameserver 198.51.100.1\n")
	mustWrite(t, path)
	if err := Restore(path); err != nil || get(t, path) != "nameserver 198.51.100.1\n" {
		t.Errorf("%v, restored\n%s", err, get(t, path))
	}
	// Killed, and written by another program since: that counts.
	mustWrite(t, path)
	put(t, path, "nameserver 198.51.100.2\n")
	if err := Restore(path); err != nil || get(t, path) != "nameserver 198.51.100.2\n" {
		t.Errorf("%v, restored\n%s", err, get(t, path))
	}
	// Removed by another program: the copy comes back.
	mustWrite(t, path)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := Restore(path); err != nil || get(t, path) != "nameserver 198.51.100.2\n" {
		t.Errorf("%v, restored\n%s", err, get(t, path))
	}
	// Without its copy the file is left alone.
	mustWrite(t, path)
	if err := os.Remove(path + suffix); err != nil {
		t.Fatal(err)
	}
	if err := Check(path); err == nil || !strings.Contains(err.Error(), "its original is gone") {
		t.Errorf("without a copy: %v", err)
	}
}

func TestFilesOfOthersAreRejected(t *testing.T) {
	for target, want := range map[string]string{
		"../run/systemd/resolve/stub-resolv.conf": "drop-in file",
		"/run/NetworkManager/resolv.conf":         "belongs to the program that made it",
	} {
		path := filepath.Join(t.TempDir(), "resolv.conf")
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
		if err := Check(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a link to %s: %v, want %q", target, err, want)
		}
		if now, err := os.Readlink(path); err != nil || now != target {
			t.Errorf("the link leads to %s, %v", now, err)
		}
	}
	if err := Check(filepath.Join(t.TempDir(), "none")); err == nil || !strings.Contains(err.Error(), "create it") {
		t.Errorf("no file: %v", err)
	}
}

// What a DHCP client writes meanwhile becomes the original.
func TestRunAdoptsChanges(t *testing.T) {
	path := file(t, before)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		w := writer(path)
		go func() { done <- w.Run(ctx) }()
		<-w.Tried()
		if got := get(t, path); !written([]byte(got)) {
			t.Errorf("not written:\n%s", got)
		}
		put(t, path, "nameserver 198.51.100.1\n")
		time.Sleep(2 * lookPeriod)
		synctest.Wait()
		if got := get(t, path); !written([]byte(got)) || !strings.Contains(got, "10.96.0.10\nnameserver 198.51.100.1") {
			t.Errorf("after a change:\n%s", got)
		}
		cancel()
		if err := <-done; err != nil || get(t, path) != "nameserver 198.51.100.1\n" {
			t.Errorf("%v, restored\n%s", err, get(t, path))
		}
	})
}

// What a container runtime has mounted cannot be replaced, which is found before a start.
func TestMountPoint(t *testing.T) {
	path := file(t, before)
	err := mount.Confine(nil, []mount.Bind{{Source: file(t, before), Target: path}}, func(*os.File) error {
		if err := Check(path); err == nil || !strings.Contains(err.Error(), "mount point") || !strings.Contains(err.Error(), "--dns") {
			t.Errorf("a mounted file: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(path); err != nil {
		t.Errorf("without the mount: %v", err)
	}
}

// A failure leaves no copy behind, which a later start would take for the original.
func TestNoCopyOfWhatWasNotReplaced(t *testing.T) {
	path := file(t, before)
	// A directory in place of the file, from the moment after it was read.
	w := writer(path)
	text, mode, err := read(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := w.replace(text, mode); err == nil {
		t.Error("a directory was replaced")
	}
	if _, err := os.Lstat(path + suffix); err == nil {
		t.Error("the copy is left")
	}
}

// A resolver that cannot be configured ends nothing: it is retried.
func TestRunRetries(t *testing.T) {
	path := file(t, before)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var log strings.Builder
		w := NewWriter(path, netip.MustParseAddr("10.96.0.10"), slog.New(slog.NewTextHandler(&log, nil)))
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		<-w.Tried()
		time.Sleep(3 * lookPeriod)
		put(t, path, before)
		time.Sleep(2 * lookPeriod)
		synctest.Wait()
		if got := get(t, path); !written([]byte(got)) {
			t.Errorf("not written:\n%s", got)
		}
		cancel()
		if err := <-done; err != nil || get(t, path) != before {
			t.Errorf("%v, restored\n%s", err, get(t, path))
		}
		if n := strings.Count(log.String(), "level=WARN"); n != 1 || strings.Contains(log.String(), "another program") {
			t.Errorf("%d warnings, want 1, of no other program:\n%s", n, log.String())
		}
	})
}

// A program that truncates the file and writes it a moment later loses nothing, and leaves the machine no moment without
// resolvers for good: not at the first look, nor at a later one, nor at the end.
func TestFileIsReadInMidWriting(t *testing.T) {
	const after = "nameserver 198.51.100.1\n"
	path := file(t, before)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := writer(path)
		open := func() *os.File {
			f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
		write := func(f *os.File, text string) {
			t.Helper()
			if _, err := f.WriteString(text); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		f := open()
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		synctest.Wait() // it has read the empty file
		write(f, before)
		<-w.Tried()
		if got := get(t, Original(path)); got != before || Original(path) == path {
			t.Fatalf("the original, at %s, is\n%s", Original(path), got)
		}
		// It begins in the moment before the file is replaced, and writes after.
		_ = f.Close()
		for _, text := range []string{after, before} {
			put(t, path, "search example.org\n"+text)
			f = open()
			write(f, text)
			for Original(path) == path {
				time.Sleep(settlePeriod / 10)
				synctest.Wait()
			}
			if err := f.Truncate(0); err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt([]byte("options ndots:2\n"+text), 0); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * settlePeriod)
			synctest.Wait()
			if got := get(t, path+suffix); got != "options ndots:2\n"+text {
				t.Errorf("the original is\n%s", got)
			}
			_ = f.Close()
		}
		// Empty for long: the earlier resolvers come back.
		original := get(t, path+suffix)
		put(t, path, "")
		time.Sleep(lookPeriod + settlePeriod)
		synctest.Wait()
		if got := get(t, path); got != "" {
			t.Errorf("an empty file was replaced soon, by\n%s", got)
		}
		time.Sleep(4 * lookPeriod)
		synctest.Wait()
		if got := get(t, path); !written([]byte(got)) || get(t, path+suffix) != original {
			t.Errorf("a file that stays empty is\n%s", got)
		}
		put(t, path, "")
		cancel()
		if err := <-done; err != nil || get(t, path) != original {
			t.Errorf("%v, restored over an empty file\n%s", err, get(t, path))
		}
		if _, err := os.Stat(path + suffix); err == nil {
			t.Error("the copy is left")
		}
	})
}

// At the first start, too, a program that is slow to write the file it has truncated loses nothing.
func TestFileIsEmptyAtTheFirstStart(t *testing.T) {
	path := file(t, "")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := writer(path)
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		time.Sleep(emptyPeriod - time.Second)
		synctest.Wait()
		f, err := os.OpenFile(path, os.O_WRONLY, 0) // not another one in its place
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(before); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		<-w.Tried()
		if got := get(t, Original(path)); got != before || Original(path) == path {
			t.Errorf("the original, at %s, is\n%s", Original(path), got)
		}
		cancel()
		if err := <-done; err != nil || get(t, path) != before {
			t.Errorf("%v, restored\n%s", err, get(t, path))
		}
	})
}
