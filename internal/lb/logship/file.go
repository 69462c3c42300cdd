package logship

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Owner is whose a file is: a Service, and no other one that is made later with its name.
type Owner struct {
	Service svc.Name
	// Mark is of the Service's UID.
	Mark string
}

// OwnerOf returns the Owner for a Service and its UID.
func OwnerOf(n svc.Name, uid string) Owner {
	sum := sha256.Sum256([]byte(uid))
	return Owner{n, hex.EncodeToString(sum[:6])}
}

// File is what the name of a file of access logs tells.
type File struct {
	Owner
	Node string
	// Application is true for the format of an Application Load Balancer.
	Application bool
	// JSON is true for lines of JSON.
	JSON bool
	// End is when the file is complete.
	End time.Time
	// Part counts files of the same interval.
	Part int
}

const (
	endFormat = "20060102T1504Z"
	extension = ".log"
	// stored is what the extension of a file that was uploaded and is kept begins with.
	stored = ".uploaded"
	// application begins the name of the Service then, as in the bucket; no Service's name has a dot.
	application = "app."
	lines       = "json." // the same for lines of JSON
)

// Name returns the file's path in a directory of access logs:
// NAMESPACE/SERVICE/YYYY/MM/DD/NODE_NAMESPACE_SERVICE_MARK_END.log, of the day on which its interval of length every begins.
func (f File) Name(every time.Duration) string {
	service := f.Service.Name
	if f.Application {
		service = application + service
	}
	if f.JSON {
		service = lines + service
	}
	end := f.End.UTC().Format(endFormat) + strings.Repeat("+", f.Part)
	name := strings.Join([]string{f.Node, f.Service.Namespace, service, f.Mark, end}, "_")
	return filepath.Join(f.Service.Namespace, f.Service.Name, f.End.Add(-every).UTC().Format("2006/01/02"), name+extension)
}

// parse reads the last component of a Name.
func parse(name string) (f File, ok bool) {
	name, is := strings.CutSuffix(name, extension)
	parts := strings.Split(name, "_")
	if !is || len(parts) != 5 || strings.HasSuffix(name, stored) {
		return File{}, false
	}
	end := strings.TrimRight(parts[4], "+")
	f = File{Node: parts[0], Owner: Owner{svc.Name{Namespace: parts[1]}, parts[3]}, Part: len(parts[4]) - len(end)}
	f.Service.Name, f.Application = strings.CutPrefix(parts[2], application)
	if !f.Application {
		f.Service.Name, f.JSON = strings.CutPrefix(parts[2], lines)
	}
	var err error
	f.End, err = time.Parse(endFormat, end)
	return f, err == nil
}

// Unsent reports whether a file of a directory of access logs was not uploaded.
func Unsent(path string) bool { return !strings.HasSuffix(path, stored+extension) }

// spooled is a file that is complete.
type spooled struct {
	File
	path string
}

// complete returns the files of an owner that this node has completed by a time, the oldest first.
func complete(dir, node string, of Owner, now time.Time) ([]spooled, error) {
	var out []spooled
	top := filepath.Join(dir, of.Service.Namespace, of.Service.Name)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // never written, or removed just now
			return nil
		case err != nil:
			return err
		}
		if f, ok := parse(d.Name()); ok && d.Type().IsRegular() && f.Node == node && f.Owner == of && !f.End.After(now) {
			out = append(out, spooled{f, path})
		}
		return nil
	})
	slices.SortFunc(out, func(a, b spooled) int { return a.End.Compare(b.End) })
	return out, err
}

// done removes a file that was stored, and directories that are empty then, or marks it as stored.
func (f spooled) done(dir string, keep bool) error {
	if keep {
		return os.Rename(f.path, strings.TrimSuffix(f.path, extension)+stored+extension)
	}
	if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) { // it was the oldest, and there were too many
		return err
	}
	for d := filepath.Dir(f.path); d != dir && os.Remove(d) == nil; { // while it is empty
		d = filepath.Dir(d)
	}
	return nil
}
