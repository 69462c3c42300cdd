// Package logfile keeps the output of containers in files of the format that
// CRI runtimes use:
//
//	2026-01-02T15:04:05.000000000Z stdout F a whole line
//	2026-01-02T15:04:05.000000000Z stderr P a piece of a line that goes on
//
// A file that grows past its limit is renamed to path.1, path.1 to path.2 and so
// on; the oldest is dropped.
package logfile

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// The two streams of a container.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// timeFormat has a fixed width, so that lines can be compared as text.
const timeFormat = "2006-01-02T15:04:05.000000000Z07:00"

// maxPiece is the longest piece of a line in one record, that of containerd.
const maxPiece = 16 << 10

// Limit bounds what one container may keep: Files files of about Bytes bytes.
type Limit struct {
	Bytes int64 `json:"bytes"`
	Files int   `json:"files"`
}

// The default Limit is kubelet's.
const (
	defaultBytes = 10 << 20
	defaultFiles = 5
)

// Writer appends records to a log. Its methods may be called concurrently.
type Writer struct {
	path  string
	limit Limit
	now   func() time.Time

	mu   sync.Mutex
	file *os.File
	size int64
	buf  []byte
}

// NewWriter opens or makes the log at path, mode 0600. A zero limit means 5
// files of 10 MiB.
func NewWriter(path string, limit Limit) (*Writer, error) {
	if limit.Bytes <= 0 {
		limit.Bytes = defaultBytes
	}
	if limit.Files <= 0 {
		limit.Files = defaultFiles
	}
	w := &Writer{path: path, limit: limit, now: time.Now}
	return w, w.open()
}

func (w *Writer) open() error {
	f, err := os.OpenFile(w.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open log: %w", err)
	}
	w.file, w.size = f, st.Size()
	return nil
}

// Close closes the file.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		return nil
	}
	err := w.file.Close()
	w.file = nil
	return err
}

// Copy records everything read from r until its end, line by line, and gives
// each raw chunk to tee, which must not keep it. What cannot be written (disk
// full) is dropped; the container goes on.
func (w *Writer) Copy(stream string, r io.Reader, tee func([]byte)) {
	buf := make([]byte, maxPiece)
	var line []byte
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if tee != nil {
				tee(buf[:n])
			}
			line = w.lines(stream, append(line, buf[:n]...))
		}
		if err != nil {
			if len(line) > 0 {
				w.record(stream, line, false)
			}
			return
		}
	}
}

// lines records the whole lines of b, and pieces of one that is too long, and
// returns the rest, at the front of b.
func (w *Writer) lines(stream string, b []byte) []byte {
	rest := b
	for {
		i := bytes.IndexByte(rest, '\n')
		switch {
		case i >= 0 && i <= maxPiece:
			w.record(stream, rest[:i], true)
			rest = rest[i+1:]
		case len(rest) > maxPiece:
			w.record(stream, rest[:maxPiece], false)
			rest = rest[maxPiece:]
		default:
			return b[:copy(b, rest)]
		}
	}
}

func (w *Writer) record(stream string, text []byte, full bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		return
	}
	w.buf = w.now().UTC().AppendFormat(w.buf[:0], timeFormat)
	w.buf = append(append(append(w.buf, ' '), stream...), ' ')
	tag := byte('P')
	if full {
		tag = 'F'
	}
	w.buf = append(append(append(w.buf, tag, ' '), text...), '\n')
	if w.size > 0 && w.size+int64(len(w.buf)) > w.limit.Bytes {
		w.rotate()
	}
	n, _ := w.file.Write(w.buf)
	w.size += int64(n)
}

// rotate renames each file to the next number. If that fails the current file
// grows.
func (w *Writer) rotate() {
	if w.limit.Files > 1 {
		for i := w.limit.Files - 2; i >= 1; i-- {
			_ = os.Rename(numbered(w.path, i), numbered(w.path, i+1))
		}
		if os.Rename(w.path, numbered(w.path, 1)) != nil {
			return
		}
	} else if os.Remove(w.path) != nil {
		return
	}
	old := w.file
	if w.open() == nil {
		_ = old.Close()
	}
}

func numbered(path string, i int) string { return fmt.Sprintf("%s.%d", path, i) }

// Remove deletes the log at path and its rotated files.
func Remove(path string) {
	_ = os.Remove(path)
	for i := 1; i < 1000; i++ {
		if os.Remove(numbered(path, i)) != nil {
			return
		}
	}
}
