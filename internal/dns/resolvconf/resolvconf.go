// Package resolvconf lets the programs of a machine ask the cluster's DNS, by its
// /etc/resolv.conf (resolv.conf(5)), and takes that back.
//
// The original stays beside the file until it is put back. The copy is on disk before
// the file is replaced, and both are replaced in one step, so that a crash at any moment
// leaves the original in one place or the other. A file without the mark of this package
// is taken for a new original: another program, such as a DHCP client, has
// written it. Programs that do not replace the file truncate it first, so only a text that two looks have found counts,
// and never one without resolvers in place of one with some.
package resolvconf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// Path is the file that programs read.
const Path = "/etc/resolv.conf"

// mark begins a file that this package has written.
const mark = "# Written by fairlead (--configure-resolver). The original, which comes back at its end, is "

// suffix makes the name of the original of that of the file.
const suffix = ".before-fairlead"

// lookPeriod is how often a Writer looks whether another program has replaced the file.
const lookPeriod = 5 * time.Second

// settlePeriod is how long a program may be in the middle of writing the file: a text counts that was the same before and
// after it. emptyPeriod is that of a text without resolvers.
const (
	settlePeriod = 200 * time.Millisecond
	emptyPeriod  = 2 * lookPeriod
	// maxText bounds how much of a replaced file is read, in bytes.
	maxText = 64 << 10
)

// maxServers is how many servers the C library asks (MAXNS in resolv.h).
const maxServers = 3

// Original returns where the original of path is: beside it while this package has
// replaced path, also in another process or one that was killed; else path itself.
func Original(path string) string {
	if text, err := os.ReadFile(path); err == nil && written(text) {
		return path + suffix
	}
	return path
}

func written(text []byte) bool { return bytes.HasPrefix(text, []byte(mark)) }

// Check rejects a file that a Writer cannot replace, or that another program owns, with
// what to do instead. It changes nothing.
func Check(path string) error {
	_, _, err := read(path)
	return err
}

// read returns the text of path and its mode.
func read(path string) ([]byte, fs.FileMode, error) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, 0, fmt.Errorf("there is no %s to add the cluster's DNS to: create it, with the resolvers of this machine", path)
	case err != nil:
		return nil, 0, err
	case info.Mode()&fs.ModeSymlink != 0:
		return nil, 0, symlinkError(path)
	}
	if disk, err := fileio.DiskOf(path); err == nil && disk.MountPoint == path {
		return nil, 0, fmt.Errorf("%s is a mount point, as in a container, and cannot be replaced: let the program that mounted it "+
			"put the address of the cluster's DNS first, such as 'docker run --dns' or a Pod's dnsConfig, or unmount it", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, 0, err
	}
	if written(text) {
		if _, err := os.Stat(path + suffix); err != nil {
			return nil, 0, fmt.Errorf("%s was written by fairlead, and its original is gone: write the resolvers of this machine to it: %w",
				path, err)
		}
	}
	return text, info.Mode().Perm(), nil
}

func symlinkError(path string) error {
	target, err := os.Readlink(path)
	if err != nil {
		return err
	}
	if strings.Contains(target, "systemd/resolve/") {
		return fmt.Errorf("%s belongs to systemd-resolved (it is a symbolic link to %s), which --configure-resolver does not change: "+
			"give it a drop-in file instead, see 'systemd-resolved' in docs/dns.md", path, target)
	}
	return fmt.Errorf("%s is a symbolic link to %s, and belongs to the program that made it: "+
		"let that program add the cluster's DNS, or replace the link by a file", path, target)
}

// Restore puts the original of path back. It does nothing where path was not written by
// this package, but removes a copy that is no longer needed.
func Restore(path string) error {
	original := path + suffix
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if written(text) {
		return os.Rename(original, path)
	}
	// Not by the error of a removal, which differs on a file system that is read-only.
	if _, err := os.Lstat(original); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if errors.Is(err, fs.ErrNotExist) || !hasServers(text) && staysEmpty(path) && fileHasServers(original) {
		// Another program has removed or emptied it: the copy is all there is.
		return os.Rename(original, path)
	}
	return os.Remove(original)
}

// staysEmpty reports whether path still has no resolvers once a program could have written them.
func staysEmpty(path string) bool {
	time.Sleep(settlePeriod)
	return !fileHasServers(path)
}

func fileHasServers(path string) bool {
	text, err := os.ReadFile(path)
	return err == nil && hasServers(text)
}

// hasServers reports whether the text of a file names a resolver.
func hasServers(text []byte) bool {
	for line := range bytes.Lines(text) {
		if f := bytes.Fields(line); len(f) > 1 && string(f[0]) == "nameserver" {
			return true
		}
	}
	return false
}

// Writer makes programs of this machine ask a server of the cluster's DNS first. Make
// it with NewWriter.
type Writer struct {
	path   string
	server netip.Addr
	log    *slog.Logger
	tried  chan struct{}

	// seen is the text that the last look has found in a file of another program, nil for none, since when it first did.
	seen  []byte
	since time.Time
	// last is the file of another program that was replaced just now: the program may still write to it. It had the text
	// seen. It is nil once that was looked at.
	last *os.File
}

// NewWriter returns a Writer that puts server first in the file at path. It has no
// effect before Run.
func NewWriter(path string, server netip.Addr, log *slog.Logger) *Writer {
	return &Writer{path: path, server: server, log: log.With("file", path), tried: make(chan struct{})}
}

// Tried is closed when Run has tried for the first time to replace the file.
func (w *Writer) Tried() <-chan struct{} { return w.tried }

// Run replaces the file, again whenever another program has written it, and puts the
// original back when ctx ends. What cannot be written is retried.
func (w *Writer) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer w.forget()
	working, failed := false, false
	for {
		select {
		case <-ctx.Done():
			if err := Restore(w.path); err != nil {
				return fmt.Errorf("cannot restore %s: %w", w.path, err)
			}
			return nil
		case <-timer.C:
		}
		if w.last != nil {
			w.follow()
		}
		next := lookPeriod
		if Original(w.path) == w.path || !working {
			wait, err := w.look()
			if wait > 0 {
				timer.Reset(wait)
				continue
			}
			switch {
			case err != nil && !failed:
				w.log.Warn("cannot configure this machine's resolver; retrying", "err", err, "period", lookPeriod)
			case err == nil && working:
				w.log.Info("another program has changed the resolvers of this machine; adopted")
			case err == nil:
				w.log.Info("programs of this machine ask the cluster's DNS", "server", w.server)
			}
			failed, working = err != nil, working || err == nil
			if w.last != nil {
				next = settlePeriod
			}
		}
		select {
		case <-w.tried:
		default:
			close(w.tried)
		}
		timer.Reset(next)
	}
}

// look replaces the file, unless another program may be in the middle of writing it: then it returns when to look again.
func (w *Writer) look() (wait time.Duration, err error) {
	file, err := os.Open(w.path) // before it is read: the one that is replaced, or an older one
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	text, mode, err := read(w.path)
	if err != nil || written(text) {
		w.seen = nil
		if err == nil {
			err = w.replace(text, mode)
		}
		if file != nil {
			_ = file.Close()
		}
		return 0, err
	}
	empty := !hasServers(text)
	needed := settlePeriod
	if empty {
		needed = emptyPeriod
	}
	if now := time.Now(); w.seen == nil || !bytes.Equal(text, w.seen) {
		w.seen, w.since = append([]byte{}, text...), now
	}
	if left := needed - time.Since(w.since); left > 0 {
		_ = file.Close()
		return min(left, lookPeriod), nil
	}
	if empty && fileHasServers(w.path+suffix) {
		_ = file.Close()
		w.seen = nil
		return 0, w.render()
	}
	if err := w.replace(text, mode); err != nil {
		_ = file.Close()
		return 0, err
	}
	w.last = file
	return 0, nil
}

// follow adopts what another program has written to the file while that was replaced.
func (w *Writer) follow() {
	text := make([]byte, maxText)
	n, err := w.last.ReadAt(text, 0)
	if text = text[:n]; (err == nil || errors.Is(err, io.EOF)) && !bytes.Equal(text, w.seen) && hasServers(text) {
		info, err := w.last.Stat()
		if err == nil {
			err = w.replace(text, info.Mode().Perm())
		}
		if err != nil {
			w.log.Error("cannot adopt what another program has written to the file", "err", err)
		}
	}
	w.forget()
}

// forget ends the look at the file that was replaced last.
func (w *Writer) forget() {
	if w.last != nil {
		_ = w.last.Close()
	}
	w.last, w.seen = nil, nil
}

// write replaces the file.
func (w *Writer) write() error {
	text, mode, err := read(w.path)
	if err != nil {
		return err
	}
	return w.replace(text, mode)
}

// replace replaces the file, which had text and mode, and leaves no new copy of it where
// that fails.
func (w *Writer) replace(text []byte, mode fs.FileMode) (err error) {
	original := w.path + suffix
	adopted := !written(text)
	if adopted {
		err = fileio.Replace(original, text, mode)
	} else {
		text, err = os.ReadFile(original)
	}
	if err != nil {
		return err
	}
	err = w.renderAs(text)
	if err != nil && adopted {
		err = errors.Join(err, os.Remove(original))
	}
	return err
}

// render replaces the file by what becomes of the original.
func (w *Writer) render() error {
	text, err := os.ReadFile(w.path + suffix)
	if err != nil {
		return err
	}
	return w.renderAs(text)
}

// renderAs replaces the file by what becomes of text.
func (w *Writer) renderAs(text []byte) error {
	// All programs read it, whatever the mode of the original.
	return fileio.Replace(w.path, render(w.path+suffix, text, w.server), 0o644)
}

// render returns the original with server in front of its name servers. Those stay for
// when server does not answer, as far as the C library asks so many, without the option
// rotate, which would ask them for the names of the cluster.
func render(original string, text []byte, server netip.Addr) []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "%s%s\nnameserver %s\n", mark, original, server)
	servers := 1
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") || strings.HasPrefix(f[0], ";") {
			continue
		}
		switch f[0] {
		case "nameserver":
			if servers++; servers > maxServers || len(f) > 1 && f[1] == server.String() {
				continue
			}
		case "options":
			f = slices.DeleteFunc(f, func(o string) bool { return o == "rotate" })
		}
		fmt.Fprintln(&out, strings.Join(f, " "))
	}
	return out.Bytes()
}
