// Package resolvconf lets the programs of a machine ask the cluster's DNS, by its
// /etc/resolv.conf (resolv.conf(5)), and takes that back.
//
// The original stays beside the file until it is put back. The copy is on disk before
// the file is replaced, and both are replaced in one step, so that a crash at any moment
// leaves the original in one place or the other. A file without the mark of this package
// is always taken for a new original: another program, such as a DHCP client, has
// written it.
package resolvconf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	if errors.Is(err, fs.ErrNotExist) {
		// Somebody has removed it: the copy is all there is.
		return os.Rename(original, path)
	}
	return os.Remove(original)
}

// Writer makes programs of this machine ask a server of the cluster's DNS first.
type Writer struct {
	Path   string
	Server netip.Addr
	Log    *slog.Logger
}

// Run replaces the file, again whenever another program has written it, and puts the
// original back when ctx ends.
func (w *Writer) Run(ctx context.Context) error {
	if err := w.write(); err != nil {
		return fmt.Errorf("cannot configure this machine's resolver: %w", err)
	}
	w.Log.Info("programs of this machine ask the cluster's DNS", "file", w.Path, "server", w.Server)
	tick := time.NewTicker(lookPeriod)
	defer tick.Stop()
	for failed := false; ; {
		select {
		case <-ctx.Done():
			if err := Restore(w.Path); err != nil {
				return fmt.Errorf("cannot restore %s: %w", w.Path, err)
			}
			return nil
		case <-tick.C:
		}
		if Original(w.Path) != w.Path {
			continue
		}
		err := w.write()
		if err == nil {
			w.Log.Info("another program has changed the resolvers of this machine; adopted", "file", w.Path)
		} else if !failed {
			w.Log.Warn("cannot configure this machine's resolver; retrying", "file", w.Path, "err", err, "period", lookPeriod)
		}
		failed = err != nil
	}
}

func (w *Writer) write() error {
	text, mode, err := read(w.Path)
	if err != nil {
		return err
	}
	original := w.Path + suffix
	if !written(text) {
		err = fileio.Replace(original, text, mode)
	} else {
		text, err = os.ReadFile(original)
	}
	if err != nil {
		return err
	}
	// All programs read it, whatever the mode of the original.
	return fileio.Replace(w.Path, render(original, text, w.Server), 0o644)
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
