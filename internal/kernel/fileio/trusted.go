package fileio

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
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

// ReadTrusted reads a regular file of at most limit bytes that CheckTrusted accepts. Its
// directory must be one that only the same users write to. Errors do not name the file.
func ReadTrusted(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path) // before it is opened: a pipe would block
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is no regular file")
	}
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err = f.Stat(); err == nil {
		err = CheckTrusted(info)
	}
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("it is larger than %d bytes", limit)
	}
	return data, err
}
