package offline

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// A file is a sequence of records: the key, the answer of a list, and frames of watches. A
// record is its length and its checksum, four bytes each, little endian, and its bytes. Its
// end may be missing after a crash of the machine.

// maxRecord bounds a record, in bytes: a list of 10,000 Services has some 10 MB.
const maxRecord = 1 << 30

var table = crc32.MakeTable(crc32.Castagnoli)

// errNoFile is the error of changes that come while there is no list to add them to.
var errNoFile = errors.New("there is no list")

func record(data []byte) []byte {
	out := make([]byte, 8, 8+len(data))
	binary.LittleEndian.PutUint32(out, uint32(len(data)))
	binary.LittleEndian.PutUint32(out[4:], crc32.Checksum(data, table))
	return append(out, data...)
}

// write makes the file hold a list, to which changes can be added, or a single object.
func (a *answer) write(key string, list []byte, version uint64) error {
	a.close()
	text := append(record([]byte(key)), record(list)...)
	if err := fileio.ReplaceUnsynced(a.path, text, 0o600); err != nil {
		return err
	}
	a.disk.soon(a.path)
	if a.version = version; a.single {
		return nil
	}
	f, err := os.OpenFile(a.path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	a.file, a.list, a.changes = f, int64(len(list)), 0
	return nil
}

func (a *answer) close() {
	if a.file != nil {
		_ = a.file.Close()
		a.file = nil
	}
}

// append adds frames of a watch, which reach up to version. Where the changes have become as
// long as the list, both are written again: what that costs follows what has changed.
func (a *answer) append(key string, frames []byte, version uint64) error {
	if a.file == nil { // the list is of an earlier process
		f, err := os.OpenFile(a.path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return errors.Join(errNoFile, err)
		}
		a.file, a.list, a.changes = f, 0, 0
	}
	n, err := a.file.Write(record(frames))
	if err != nil {
		return err
	}
	a.changes += int64(n)
	a.version = max(a.version, version)
	if a.changes < max(a.compact, a.list) {
		return nil
	}
	list, version, err := read(a.path, key)
	if err != nil {
		return err
	}
	return a.write(key, list, version)
}

// read returns the list of a file with its changes. With a list that can be used it may
// return an error about changes that cannot.
func read(path, key string) (list []byte, version uint64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	name, err := next(f)
	if err != nil {
		return nil, 0, fmt.Errorf("its head: %w", err)
	}
	if string(name) != key {
		return nil, 0, fmt.Errorf("it is of %q", name)
	}
	if list, err = next(f); err != nil {
		return nil, 0, fmt.Errorf("its list: %w", err)
	}
	var changes [][]byte
	for {
		frames, err := next(f)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			list, version, bad := merge(list, changes)
			return list, version, errors.Join(fmt.Errorf("its changes from the %dth on: %w", len(changes)+1, err), bad)
		}
		changes = append(changes, frames)
	}
	return merge(list, changes)
}

// next reads one record. The error at the end of the file is io.EOF.
func next(r io.Reader) ([]byte, error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > maxRecord {
		return nil, errors.New("a record is too long")
	}
	data, err := io.ReadAll(io.LimitReader(r, int64(n)))
	switch {
	case err != nil:
		return nil, err
	case uint32(len(data)) < n:
		return nil, io.ErrUnexpectedEOF
	case crc32.Checksum(data, table) != binary.LittleEndian.Uint32(head[4:]):
		return nil, errors.New("the checksum is wrong")
	}
	return data, nil
}
