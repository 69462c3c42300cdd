package quorum

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
)

// Kind is what a Message is.
type Kind uint8

// The kinds of messages.
const (
	// Request asks a voter for promises.
	Request Kind = 1 + iota
	// Reply answers a Request.
	Reply
	// Notice asks a speaker to send a Request now, since something has changed.
	Notice
)

// Message is what Nodes send each other.
type Message struct {
	Kind Kind
	// ListVersion is the version of the sender's list. List is that list, with Version 0
	// if it is not in the message: only receivers with an older one get it.
	ListVersion uint64
	List        List
	// Session is the number that the voter has drawn, 0 before there is one.
	Session uint64
	// Nonce grows with each request of a speaker; a reply has that of its request.
	Nonce uint64

	// Of a Request: Heard is the nonce of the last one that was answered. Adds and Removes
	// are what changed from version Base to UpTo of the speaker's set. Attrs is
	// Member.Attrs, empty if the node may not announce. View is the version of the
	// voter's view that the speaker has.
	Heard, Base, UpTo uint64
	Attrs             string
	Adds, Removes     []netip.Addr
	// End is true in the last Request of a process: it counts on nothing any more, so that the
	// session ends at once and a successor of the same name need not wait for that. UpTo is for how many milliseconds the
	// voter keeps what the process was promised for that successor; earlier builds keep nothing.
	End bool

	// Of a Reply: Promised is true if everything that the session has was promised
	// again. Confirmed is the version of the speaker's set that the voter has. Refused
	// are addresses of Adds that are promised to other speakers. Offer is a number for a new
	// session. Members is the voter's view of who may announce, if HasMembers.
	Promised         bool
	Offer, Confirmed uint64
	Refused          []netip.Addr
	View             uint64
	HasMembers       bool
	Members          []Member
	// packed is Members as packMembers returns them, nil if that has not been done.
	packed []byte
}

// maxChanges bounds Adds and Removes of one message, so that it fits a packet
// without fragments: 70 addresses of IPv6 in 1,190 bytes.
const maxChanges = 70

// Flags of an encoded message.
const (
	flagList = 1 << iota
	flagWitness
	flagPromised
	flagMembers
	flagEnd
	flagPacked
)

// maxPlain bounds the Members of a message that are not compressed, in bytes: a datagram has 65,507 at most, and earlier
// builds read no compressed ones. maxMembers bounds the Members that are compressed, in bytes before compression.
const (
	maxPlain   = 48 << 10
	maxMembers = 4 << 20
)

// packMembers returns the encoded form of Members after a byte that is 1 if it is compressed: the interfaces of 1,000 nodes
// do not fit a datagram.
func packMembers(members []Member) []byte {
	plain := binary.AppendUvarint(nil, uint64(len(members)))
	for _, v := range members {
		plain = appendString(appendString(plain, v.Name), v.Attrs)
	}
	if len(plain) <= maxPlain {
		return append([]byte{0}, plain...)
	}
	var packed bytes.Buffer
	packed.WriteByte(1)
	w, _ := flate.NewWriter(&packed, flate.BestSpeed) // only fails for another level
	_, _ = w.Write(plain)                             // to memory
	_ = w.Close()
	return packed.Bytes()
}

// unpack inflates what follows, the Members.
func (r *reader) unpack() {
	plain, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(r.b)), maxMembers))
	if r.b = plain; err != nil {
		r.bad = true
	}
}

// Append appends the binary form of m to b.
func (m *Message) Append(b []byte) []byte {
	packed := m.packed
	if m.HasMembers && packed == nil {
		packed = packMembers(m.Members)
	}
	flags := byte(0)
	for f, set := range map[byte]bool{
		flagList: m.List.Version != 0, flagWitness: m.List.Witness, flagPromised: m.Promised, flagMembers: m.HasMembers,
		flagEnd: m.End, flagPacked: len(packed) > 0 && packed[0] == 1,
	} {
		if set {
			flags |= f
		}
	}
	b = append(b, byte(m.Kind), flags)
	for _, n := range []uint64{m.ListVersion, m.Session, m.Nonce, m.Heard, m.Base, m.UpTo, m.Offer, m.Confirmed, m.View} {
		b = binary.AppendUvarint(b, n)
	}
	b = appendString(b, m.Attrs)
	for _, addrs := range [][]netip.Addr{m.Adds, m.Removes, m.Refused} {
		b = binary.AppendUvarint(b, uint64(len(addrs)))
		for _, a := range addrs {
			b = append(b, byte(a.BitLen()/8))
			b = append(b, a.AsSlice()...)
		}
	}
	if m.List.Version != 0 {
		b = binary.AppendUvarint(b, m.List.Version)
		b = binary.AppendUvarint(b, uint64(len(m.List.Voters)))
		for _, v := range m.List.Voters {
			b = appendString(appendString(b, v.Name), v.Address)
		}
	}
	if m.HasMembers {
		b = append(b, packed[1:]...)
	}
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

var errMessage = errors.New("malformed message")

// ParseMessage reads the binary form of a message. The caller has made sure that it is of a peer.
func ParseMessage(b []byte) (*Message, error) {
	r := reader{b: b}
	m := &Message{Kind: Kind(r.byte())}
	flags := r.byte()
	m.Promised, m.HasMembers, m.End = flags&flagPromised != 0, flags&flagMembers != 0, flags&flagEnd != 0
	for _, n := range []*uint64{
		&m.ListVersion, &m.Session, &m.Nonce, &m.Heard, &m.Base, &m.UpTo, &m.Offer, &m.Confirmed, &m.View,
	} {
		*n = r.uvarint()
	}
	m.Attrs = r.string()
	for _, addrs := range []*[]netip.Addr{&m.Adds, &m.Removes, &m.Refused} {
		for range r.count(5) {
			*addrs = append(*addrs, r.addr())
		}
	}
	if flags&flagList != 0 {
		m.List = List{Version: r.uvarint(), Witness: flags&flagWitness != 0}
		for range r.count(2) {
			m.List.Voters = append(m.List.Voters, Voter{r.string(), r.string()})
		}
		r.bad = r.bad || m.List.Version == 0 || len(m.List.Voters) > 2*MaxVoters
	}
	if m.HasMembers {
		if flags&flagPacked != 0 {
			r.unpack()
		}
		for range r.count(2) {
			m.Members = append(m.Members, Member{r.string(), r.string()})
		}
	}
	if r.bad || len(r.b) > 0 || m.Kind < Request || m.Kind > Notice {
		return nil, errMessage
	}
	return m, nil
}

// reader reads from b. After an error it is bad and returns zeros.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n uint64) []byte {
	if r.bad || n > uint64(len(r.b)) {
		r.bad, r.b = true, nil
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) uvarint() uint64 {
	n, size := binary.Uvarint(r.b)
	if size <= 0 {
		r.bad, r.b = true, nil
		return 0
	}
	r.take(uint64(size))
	return n
}

func (r *reader) string() string { return string(r.take(r.uvarint())) }

// count reads how many elements follow, of size bytes at least.
func (r *reader) count(size uint64) uint64 {
	n := r.uvarint()
	if n > uint64(len(r.b))/size {
		r.bad, r.b = true, nil
		return 0
	}
	return n
}

func (r *reader) addr() netip.Addr {
	n := r.byte()
	a, ok := netip.AddrFromSlice(r.take(uint64(n)))
	if !ok || a.Is4In6() {
		r.bad = true
		return netip.Addr{}
	}
	return a
}
