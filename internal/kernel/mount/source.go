package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// source is a Bind whose source has been opened before it could be hidden.
type source struct {
	Bind
	file *os.File
}

func openSources(binds []Bind) (out []source, closeAll func(), err error) {
	closeAll = func() {
		for _, s := range out {
			_ = s.file.Close()
		}
	}
	for _, b := range binds {
		f, err := b.open()
		if err != nil {
			closeAll()
			return nil, func() {}, fmt.Errorf("bind %s to %s: %w", b.Source, b.Target, err)
		}
		out = append(out, source{b, f})
	}
	return out, closeAll, nil
}

// open opens the source, without reading it.
func (b Bind) open() (*os.File, error) {
	if b.Within == "" {
		return os.OpenFile(b.Source, unix.O_PATH, 0)
	}
	below, err := filepath.Rel(b.Within, b.Source)
	if err != nil {
		return nil, err
	}
	dir, err := os.OpenFile(b.Within, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fd, err := openBeneath(int(dir.Fd()), below)
	switch {
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%s leads out of the volume: %w", below, err)
	case errors.Is(err, unix.ENOSYS):
		return nil, fmt.Errorf("open %s so that no link leads out of the volume: Linux 5.6 is needed: %w", below, err)
	case err != nil:
		return nil, &os.PathError{Op: "open", Path: b.Source, Err: err}
	}
	return os.NewFile(uintptr(fd), b.Source), nil
}

// maxRaces bounds the tries to open a path that changes in between.
const maxRaces = 1000

// openBeneath opens path below dir, which links in it may lead to (the files of a
// ConfigMap are links), and nothing else, also while others rename there:
// the kernel checks each step as it takes it (CVE-2021-25741 of Kubernetes).
func openBeneath(dir int, path string) (int, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(dir, path, &how)
	for n := 0; n < maxRaces && (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)); n++ {
		fd, err = unix.Openat2(dir, path, &how)
	}
	return fd, err
}
