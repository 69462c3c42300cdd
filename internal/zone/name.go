package zone

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Limits of RFC 1035, section 2.3.4.
const (
	maxName   = 255
	maxLabel  = 63
	maxLabels = 127
)

// Name is a domain name in wire form and lower case, with the places of its
// labels. The zero value is not a name; one of the Parse methods makes it one.
// A Name is 380 bytes large and meant to be reused.
type Name struct {
	wire   [maxName + 1 + 7]byte // room for whole words when lowering
	size   int                   // length with the root label
	labels int                   // number of labels without the root
	start  [maxLabels + 1]uint8  // start[i] is where label i begins
}

// ParseWire reads the uncompressed name at off in msg and returns the offset
// behind it. It is false for names that are cut off, too long, or use a
// compression pointer, which a question has nothing to point at.
func (n *Name) ParseWire(msg []byte, off int) (end int, ok bool) {
	labels, at := 0, off
	for {
		if at >= len(msg) {
			return 0, false
		}
		l := int(msg[at])
		if l == 0 {
			break
		}
		if l > maxLabel || at+1+l-off >= maxName {
			return 0, false
		}
		n.start[labels] = uint8(at - off)
		labels++
		at += 1 + l
	}
	at++
	n.size, n.labels = at-off, labels
	n.start[labels] = uint8(n.size - 1)
	lower(n.wire[:], msg[off:at])
	return at, true
}

// ParseText reads a name in text form; a closing dot makes no difference.
// Backslash escapes are rejected: no name of the Kubernetes API has them.
func (n *Name) ParseText(s string) error {
	var buf [maxName + 1]byte
	w := buf[:0]
	s = strings.TrimSuffix(s, ".")
	for s != "" {
		label, rest, more := strings.Cut(s, ".")
		if label == "" || len(label) > maxLabel || more && rest == "" || strings.Contains(label, `\`) {
			return fmt.Errorf("%q is not a domain name: labels are 1 to %d bytes long and parted by single dots", s, maxLabel)
		}
		if len(w)+len(label)+2 > maxName {
			return fmt.Errorf("a domain name has at most %d bytes", maxName)
		}
		w = append(append(w, byte(len(label))), label...)
		s = rest
	}
	if _, ok := n.ParseWire(append(w, 0), 0); !ok {
		return errors.New("not a domain name")
	}
	return nil
}

// Wire is the lower-case wire form with the root label. It is overwritten by
// the next Parse.
func (n *Name) Wire() []byte { return n.wire[:n.size] }

// Labels is the number of labels without the root.
func (n *Name) Labels() int { return n.labels }

// label is the text of label i.
func (n *Name) label(i int) []byte {
	s := int(n.start[i])
	return n.wire[s+1 : s+1+int(n.wire[s])]
}

// HasSuffix reports whether n is the name with the wire form suffix of that many
// labels, or lies below it.
func (n *Name) HasSuffix(suffix []byte, labels int) bool {
	if n.labels < labels || n.size < len(suffix) {
		return false
	}
	at := n.size - len(suffix)
	return int(n.start[n.labels-labels]) == at && string(n.wire[at:n.size]) == string(suffix)
}

// String is the text form with a closing dot, escaped as RFC 1035 section 5.1
// asks.
func (n *Name) String() string { return wireText(n.Wire()) }

// wireText is the text form of an uncompressed wire name, or of one that has
// no root label yet.
func wireText(w []byte) string {
	var b strings.Builder
	for len(w) > 0 && w[0] != 0 {
		l := int(w[0])
		for _, c := range w[1 : 1+l] {
			switch {
			case c == '.' || c == '\\':
				b.WriteByte('\\')
				b.WriteByte(c)
			case c <= ' ' || c > '~':
				fmt.Fprintf(&b, "\\%03d", c)
			default:
				b.WriteByte(c)
			}
		}
		b.WriteByte('.')
		w = w[1+l:]
	}
	if b.Len() == 0 {
		return "."
	}
	return b.String()
}

// lower copies src to dst, which must have seven bytes more, with ASCII
// letters in lower case, eight bytes at a time. Length bytes pass unchanged:
// they are at most 63, below 'A'.
func lower(dst, src []byte) {
	const (
		ones = 0x0101010101010101
		high = 0x8080808080808080
	)
	i := 0
	for ; i+8 <= len(src); i += 8 {
		w := binary.LittleEndian.Uint64(src[i:])
		seven := w &^ high
		fromA := seven + (0x80-'A')*ones
		aboveZ := seven + (0x80-'Z'-1)*ones
		letter := (fromA &^ aboveZ) &^ w & high
		binary.LittleEndian.PutUint64(dst[i:], w|letter>>2)
	}
	for ; i < len(src); i++ {
		c := src[i]
		if c-'A' < 26 {
			c |= 0x20
		}
		dst[i] = c
	}
}

// appendLabel appends one label in lower case; false when it cannot be one.
func appendLabel(w []byte, label string) ([]byte, bool) {
	if label == "" || len(label) > maxLabel {
		return w, false
	}
	w = append(w, byte(len(label)))
	for i := range len(label) {
		c := label[i]
		if c-'A' < 26 {
			c |= 0x20
		}
		w = append(w, c)
	}
	return w, true
}
