package logfile

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Query selects a part of a log, as PodLogOptions do.
type Query struct {
	// Tail is the number of last records, all if nil.
	Tail *int64
	// Since leaves out what is older.
	Since time.Time
	// LimitBytes ends the answer after so many bytes, 0 for no limit.
	LimitBytes int64
	// Timestamps puts the time before each line.
	Timestamps bool
	// Stream is Stdout or Stderr, both if empty.
	Stream string
	// Follow waits for more until Done is closed or the context ends.
	Follow bool
	Done   <-chan struct{}
}

// pollInterval bounds the delay of a followed line.
const pollInterval = 50 * time.Millisecond

var errLimit = errors.New("limit reached")

// Read writes the part of the log at path that q asks for to out, and flushes
// with flush after each burst when following. A log that does not exist is
// empty.
func Read(ctx context.Context, path string, q Query, out io.Writer, flush func()) error {
	r := &reader{q: q, out: out, left: q.LimitBytes, lineStart: true}
	err := r.run(ctx, path, flush)
	if errors.Is(err, errLimit) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

type reader struct {
	q         Query
	out       io.Writer
	left      int64
	lineStart bool
	rest      []byte // a record whose end has not been read yet
}

func (r *reader) run(ctx context.Context, path string, flush func()) error {
	files, err := open(path)
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err != nil {
		return err
	}
	if r.q.Tail != nil {
		if files, err = seekTail(files, *r.q.Tail); err != nil {
			return err
		}
	}
	for i, f := range files {
		if err := r.drain(f); err != nil {
			return err
		}
		if i < len(files)-1 {
			r.rest = nil
		}
	}
	if !r.q.Follow {
		return nil
	}
	if flush != nil {
		flush()
	}
	var last *os.File
	if len(files) > 0 {
		last = files[len(files)-1]
		files = files[:len(files)-1]
	}
	return r.follow(ctx, path, last, flush)
}

// follow goes on reading last and the files that take its place. It owns last.
func (r *reader) follow(ctx context.Context, path string, last *os.File, flush func()) error {
	defer func() {
		if last != nil {
			_ = last.Close()
		}
	}()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for ended := false; ; {
		moved := false
		if last == nil || rotated(path, last) {
			next, err := os.Open(path)
			switch {
			case err == nil:
				// The old file got its last lines before it was renamed.
				if last != nil {
					if err := r.drain(last); err != nil {
						return err
					}
					_ = last.Close()
				}
				last, moved, r.rest = next, true, nil
			case !errors.Is(err, os.ErrNotExist):
				return fmt.Errorf("open log: %w", err)
			}
		}
		if last != nil {
			if err := r.drain(last); err != nil {
				return err
			}
		}
		if flush != nil {
			flush()
		}
		if ended && !moved {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-r.q.Done:
			ended = true // one more round for the last output
		case <-tick.C:
		}
	}
}

func rotated(path string, f *os.File) bool {
	now, err := os.Stat(path)
	if err != nil {
		return false
	}
	mine, err := f.Stat()
	return err == nil && !os.SameFile(now, mine)
}

// open returns the files of the log, oldest first.
func open(path string) ([]*os.File, error) {
	var out []*os.File
	for i := 0; i < 1000; i++ {
		name := path
		if i > 0 {
			name = numbered(path, i)
		}
		f, err := os.Open(name)
		if errors.Is(err, os.ErrNotExist) {
			break
		}
		if err != nil {
			return out, fmt.Errorf("open log: %w", err)
		}
		out = append([]*os.File{f}, out...)
	}
	return out, nil
}

// seekTail seeks to the beginning of the last n records and drops the files before
// them.
func seekTail(files []*os.File, n int64) ([]*os.File, error) {
	for i := len(files) - 1; i >= 0; i-- {
		size, err := files[i].Seek(0, io.SeekEnd)
		if err != nil {
			return files, fmt.Errorf("read log: %w", err)
		}
		at, left, err := backwards(files[i], size, n)
		if err != nil {
			return files, err
		}
		if _, err := files[i].Seek(at, io.SeekStart); err != nil {
			return files, fmt.Errorf("read log: %w", err)
		}
		if n = left; n <= 0 {
			for _, f := range files[:i] {
				_ = f.Close()
			}
			return files[i:], nil
		}
	}
	return files, nil
}

// backwards finds the place before the last n records of the first size bytes
// of f, and how many records are missing.
func backwards(f *os.File, size, n int64) (at, left int64, err error) {
	if n <= 0 {
		return size, 0, nil
	}
	buf := make([]byte, 32<<10)
	for end := size; end > 0; {
		start := max(0, end-int64(len(buf)))
		b := buf[:end-start]
		if _, err := f.ReadAt(b, start); err != nil {
			return 0, 0, fmt.Errorf("read log: %w", err)
		}
		for i := len(b) - 1; i >= 0; i-- {
			if b[i] != '\n' || start+int64(i) == size-1 {
				continue
			}
			if n--; n == 0 {
				return start + int64(i) + 1, 0, nil
			}
		}
		end = start
	}
	if size > 0 {
		n--
	}
	return 0, n, nil
}

// drain writes f from its present offset on.
func (r *reader) drain(f *os.File) error {
	b := bufio.NewReaderSize(f, 64<<10)
	for {
		part, err := b.ReadSlice('\n')
		r.rest = append(r.rest, part...)
		if err == nil {
			rec := r.rest
			if err := r.record(rec); err != nil {
				return err
			}
			r.rest = r.rest[:0]
			continue
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			if len(r.rest) > 4*maxPiece { // not a record that Writer wrote
				r.rest = r.rest[:0]
			}
			continue
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return fmt.Errorf("read log: %w", err)
	}
}

// record writes one record, newline included. Bytes that are no record are
// skipped.
func (r *reader) record(b []byte) error {
	stamp, rest, ok1 := bytes.Cut(b, []byte{' '})
	stream, rest, ok2 := bytes.Cut(rest, []byte{' '})
	tag, text, ok3 := bytes.Cut(rest, []byte{' '})
	if !ok1 || !ok2 || !ok3 || len(tag) != 1 || len(text) == 0 {
		return nil
	}
	if r.q.Stream != "" && string(stream) != r.q.Stream {
		return nil
	}
	if !r.q.Since.IsZero() {
		at, err := time.Parse(time.RFC3339Nano, string(stamp))
		if err != nil || at.Before(r.q.Since) {
			return nil
		}
	}
	if r.q.Timestamps && r.lineStart {
		if err := r.write(append(bytes.Clone(stamp), ' ')); err != nil {
			return err
		}
	}
	r.lineStart = tag[0] == 'F'
	if !r.lineStart {
		text = text[:len(text)-1]
	}
	return r.write(text)
}

func (r *reader) write(b []byte) error {
	limited := r.q.LimitBytes > 0
	if limited && int64(len(b)) > r.left {
		b = b[:r.left]
	}
	n, err := r.out.Write(b)
	r.left -= int64(n)
	if err != nil {
		return fmt.Errorf("send log: %w", err)
	}
	if limited && r.left <= 0 {
		return errLimit
	}
	return nil
}
