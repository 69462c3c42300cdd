package netlink

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Encoder writes netlink messages one after the other into Buf.
type Encoder struct {
	Buf []byte
	msg int // where the message being written begins
}

// Begin starts a message of type typ with an nfgenmsg header. Its sequence
// number is given when it is sent.
func (e *Encoder) Begin(typ, flags uint16, family uint8, resID uint16) {
	e.BeginWith(typ, flags, family, 0, byte(resID>>8), byte(resID))
}

// BeginWith is Begin with the bytes of any other header, which end on a multiple
// of four.
func (e *Encoder) BeginWith(typ, flags uint16, header ...byte) {
	e.msg = len(e.Buf)
	e.Buf = append(e.Buf, 0, 0, 0, 0)
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, typ)
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, flags|unix.NLM_F_REQUEST)
	e.Buf = append(e.Buf, 0, 0, 0, 0, 0, 0, 0, 0) // sequence number, port
	e.Buf = append(e.Buf, header...)
}

// End closes the message.
func (e *Encoder) End() {
	binary.NativeEndian.PutUint32(e.Buf[e.msg:], uint32(len(e.Buf)-e.msg))
}

// Nest opens a nested attribute, to be closed with Close.
func (e *Encoder) Nest(typ uint16) int {
	at := len(e.Buf)
	e.Buf = append(e.Buf, 0, 0)
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, typ|unix.NLA_F_NESTED)
	return at
}

// Close ends the nested attribute that Nest opened at position at.
func (e *Encoder) Close(at int) {
	binary.NativeEndian.PutUint16(e.Buf[at:], uint16(len(e.Buf)-at))
}

// Bytes appends an attribute with the value v.
func (e *Encoder) Bytes(typ uint16, v []byte) {
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, uint16(4+len(v)))
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, typ)
	e.Buf = append(e.Buf, v...)
	e.pad(len(v))
}

// String appends an attribute with a NUL-terminated string.
func (e *Encoder) String(typ uint16, s string) {
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, uint16(4+len(s)+1))
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, typ)
	e.Buf = append(e.Buf, s...)
	e.Buf = append(e.Buf, 0)
	e.pad(len(s) + 1)
}

// Uint32 appends an attribute with v in network order, as nfnetlink wants all
// its numbers.
func (e *Encoder) Uint32(typ uint16, v uint32) {
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, 8)
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, typ)
	e.Buf = binary.BigEndian.AppendUint32(e.Buf, v)
}

// Uint64 appends an attribute with v in network order.
func (e *Encoder) Uint64(typ uint16, v uint64) {
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, 12)
	e.Buf = binary.NativeEndian.AppendUint16(e.Buf, typ)
	e.Buf = binary.BigEndian.AppendUint64(e.Buf, v)
}

// Uint16 appends an attribute with v in network order.
func (e *Encoder) Uint16(typ uint16, v uint16) {
	e.Bytes(typ, []byte{byte(v >> 8), byte(v)})
}

// Uint8 appends an attribute with one byte.
func (e *Encoder) Uint8(typ uint16, v uint8) { e.Bytes(typ, []byte{v}) }

func (e *Encoder) pad(n int) {
	for ; n%4 != 0; n++ {
		e.Buf = append(e.Buf, 0)
	}
}

// Attrs calls f for each attribute in b, without the flag bits of its type.
// What does not parse ends the walk: the bytes come from the kernel, and a
// newer one may append unknown fields.
func Attrs(b []byte, f func(typ uint16, v []byte)) {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		typ := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		if n < 4 || n > len(b) {
			return
		}
		f(typ, b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// Attr returns the value of the first attribute of type typ in b, nil if
// there is none.
func Attr(b []byte, typ uint16) []byte {
	var found []byte
	Attrs(b, func(t uint16, v []byte) {
		if t == typ && found == nil {
			found = v
		}
	})
	return found
}

// CString returns v without the NUL that ends it.
func CString(v []byte) string {
	for i, c := range v {
		if c == 0 {
			return string(v[:i])
		}
	}
	return string(v)
}
