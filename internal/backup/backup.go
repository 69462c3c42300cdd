// Package backup knows the file that a server is backed up to: a tar archive of etcd's snapshot,
// the cluster's keys and what else the data directory needs, with a manifest that has the
// hash of each part. The manifest is there twice and has the place of each part, so that damage
// of one part, of tar's own headers too, costs none of the others.
package backup

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"time"
)

// Format is the version of the file's format. It grows when an older fairlead could not read it.
const Format = 1

// Store is the part with etcd's snapshot.
const Store = "etcd.db"

// Manifest is the table of contents of a backup.
type Manifest struct {
	Format int `json:"format"`
	// Version is that of the fairlead that has made it, Layout that of the data directory.
	Version string    `json:"version"`
	Layout  int       `json:"layout"`
	Created time.Time `json:"created"`
	// Revision and Keys are etcd's.
	Revision int64 `json:"revision"`
	Keys     int   `json:"keys"`
	// Parts are in the order of the file.
	Parts []Part `json:"parts"`
}

// Part is one file of the data directory, or Store.
type Part struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

const (
	manifestName = "manifest" // JSON, and a line with its hash
	// maxManifest bounds the part of a manifest that is read.
	maxManifest = 1 << 20
	block       = 512 // of tar
	hashLine    = 2*sha256.Size + 1
	maxPart     = 1 << 40
)

// partName are the names that parts may have: a restore writes files of these names.
var partName = regexp.MustCompile(`^(etcd\.db|version|node-token|pki/[a-zA-Z0-9][a-zA-Z0-9._-]*)$`)

// IsPart reports whether a part may have the name.
func IsPart(name string) bool { return partName.MatchString(name) }

// PartOf returns the part of that name with the hash and the size of its content.
func PartOf(name string, content io.Reader) (Part, error) {
	if !IsPart(name) {
		return Part{}, fmt.Errorf("%q is no name of a part of a backup", name)
	}
	h := sha256.New()
	n, err := io.Copy(h, content)
	return Part{Name: name, Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, err
}

// Write writes a backup. open returns the content of a part, as it was for PartOf.
func Write(w io.Writer, m *Manifest, open func(name string) (io.ReadCloser, error)) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	text = append(text, '\n')
	text = fmt.Appendf(text, "%x\n", sha256.Sum256(text))
	t := tar.NewWriter(w)
	if err := add(t, m, manifestName, int64(len(text)), bytes.NewReader(text)); err != nil {
		return err
	}
	for _, p := range m.Parts {
		content, err := open(p.Name)
		if err != nil {
			return err
		}
		err = errors.Join(add(t, m, p.Name, p.Size, content), content.Close())
		if err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	if err := add(t, m, manifestName, int64(len(text)), bytes.NewReader(text)); err != nil {
		return err
	}
	return t.Close()
}

func add(t *tar.Writer, m *Manifest, name string, size int64, content io.Reader) error {
	h := &tar.Header{Format: tar.FormatUSTAR, Name: name, Mode: 0o600, Size: size, ModTime: m.Created.Truncate(time.Second)}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err := io.Copy(t, content)
	return err
}

// Archive is a backup that is read.
type Archive struct {
	Manifest
	from   io.ReaderAt
	starts []int64
}

// Open reads the manifest of a backup of a size: the one at its beginning or, where that is
// damaged, the one at its end.
func Open(from io.ReaderAt, size int64) (*Archive, error) {
	text, err := manifestAt(from, 0, size)
	for at := (size/block - 1) * block; err != nil && at > 0 && size-at <= 2*maxManifest; at -= block {
		text, err = manifestAt(from, at, size)
	}
	if err != nil {
		return nil, errors.New("it is no backup of fairlead, or both of its manifests are damaged: its parts cannot be found")
	}
	a := &Archive{from: from}
	if err := json.Unmarshal(text[:len(text)-hashLine], &a.Manifest); err != nil {
		return nil, fmt.Errorf("its manifest cannot be read: %w", err)
	}
	if a.Format > Format {
		return nil, fmt.Errorf("a newer fairlead has made it (%s, format %d, this one knows up to %d): restore it with that one",
			a.Version, a.Format, Format)
	}
	at := block + padded(int64(len(text)))
	for _, p := range a.Parts {
		if !IsPart(p.Name) || p.Size < 0 || p.Size > maxPart {
			return nil, fmt.Errorf("its manifest has a part %q of %d bytes, which no backup has", p.Name, p.Size)
		}
		a.starts = append(a.starts, at+block)
		at += block + padded(p.Size)
	}
	return a, nil
}

func padded(n int64) int64 { return (n + block - 1) / block * block }

// manifestAt reads a manifest whose header is at an offset.
func manifestAt(from io.ReaderAt, at, size int64) ([]byte, error) {
	t := tar.NewReader(io.NewSectionReader(from, at, size-at))
	h, err := t.Next()
	if err != nil || path.Clean(h.Name) != manifestName || h.Size > maxManifest {
		return nil, errors.New("no manifest")
	}
	text, err := io.ReadAll(t)
	if err != nil {
		return nil, err
	}
	body := max(0, len(text)-hashLine)
	if sum := sha256.Sum256(text[:body]); string(text[body:]) != hex.EncodeToString(sum[:])+"\n" {
		return nil, errors.New("a damaged manifest")
	}
	return text, nil
}

// Content returns the i-th part, as it is in the file.
func (a *Archive) Content(i int) io.Reader {
	return io.NewSectionReader(a.from, a.starts[i], a.Parts[i].Size)
}

// Damaged returns the parts whose content is not what it was.
func (a *Archive) Damaged() (out []Part) {
	for i, p := range a.Parts {
		h := sha256.New()
		if n, err := io.Copy(h, a.Content(i)); err != nil || n != p.Size || hex.EncodeToString(h.Sum(nil)) != p.SHA256 {
			out = append(out, p)
		}
	}
	return out
}
