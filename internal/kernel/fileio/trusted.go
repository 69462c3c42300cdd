package fileio

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// CheckTrusted returns why what info describes may be another user's doing: it belongs to
// neither root nor the caller, or its group or everybody may write to it.
func CheckTrusted(info os.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: its owner is not known", info.Name())
	}
	if st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("it belongs to the user %d; it must belong to root", st.Uid)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("its mode is %04o; nobody but its owner may write to it (chmod go-w)", info.Mode().Perm())
	}
	return nil
}

// ReadTrusted reads a regular file of at most limit bytes that CheckTrusted accepts. Its
// directory must be one that only the same users write to.
func ReadTrusted(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path) // before it is opened: a pipe would block
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: it is not a file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return nil, err
	}
	if err := CheckTrusted(info); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s: it has more than %d bytes", path, limit)
	}
	return data, err
}
