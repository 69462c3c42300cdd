package offline

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
)

// The messages of k8s.io/apimachinery that are read here, by the numbers of their fields:
// lists and objects of all kinds begin with their metadata.
const (
	unknownRaw    = 2 // runtime.Unknown: the bytes of the object
	objectMeta    = 1 // every list and object
	listItems     = 2 // every list
	listVersion   = 2 // metav1.ListMeta
	listContinue  = 3
	metaName      = 1 // metav1.ObjectMeta
	metaNamespace = 3
	metaVersion   = 6
	eventType     = 1 // metav1.WatchEvent
	eventObject   = 2
	extensionRaw  = 1 // runtime.RawExtension
)

// magic begins every object in protobuf, but the events of a watch.
var magic = []byte{'k', '8', 's', 0}

// maxFrame bounds one event of a watch, in bytes.
const maxFrame = 64 << 20

// list is a parsed list, or object.
type list struct {
	version uint64
	more    bool // it is the first part of a longer one
	meta    []byte
	items   [][]byte
}

// fields calls f with every field of a message of which the value is bytes.
func fields(message []byte, f func(number protowire.Number, value []byte)) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		if kind != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(number, kind, message); n < 0 {
				return protowire.ParseError(n)
			}
			message = message[n:]
			continue
		}
		value, n := protowire.ConsumeBytes(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		f(number, value)
		message = message[n:]
	}
	return nil
}

// object returns the bytes of the object in an envelope.
func object(envelope []byte) (raw []byte, err error) {
	rest, ok := bytes.CutPrefix(envelope, magic)
	if !ok {
		return nil, errors.New("not an object in protobuf")
	}
	err = fields(rest, func(n protowire.Number, v []byte) {
		if n == unknownRaw {
			raw = v
		}
	})
	return raw, err
}

// parse reads the body of a list, or of one object.
func parse(body []byte, single bool) (l list, err error) {
	raw, err := object(body)
	if err != nil {
		return l, err
	}
	if single {
		_, l.version, err = identity(raw)
		return l, err
	}
	err = fields(raw, func(n protowire.Number, v []byte) {
		switch n {
		case objectMeta:
			l.meta = v
		case listItems:
			l.items = append(l.items, v)
		}
	})
	if err != nil {
		return l, err
	}
	err = fields(l.meta, func(n protowire.Number, v []byte) {
		switch n {
		case listVersion:
			l.version, _ = strconv.ParseUint(string(v), 10, 64)
		case listContinue:
			l.more = len(v) > 0
		}
	})
	return l, err
}

// identity returns namespace and name of an object, and its version.
func identity(raw []byte) (id string, version uint64, err error) {
	var namespace, name string
	var bad error
	err = fields(raw, func(n protowire.Number, meta []byte) {
		if n != objectMeta {
			return
		}
		bad = fields(meta, func(n protowire.Number, v []byte) {
			switch n {
			case metaName:
				name = string(v)
			case metaNamespace:
				namespace = string(v)
			case metaVersion:
				version, _ = strconv.ParseUint(string(v), 10, 64)
			}
		})
	})
	return namespace + "/" + name, version, errors.Join(err, bad)
}

// event reads one event of a watch.
func event(frame []byte) (kind string, raw []byte, err error) {
	var bad error
	err = fields(bytes.TrimPrefix(frame, magic), func(n protowire.Number, v []byte) {
		switch n {
		case eventType:
			kind = string(v)
		case eventObject:
			bad = fields(v, func(n protowire.Number, v []byte) {
				if n == extensionRaw {
					raw = v
				}
			})
		}
	})
	if err = errors.Join(err, bad); err != nil || kind == "ERROR" {
		return kind, nil, err
	}
	raw, err = object(raw)
	return kind, raw, err
}

// framer finds the events in what arrives of a watch: each has its length before it, in four
// bytes, big endian.
type framer struct{ rest []byte }

// add takes data that has arrived, and returns the complete events that are newer than a
// version, with their lengths, and the version that they reach.
func (f *framer) add(data []byte, after uint64) (frames []byte, version uint64, err error) {
	f.rest = append(f.rest, data...)
	whole := 0
	for rest := f.rest; len(rest) >= 4; rest = f.rest[whole:] {
		n := int(binary.BigEndian.Uint32(rest))
		if n > maxFrame {
			return nil, 0, fmt.Errorf("an event of %d bytes", n)
		}
		if len(rest) < 4+n {
			break
		}
		kind, raw, err := event(rest[4 : 4+n])
		if err != nil {
			return nil, 0, err
		}
		if kind != "ERROR" {
			_, v, err := identity(raw)
			if err != nil {
				return nil, 0, err
			}
			if v > after {
				frames, version = append(frames, rest[:4+n]...), max(version, v)
			}
		}
		whole += 4 + n
	}
	f.rest = append(f.rest[:0], f.rest[whole:]...)
	return frames, version, nil
}

// merge applies the events of watches to the body of a list, and returns it with the version
// that it has then.
func merge(body []byte, changes [][]byte) ([]byte, uint64, error) {
	if len(changes) == 0 {
		l, err := parse(body, false)
		return body, l.version, err
	}
	l, err := parse(body, false)
	if err != nil {
		return nil, 0, err
	}
	at := map[string]int{} // in l.items; deleted items stay as nil
	for i, raw := range l.items {
		id, _, err := identity(raw)
		if err != nil {
			return nil, 0, err
		}
		at[id] = i
	}
	for _, frames := range changes {
		for len(frames) >= 4 {
			n := int(binary.BigEndian.Uint32(frames))
			kind, raw, err := event(frames[4 : 4+n])
			if err != nil {
				return nil, 0, err
			}
			frames = frames[4+n:]
			if kind == "ERROR" {
				continue
			}
			id, version, err := identity(raw)
			if err != nil {
				return nil, 0, err
			}
			l.version = max(l.version, version)
			i, known := at[id]
			switch {
			case kind == "BOOKMARK":
			case kind == "DELETED" && known:
				l.items[i] = nil
				delete(at, id)
			case kind == "DELETED":
			case known:
				l.items[i] = raw
			default:
				at[id] = len(l.items)
				l.items = append(l.items, raw)
			}
		}
	}
	merged, err := l.body(body)
	return merged, l.version, err
}

// body returns the list in the envelope of an earlier one.
func (l *list) body(envelope []byte) ([]byte, error) {
	meta := protowire.AppendTag(nil, listVersion, protowire.BytesType)
	meta = protowire.AppendString(meta, strconv.FormatUint(l.version, 10))
	raw := protowire.AppendTag(nil, objectMeta, protowire.BytesType)
	raw = protowire.AppendBytes(raw, meta)
	for _, item := range l.items {
		if item != nil {
			raw = protowire.AppendTag(raw, listItems, protowire.BytesType)
			raw = protowire.AppendBytes(raw, item)
		}
	}
	out := bytes.Clone(magic)
	err := fields(envelope[len(magic):], func(n protowire.Number, v []byte) {
		if n == unknownRaw {
			v = raw
		}
		out = protowire.AppendTag(out, n, protowire.BytesType)
		out = protowire.AppendBytes(out, v)
	})
	return out, err
}
