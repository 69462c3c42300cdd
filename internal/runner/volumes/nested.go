package volumes

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// mounted is a volume, or sub of it, at a path of a container.
type mounted struct {
	target, volume, sub string
	own                 bool // the Pod's own volume, not a directory of the machine
}

// makeNested makes the places in the Pod's own volumes at which other volumes are mounted: a volume of files, and one that
// is mounted read-only, gets none in the container. kubelet does so for volumes of files. What it cannot make, behind a
// link of the Pod for example, is left to whoever mounts there.
func makeNested(all []mounted) {
	for _, inner := range all {
		outer := inner.outer(all)
		if outer == nil || !outer.own {
			continue
		}
		if at, err := filepath.Rel(outer.target, inner.target); err == nil {
			_ = inner.makeIn(outer.volume, filepath.Join(outer.sub, at))
		}
	}
}

// outer returns the volume in which m is mounted, nil for none.
func (m mounted) outer(all []mounted) (out *mounted) {
	for i := range all {
		o := &all[i]
		if strings.HasPrefix(m.target, strings.TrimSuffix(o.target, "/")+"/") && m.target != o.target &&
			(out == nil || len(o.target) > len(out.target)) {
			out = o
		}
	}
	return out
}

// makeIn makes the place for m at a path of a volume: a directory, or a file for a file.
func (m mounted) makeIn(volume, at string) error {
	file := false
	if root, err := os.OpenRoot(m.volume); err == nil { // a hostPath may be a file itself
		st, err := root.Stat(filepath.Join(".", m.sub))
		file = err == nil && !st.IsDir()
		_ = root.Close()
	} else if st, err := os.Stat(m.volume); err == nil {
		file = !st.IsDir()
	}
	if !file {
		return makeSubPath(volume, at)
	}
	if err := makeSubPath(volume, filepath.Dir(at)); err != nil {
		return err
	}
	root, err := os.OpenRoot(volume)
	if err != nil {
		return err
	}
	defer root.Close()
	f, err := root.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}
