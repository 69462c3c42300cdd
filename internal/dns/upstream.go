package dns

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// upstream is one resolver.
type upstream struct {
	addr netip.AddrPort
	name string // addr as text

	// fails is the number of consecutive attempts without an answer.
	fails atomic.Int32
	// looped is whether its questions come back to this server.
	looped atomic.Bool
	// plain is whether it does not repeat the case of letters.
	plain atomic.Bool
	// noEDNS is whether it answers FORMERR to an OPT record.
	noEDNS atomic.Bool

	tls  *tls.Config // nil: plain
	idle idleConns   // over TLS

	stats upstreamStats
}

// maxFails is the number of consecutive failures that makes an upstream
// unhealthy, as in CoreDNS.
const maxFails = 2

func newUpstream(a netip.AddrPort) *upstream {
	return &upstream{addr: a, name: a.String()}
}

func (u *upstream) healthy() bool { return u.fails.Load() < maxFails && !u.looped.Load() }

// UpstreamsCondition returns the Node condition UpstreamsAnswer. An upstream that nobody asks counts as one that answers.
func (s *Server) UpstreamsCondition() corev1.NodeCondition {
	var dead []string
	all := s.forward.all()
	for _, u := range all {
		if !u.healthy() {
			dead = append(dead, u.name)
		}
	}
	c := corev1.NodeCondition{
		Type: svc.UpstreamsAnswer, Status: corev1.ConditionTrue, Reason: "Answering", Message: "the upstreams of DNS answer",
	}
	if len(dead) > 0 {
		c.Status, c.Reason = corev1.ConditionFalse, "SomeDead"
		c.Message = fmt.Sprintf("%d of %d upstreams of DNS do not answer, or lead back here: %s", len(dead), len(all),
			strings.Join(dead[:min(len(dead), maxNamedUpstreams)], ", "))
	}
	if len(dead) == len(all) && len(all) > 0 {
		c.Reason = "AllDead"
		c.Message += "; names outside of the cluster are not resolved"
	}
	if len(dead) > 0 {
		c.Message += ": look at these servers and the way there, or name others with --upstream"
	}
	return c
}

// maxNamedUpstreams bounds how many upstreams a condition names.
const maxNamedUpstreams = 5

// ask is a question for an upstream.
type ask struct {
	name  []byte // wire form, lower case
	typ   uint16
	flags byte // key flags
}

// key returns the key of cache and inflight.
func (a ask) key() string { return string(appendKey(nil, a.name, a.typ, a.flags)) }

func appendKey(b, name []byte, typ uint16, flags byte) []byte {
	b = append(b, byte(typ>>8), byte(typ), flags)
	return append(b, name...)
}

// Errors of one attempt.
var (
	errNoAnswer  = errors.New("no answer")
	errTruncated = errors.New("truncated")
	errCase      = errors.New("answer does not repeat the case of the name")
)

// maxMismatches is how many packets that do not answer the question are read
// before the attempt fails: they are probably forged.
const maxMismatches = 64

// exchange asks u over UDP and, if the answer was truncated or cannot be trusted,
// over TCP.
func (u *upstream) exchange(ctx context.Context, a ask, mixCase bool, timeout time.Duration) (*entry, error) {
	if u.tls != nil {
		return u.exchangeTLS(ctx, a, timeout)
	}
	mix := mixCase && !u.plain.Load()
	e, err := u.exchangeOver(ctx, "udp", a, mix, timeout)
	if err == nil || !errors.Is(err, errTruncated) && !errors.Is(err, errCase) {
		return e, err
	}
	wrongCase := errors.Is(err, errCase)
	e, err = u.exchangeOver(ctx, "tcp", a, mix, timeout)
	if errors.Is(err, errCase) && wrongCase {
		// It does so over TCP as well, where answers cannot be forged blindly.
		u.plain.Store(true)
		e, err = u.exchangeOver(ctx, "tcp", a, false, timeout)
	}
	return e, err
}

func (u *upstream) exchangeOver(ctx context.Context, network string, a ask, mix bool, timeout time.Duration) (*entry, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, u.name)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if network == "udp" {
		u.stats.udp.Add(1)
	} else {
		u.stats.tcp.Add(1)
	}
	// Unblocks the read when ctx ends.
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()

	req := u.request(a, mix)
	if network == "tcp" {
		return exchangeTCP(conn, req, a)
	}
	return exchangeUDP(conn, req, a)
}

// request packs the question with a random id and, if mix, random case.
func (u *upstream) request(a ask, mix bool) []byte {
	msg := make([]byte, 2+headerSize, 2+headerSize+len(a.name)+4+optSize)
	// crypto/rand.Read never fails: it ends the process.
	rand.Read(msg[2:4])
	flags := uint16(flagRD)
	if a.flags&keyCD != 0 {
		flags |= flagCD
	}
	if a.flags&keyAD != 0 {
		flags |= flagAD
	}
	binary.BigEndian.PutUint16(msg[4:], flags)
	msg[7] = 1
	nameAt := len(msg)
	msg = append(msg, a.name...)
	if mix {
		mixLetters(msg[nameAt:])
	}
	msg = binary.BigEndian.AppendUint16(msg, a.typ)
	msg = binary.BigEndian.AppendUint16(msg, classIN)
	if !u.noEDNS.Load() {
		msg[13] = 1
		msg = append(msg, 0, 0, typeOPT, udpSize>>8, udpSize&0xFF, 0, 0, 0, 0, 0, 0)
		if a.flags&keyDO != 0 {
			msg[len(msg)-4] = 0x80
		}
	}
	binary.BigEndian.PutUint16(msg, uint16(len(msg)-2))
	return msg
}

// mixLetters gives each letter of a wire name random case. Length bytes are no
// letters.
func mixLetters(name []byte) {
	var bits [32]byte
	rand.Read(bits[:])
	for i, c := range name {
		if c >= 'a' && c <= 'z' && bits[i/8]>>(i%8)&1 == 1 {
			name[i] = c - 0x20
		}
	}
}

// exchangeUDP sends req, which begins with its length, and waits for the
// answer to it. The socket is connected: the kernel passes on only what comes
// from the upstream's address and port.
func exchangeUDP(conn net.Conn, req []byte, a ask) (*entry, error) {
	if _, err := conn.Write(req[2:]); err != nil {
		return nil, err
	}
	buf := make([]byte, 4096)
	var caseErr error
	for range maxMismatches {
		n, err := conn.Read(buf)
		if err != nil {
			return nil, errors.Join(err, caseErr)
		}
		e, err := readReply(buf[:n], req[2:], a)
		switch {
		case err == nil || errors.Is(err, errTruncated) || errors.Is(err, errBadReply):
			return e, err
		case errors.Is(err, errCase):
			// Either the upstream changes case or the answer is forged; TCP
			// shows which.
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w among %d packets", errNoAnswer, maxMismatches)
}

func exchangeTCP(conn net.Conn, req []byte, a ask) (*entry, error) {
	if _, err := conn.Write(req); err != nil {
		return nil, err
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return nil, err
	}
	buf := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(conn, buf); err != nil {
		return nil, err
	}
	return readReply(buf, req[2:], a)
}

// readReply reads buf as the answer to req: it must have its ID and its question,
// letter by letter. errNoAnswer means that buf is something else.
func readReply(buf, req []byte, a ask) (*entry, error) {
	qend := headerSize + len(a.name) + 4
	if len(buf) < headerSize || [2]byte(buf) != [2]byte(req) {
		return nil, errNoAnswer
	}
	flags := binary.BigEndian.Uint16(buf[2:])
	if flags&flagQR == 0 || flags&opcodeMask != 0 {
		return nil, errNoAnswer
	}
	if rcode := flags & rcodeMask; binary.BigEndian.Uint16(buf[4:]) == 0 && (rcode == rcodeFormErr || rcode == rcodeNotImp) {
		// Servers that cannot parse a query do not repeat it.
		return &entry{rcode: uint8(rcode)}, nil
	}
	if binary.BigEndian.Uint16(buf[4:]) != 1 || len(buf) < qend {
		return nil, errNoAnswer
	}
	if !bytes.Equal(buf[headerSize:qend], req[headerSize:qend]) {
		if bytes.EqualFold(buf[headerSize:qend-4], req[headerSize:qend-4]) && bytes.Equal(buf[qend-4:qend], req[qend-4:qend]) {
			return nil, errCase
		}
		return nil, errNoAnswer
	}
	if flags&flagTC != 0 {
		return nil, errTruncated
	}
	return newEntry(buf, a.name)
}
