package fileio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// LayoutFile holds the version of a data directory's layout: a number, and a newline.
const LayoutFile = "version"

// CheckLayout returns an error unless this program can use the data directory dir: known is the newest version of
// its layout that it can read and the one that it writes. A directory without a version gets known: it is empty, or of a
// fairlead that wrote none. Where there is an error nothing was changed.
func CheckLayout(dir string, known int) error {
	file := filepath.Join(dir, LayoutFile)
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return Replace(file, []byte(strconv.Itoa(known)+"\n"), 0o600)
	}
	if err != nil {
		return err
	}
	v, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return fmt.Errorf("%s is damaged: it should hold a number; is %s really a data directory of fairlead?", file, dir)
	}
	if v > known {
		return fmt.Errorf("the data directory %s was written by a newer fairlead (layout %d, this one knows up to %d): "+
			"use that fairlead, or choose another directory with --data-dir", dir, v, known)
	}
	return nil
}
