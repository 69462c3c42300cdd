package volumes

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// dataLink in a volume of files leads to the directory that has them now. What
// containers see are links through it, so that all files change in one step, as
// kubelet's do (k8s.io/kubernetes/pkg/volume/util/atomic_writer.go). Programs watch it.
const dataLink = "..data"

// writeFiles makes dir hold exactly files, owned by o, in one step for whoever reads them
// through ..data. The directory stays the same one: running containers have it mounted.
func writeFiles(dir string, files map[string]file, defaultMode *int32, o Owner) error {
	for name := range files {
		if !filepath.IsLocal(name) || strings.HasPrefix(name, "..") {
			return fmt.Errorf("path %q leads out of the volume", name)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	old, err := os.Readlink(filepath.Join(dir, dataLink))
	if err == nil && sameFiles(filepath.Join(dir, old), files, defaultMode, o) {
		return linkFiles(dir, files) // of a write that was interrupted
	}
	fresh, err := os.MkdirTemp(dir, time.Now().UTC().Format("..2006_01_02_15_04_05."))
	if err != nil {
		return err
	}
	if err := errors.Join(os.Chmod(fresh, 0o755), fillFiles(fresh, files, defaultMode, o)); err != nil {
		return errors.Join(err, os.RemoveAll(fresh))
	}
	next := filepath.Join(dir, "..data_tmp")
	_ = os.Remove(next)
	if err := errors.Join(os.Symlink(filepath.Base(fresh), next), os.Rename(next, filepath.Join(dir, dataLink))); err != nil {
		return errors.Join(err, os.RemoveAll(fresh))
	}
	err = linkFiles(dir, files)
	if old != "" && filepath.IsLocal(old) {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, old)))
	}
	return err
}

// Written reports whether dir is a volume of files that was written once.
func Written(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, dataLink))
	return err == nil
}

// modeOf returns the mode of a file of a volume.
func modeOf(f file, defaultMode *int32) fs.FileMode {
	mode := fs.FileMode(0o644)
	for _, m := range []*int32{defaultMode, f.mode} {
		if m != nil {
			mode = fs.FileMode(*m) & fs.ModePerm
		}
	}
	return mode
}

func fillFiles(dir string, files map[string]file, defaultMode *int32, o Owner) error {
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		mode := modeOf(files[name], defaultMode) | o.more
		err := errors.Join(os.WriteFile(path, files[name].data, mode), os.Chmod(path, mode))
		if err == nil && (o.uid >= 0 || o.gid >= 0) {
			err = os.Lchown(path, o.uid, o.gid)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sameFiles reports whether dir holds exactly files, owned by o.
func sameFiles(dir string, files map[string]file, defaultMode *int32, o Owner) bool {
	n, same := 0, 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		n++
		f, ok := files[name]
		st, err1 := d.Info()
		have, err2 := os.ReadFile(path)
		if !ok || err1 != nil || err2 != nil || st.Mode().Perm() != modeOf(f, defaultMode)|o.more || !bytes.Equal(have, f.data) {
			return fs.SkipAll
		}
		if uid, gid, _ := fileio.Owner(st); o.uid >= 0 && uid != o.uid || o.gid >= 0 && gid != o.gid {
			return fs.SkipAll
		}
		same++
		return nil
	})
	return err == nil && n == same && n == len(files)
}

// linkFiles makes the links by which containers see files, and removes other links. What else dir has are places at
// which other volumes are mounted.
func linkFiles(dir string, files map[string]file) error {
	want := map[string]bool{}
	for name := range files {
		first, _, _ := strings.Cut(name, "/")
		want[first] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		link := e.Type()&fs.ModeSymlink != 0
		switch {
		case strings.HasPrefix(e.Name(), ".."):
		case link && want[e.Name()]:
			delete(want, e.Name())
		case link, want[e.Name()]:
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	for name := range want {
		err = errors.Join(err, os.Symlink(filepath.Join(dataLink, name), filepath.Join(dir, name)))
	}
	return err
}
