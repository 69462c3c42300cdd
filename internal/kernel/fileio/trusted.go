package fileio

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// CheckTrusted returns why what info describes may be another user's doing: it belongs to
// neither root nor the caller, or its group or everybody may write to it.
func CheckTrusted(info fs.FileInfo) error {
	if uid, _, ok := Owner(info); !ok || uid != 0 && uid != os.Geteuid() {
		return fmt.Errorf("it belongs to user %d: it must belong to root", uid)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("its mode is %04o: group and others must not be able to write to it", info.Mode().Perm())
	}
	return nil
}

// TrustedFiles returns the names in the directory dir that end in one of the suffixes and
// are not hidden, in order; none if there is no dir. The directory is one that CheckTrusted
// accepts. Errors do not name it.
func TrustedFiles(dir string, suffixes ...string) ([]string, error) {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil && !info.IsDir() {
		err = errors.New("it is no directory")
	}
	if err == nil {
		err = CheckTrusted(info)
	}
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && slices.Contains(suffixes, filepath.Ext(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// ReadTrusted reads a regular file of at most limit bytes that CheckTrusted accepts. Its
// directory must be one that only the same users write to. Errors do not name the file.
func ReadTrusted(path string, limit int64) ([]byte, error) {
	return readRegular(path, limit, CheckTrusted)
}

// ReadRegular reads a regular file of at most limit bytes, which may be another user's. It
// does not open, and so does not wait for, other files than regular ones. Errors do not name the
// file.
func ReadRegular(path string, limit int64) ([]byte, error) {
	return readRegular(path, limit, func(fs.FileInfo) error { return nil })
}

func readRegular(path string, limit int64, check func(fs.FileInfo) error) ([]byte, error) {
	f, err := openRegular(path, check)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("it is larger than %d bytes", limit)
	}
	return data, err
}

// openRegular opens a regular file that check accepts.
func openRegular(path string, check func(fs.FileInfo) error) (*os.File, error) {
	// O_PATH opens nothing: a pipe would block, and a device could do anything.
	at, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	found := os.NewFile(uintptr(at), path)
	defer found.Close()
	info, err := found.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is no regular file")
	}
	if err == nil {
		err = check(info)
	}
	if err != nil {
		return nil, err
	}
	// O_NONBLOCK: another user's lease of the file would delay it (fcntl(2), F_SETLEASE).
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}
