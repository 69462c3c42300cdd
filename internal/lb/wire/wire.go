// Package wire carries the messages of package quorum between speakers by UDP, signed with the cluster's key.
package wire

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/lb/quorum"
)

// Conn sends and receives messages of speakers. A datagram is the version byte,
// sender and receiver (each a length and a name), the message, and an HMAC-SHA256 of all that.
// quorum recognizes replays: of a request by its session and nonce, of a reply by its nonce.
type Conn struct {
	self string
	// keys are the valid keys: the first one signs.
	keys atomic.Pointer[[][]byte]
	conn *net.UDPConn
	log  *slog.Logger
	// in holds messages that were not handled yet; messages that do not fit are dropped.
	in chan Received
	// rejected and dropped count received datagrams, failed datagrams that could not be sent.
	rejected, dropped, failed atomic.Uint64

	mu    sync.Mutex
	peers map[string]netip.AddrPort // where the last request of a speaker with a promise came from
	macs  macs
}

// Received is a message of a speaker that has the key.
type Received struct {
	From    string // the speaker's name
	Source  netip.AddrPort
	Message *quorum.Message
}

const (
	wireVersion = 1
	queueLength = 512
	// MaxName is the longest name of a speaker, in bytes.
	MaxName = 255
)

// Listen opens the socket.
func Listen(self string, at netip.AddrPort, keys [][]byte, log *slog.Logger) (*Conn, error) {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return nil, fmt.Errorf("listen for other speakers: %w", err)
	}
	t := &Conn{self: self, conn: conn, log: log, in: make(chan Received, queueLength), peers: map[string]netip.AddrPort{}}
	t.keys.Store(&keys)
	return t, nil
}

// In returns the messages that were received and not handled yet.
func (t *Conn) In() <-chan Received { return t.in }

// macs are the keys of a Conn, ready for use by one goroutine.
type macs struct {
	of   *[][]byte
	list []hash.Hash
}

// get returns a MAC for each of the current keys.
func (m *macs) get(t *Conn) []hash.Hash {
	if keys := t.keys.Load(); m.of != keys {
		*m = macs{of: keys}
		for _, key := range *keys {
			m.list = append(m.list, hmac.New(sha256.New, key))
		}
	}
	return m.list
}

// Run receives until ctx ends.
func (t *Conn) Run(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() { _ = t.conn.Close() })
	defer stop()
	var keys macs
	buf := make([]byte, 1<<16)
	for {
		n, from, err := t.conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error of an earlier send
		}
		r, err := openAny(keys.get(t), t.self, buf[:n])
		if err != nil {
			if t.rejected.Add(1) == 1 {
				t.log.Warn("dropped a message that no speaker of this cluster has signed; only counting later ones", "from", from, "err", err)
			}
			continue
		}
		r.Source = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		select {
		case t.in <- r:
		default:
			t.dropped.Add(1)
		}
	}
}

// Send sends messages. quorum repeats lost ones. Answers to r, if it is not nil, go to its source.
func (t *Conn) Send(envelopes []quorum.Envelope, r *Received) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range envelopes {
		if to := t.address(&e, r); to.IsValid() {
			t.write(seal(t.macs.get(t)[0], t.self, e.To, e.Message), to)
		}
	}
}

// address returns where a message goes, not valid if that is unknown. Only the source of
// a request that got a promise is remembered: quorum gives none to a datagram sent again by
// another machine, which would get the messages for the speaker otherwise.
func (t *Conn) address(e *quorum.Envelope, r *Received) netip.AddrPort {
	if r != nil && e.To == r.From && e.Message.Kind == quorum.Reply {
		if e.Message.Promised {
			t.peers[e.To] = r.Source
		}
		if e.Address == "" {
			return r.Source
		}
	}
	if to, err := netip.ParseAddrPort(e.Address); err == nil {
		return to
	}
	return t.peers[e.To]
}

// write sends a datagram.
func (t *Conn) write(b []byte, to netip.AddrPort) {
	_, err := t.conn.WriteToUDPAddrPort(b, to)
	if err == nil || errors.Is(err, net.ErrClosed) {
		return
	}
	if t.failed.Add(1) == 1 {
		t.log.Warn("cannot send to another speaker; retrying, and only counting later failures", "to", to, "bytes", len(b), "err", err)
	}
}

// seal returns the datagram for a message.
func seal(mac hash.Hash, from, to string, m *quorum.Message) []byte {
	b := make([]byte, 0, 512)
	b = append(b, wireVersion, byte(len(from)))
	b = append(b, from...)
	b = append(b, byte(len(to)))
	b = append(b, to...)
	b = m.Append(b)
	mac.Reset()
	mac.Write(b)
	return mac.Sum(b)
}

var (
	errShort   = errors.New("it is too short")
	errVersion = errors.New("it is of another version")
	errMAC     = errors.New("it is signed with another key")
	errTo      = errors.New("it is for another speaker")
)

// openAny is open with the first of the keys by which a datagram is signed.
func openAny(keys []hash.Hash, self string, b []byte) (r Received, err error) {
	err = errMAC
	for _, mac := range keys {
		if r, err = open(mac, self, b); !errors.Is(err, errMAC) {
			break
		}
	}
	return r, err
}

// open checks a datagram and returns what is in it.
func open(mac hash.Hash, self string, b []byte) (r Received, err error) {
	n := len(b) - sha256.Size
	if n < 3 {
		return r, errShort
	}
	mac.Reset()
	mac.Write(b[:n])
	if !hmac.Equal(mac.Sum(nil), b[n:]) {
		return r, errMAC
	}
	if b[0] != wireVersion {
		return r, errVersion
	}
	b = b[1:n]
	var names [2]string
	for i := range names {
		if len(b) == 0 || len(b) <= int(b[0]) {
			return r, errShort
		}
		names[i], b = string(b[1:1+b[0]]), b[1+int(b[0]):]
	}
	if names[1] != self || names[0] == self {
		return r, errTo
	}
	r.From = names[0]
	r.Message, err = quorum.ParseMessage(b)
	return r, err
}
