package fileio

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// MaxExecutable bounds programs that are copied for Pods, in bytes.
const MaxExecutable = 256 << 20

// HashExecutable returns the SHA-256, in hex, of an executable regular file of at most limit bytes.
func HashExecutable(path string, limit int64) (string, error) {
	f, err := openRegular(path, executable)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return hashTo(io.Discard, f, limit)
}

// ErrOtherContent is the error of CopyExecutable if the file is not the expected one: it is missing, no regular file, not
// executable, too large, or has other content. The message is the same for all, so that a caller learns no more about the file.
var ErrOtherContent = errors.New("there is no executable file with this content")

// CopyExecutable makes to, in a directory that exists, an executable copy of the file at path, if that is an executable
// regular file of at most limit bytes whose SHA-256 is sum, in hex. A file at to is replaced. The copy is the content that
// was verified, whatever happens to the original.
func CopyExecutable(path, to, sum string, limit int64) (err error) {
	from, err := openRegular(path, executable)
	if err != nil {
		return ErrOtherContent
	}
	defer from.Close()
	out, err := os.CreateTemp(filepath.Dir(to), filepath.Base(to)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(out.Name())
		}
	}()
	written := &failing{w: out}
	got, err := hashTo(written, from, limit)
	switch {
	case written.err != nil:
		err = written.err
	case err != nil || got != sum:
		err = ErrOtherContent
	}
	err = errors.Join(err, out.Chmod(0o555), out.Close())
	if err == nil {
		err = os.Rename(out.Name(), to)
	}
	return err
}

// failing keeps the error of its writer apart from a reader's errors.
type failing struct {
	w   io.Writer
	err error
}

func (f *failing) Write(b []byte) (int, error) {
	n, err := f.w.Write(b)
	f.err = err
	return n, err
}

func executable(info fs.FileInfo) error {
	if info.Mode()&0o111 == 0 {
		return errors.New("it is not executable")
	}
	return nil
}

// hashTo copies at most limit bytes and returns their SHA-256, in hex.
func hashTo(w io.Writer, r io.Reader, limit int64) (string, error) {
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(w, h), io.LimitReader(r, limit+1))
	if err == nil && n > limit {
		err = fmt.Errorf("it is larger than %d MiB", limit>>20)
	}
	return hex.EncodeToString(h.Sum(nil)), err
}
