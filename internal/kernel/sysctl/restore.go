package sysctl

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// recordDir has one file for each parameter that Set has changed since the machine
// started, in a directory for each network namespace. Like the parameters it does not
// outlive the machine's next start.
const recordDir = "/run/fairlead/sysctl"

// change is a parameter that is not what it was before the first Set.
type change struct {
	File   string `json:"file"`
	Before string `json:"before"`
	// Now is what Set has left; another value is another program's, and stays.
	Now string `json:"now"`
}

// before returns the files that can be read, with their values.
func before(files []string) (out []change) {
	for _, f := range files {
		if value, err := read(f); err == nil {
			out = append(out, change{File: f, Before: value})
		}
	}
	return out
}

// record keeps what has changed. It is best effort: /run may be read-only, or of another
// user, and then the parameters stay as they are.
func record(changes []change) {
	dir, err := namespaceDir()
	if err != nil || os.MkdirAll(dir, 0o700) != nil {
		return
	}
	for _, c := range changes {
		if c.Now == "" || c.Now == c.Before {
			continue
		}
		file := filepath.Join(dir, recordName(c.File))
		if earlier, err := readChange(file); err == nil {
			c.Before = earlier.Before
		}
		if text, err := json.Marshal(c); err == nil {
			_ = fileio.ReplaceUnsynced(file, text, 0o600)
		}
	}
}

// recordName is the name of a parameter's record.
func recordName(file string) string {
	return strings.ReplaceAll(strings.TrimPrefix(file, "/"), "/", ",")
}

func readChange(file string) (c change, err error) {
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	return c, err
}

// namespaceDir returns the directory of records of the calling thread's network
// namespace: by its cookie, which no later one gets, or before Linux 5.14 its inode.
func namespaceDir() (string, error) {
	var info unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &info); err != nil {
		return "", err
	}
	id := info.Ino
	if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		defer unix.Close(fd)
		if cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err == nil {
			id = cookie
		}
	}
	return filepath.Join(recordDir, strconv.FormatUint(id, 10)), nil
}

// Restore gives the parameters that Set has changed, in the calling thread's network
// namespace since the machine started, their earlier values. It skips parameters that another
// program has changed since, and missing ones.
func Restore() error {
	dir, err := namespaceDir()
	if err != nil {
		return fmt.Errorf("find the earlier values of kernel parameters: %w", err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	return restore(dir, files)
}

// RestoreOne is Restore for one parameter, named as for Set.
func RestoreOne(key string) error {
	dir, err := namespaceDir()
	if err != nil {
		return fmt.Errorf("find the earlier value of %s: %w", key, err)
	}
	return restore(dir, []string{filepath.Join(dir, recordName(root+key))})
}

// restore writes the earlier values of records in dir, which may not be there, and removes the records.
// After an error all of them stay.
func restore(dir string, records []string) error {
	var changes []change
	for _, file := range records {
		c, err := readChange(file)
		if err != nil {
			continue // none, or cut off while an earlier build wrote it: that parameter stays
		}
		if now, err := read(c.File); err == nil && now == c.Now {
			changes = append(changes, c)
		}
	}
	var errs []error
	// The kernel changes some with others (ip_forward also changes each device):
	// their own values are written after that.
	for range 2 {
		for _, c := range changes {
			if now, err := read(c.File); err == nil && now == c.Before {
				continue
			}
			if err := write(c.File, c.Before); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, file := range records {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	// The directories stay while they have other records.
	for _, d := range []string{dir, recordDir, filepath.Dir(recordDir)} {
		_ = os.Remove(d)
	}
	return nil
}
