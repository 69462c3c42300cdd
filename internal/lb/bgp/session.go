package bgp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/loop"
)

// States of a session, as in RFC 4271, section 8.2.2, except Active, in which a router
// would listen.
const (
	idle        = "Idle"
	connect     = "Connect"
	openSent    = "OpenSent"
	openConfirm = "OpenConfirm"
	established = "Established"
)

const (
	// dialTimeout and openTimeout are how long a router may take to accept a connection
	// and to answer an OPEN.
	dialTimeout = 3 * time.Second
	openTimeout = 15 * time.Second
	// lingerTime is how long a router may take to close its end of a session that was
	// ended here.
	lingerTime = time.Second
	// A failed session is tried again after firstRetry, then twice as long each time,
	// up to lastRetry.
	firstRetry = 500 * time.Millisecond
	lastRetry  = 15 * time.Second
	// silentWrite is how long a write may block if no hold time was agreed on.
	silentWrite = DefaultHoldTime
)

// session keeps a connection with one peer.
type session struct {
	announcer *Announcer
	peer      Peer
	ctx       context.Context
	cancel    context.CancelFunc
	done      chan struct{}
	wake      loop.Signal // dirty is not empty
	returns   atomic.Bool // another process follows at once (Announcer.Restart)
	// hadSession reports that this process had a session with the peer before. The
	// goroutine of run owns it after start.
	hadSession bool

	mu      sync.Mutex
	dirty   map[netip.Prefix]struct{} // routes that may differ from what the router has
	current PeerStatus
	subcode uint8 // of the Cease when ctx is canceled
}

func newSession(a *Announcer, p Peer) *session {
	ctx, cancel := context.WithCancel(context.Background())
	return &session{announcer: a, peer: p, ctx: ctx, cancel: cancel,
		done: make(chan struct{}), wake: loop.NewSignal(), dirty: map[netip.Prefix]struct{}{},
		current: PeerStatus{Name: p.Name, Address: p.Address, State: idle, Since: time.Now()}}
}

// start runs the session once the ones before it have ended: a router takes one
// session from an address, and an earlier one may be with the same router.
func (s *session) start(before []*session) {
	go func() {
		defer close(s.done)
		for _, b := range before {
			if b.peer.Address == s.peer.Address {
				<-b.done
			}
		}
		s.run()
	}()
}

// stop ends the session with a Cease of this subcode. It does not wait.
func (s *session) stop(subcode uint8) {
	s.mu.Lock()
	s.subcode = subcode
	s.mu.Unlock()
	s.cancel()
}

func (s *session) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// mark remembers that the routes of prefixes have changed.
func (s *session) mark(prefixes []netip.Prefix) {
	s.mu.Lock()
	for _, p := range prefixes {
		s.dirty[p] = struct{}{}
	}
	s.mu.Unlock()
	s.wake.Set()
}

// takeDirty returns what was marked since it was last called.
func (s *session) takeDirty() map[netip.Prefix]struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.dirty
	s.dirty = map[netip.Prefix]struct{}{}
	return d
}

func (s *session) status() PeerStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// update changes the status by f and calls OnChange if a session began or ended, or
// the reason is new. It returns whether it did.
func (s *session) update(f func(*PeerStatus)) bool {
	s.mu.Lock()
	old := s.current
	f(&s.current)
	if s.current.State != old.State {
		s.current.Since = time.Now()
	}
	now := s.current
	s.mu.Unlock()
	news := old.Established() != now.Established() || now.Reason != old.Reason
	if news && s.announcer.options.OnChange != nil {
		s.announcer.options.OnChange(now)
	}
	return news
}

// enter puts a state on the way to a session into the status. Attempts after one that
// failed are not shown, lest the status change with each.
func (s *session) enter(state string) {
	s.update(func(p *PeerStatus) {
		if p.Reason == "" {
			p.State = state
		}
	})
}

// run keeps the session until stop is called.
func (s *session) run() {
	log := s.announcer.options.Log.With("peer", s.peer.String())
	retry := firstRetry
	for s.ctx.Err() == nil {
		began := time.Now()
		err := s.once()
		if s.ctx.Err() != nil {
			break
		}
		wasUp := s.status().Established()
		if wasUp && time.Since(began) > lastRetry {
			retry = firstRetry
		}
		wait := time.Duration((0.75 + 0.5*rand.Float64()) * float64(retry))
		retry = min(2*retry, lastRetry)
		news := s.update(func(p *PeerStatus) {
			if wasUp {
				p.Ended++
			}
			p.State, p.Reason, p.Prefixes = idle, err.Error(), 0
		})
		if news {
			log.Warn("no BGP session; retrying", "err", err, "in", wait.Round(time.Millisecond))
		}
		select {
		case <-s.ctx.Done():
		case <-time.After(wait):
		}
	}
	s.update(func(p *PeerStatus) { p.State, p.Prefixes = idle, 0 })
}

// once makes one connection and returns why it ended.
func (s *session) once() error {
	s.enter(connect)
	conn, err := s.dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	// A blocked handshake ends with the session. The loop of an established one sees
	// to that itself, since it has something to say first.
	release := context.AfterFunc(s.ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer release()
	t, err := s.handshake(conn)
	if err != nil {
		return explain(err, s.peer)
	}
	if !release() {
		return s.ctx.Err()
	}
	local, _ := netip.ParseAddrPort(conn.LocalAddr().String())
	t.hops = findNextHops(local.Addr().Unmap())
	c := &connection{session: s, conn: conn, terms: t, sent: map[netip.Prefix]string{}, over: make(chan struct{})}
	s.hadSession = true
	return explain(c.run(), s.peer)
}

func (s *session) dial() (net.Conn, error) {
	d := net.Dialer{
		Timeout:   dialTimeout,
		KeepAlive: -1, // the protocol has its own
		Control:   socket.DialOptions{Password: s.peer.Password, TTL: s.peer.ttl(), Interface: s.peer.Interface}.Control,
	}
	if s.peer.SourceAddress.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(s.peer.SourceAddress, 0))
	}
	to := s.peer.Address
	if to.Is6() && to.IsLinkLocalUnicast() && to.Zone() == "" {
		to = to.WithZone(s.peer.Interface)
	}
	conn, err := d.DialContext(s.ctx, "tcp", netip.AddrPortFrom(to, s.peer.Port).String())
	if err == nil {
		return conn, nil
	}
	var timeout net.Error
	err = withoutPorts(err)
	switch {
	case errors.As(err, &timeout) && timeout.Timeout() && s.peer.Password != "":
		return nil, fmt.Errorf("cannot connect: %w: it cannot be reached, does not know this node, or has another password", err)
	case errors.As(err, &timeout) && timeout.Timeout():
		return nil, fmt.Errorf("cannot connect: %w: it cannot be reached, or wants a password", err)
	case errors.Is(err, syscall.ECONNREFUSED) && isOwn(s.peer.Address):
		return nil, fmt.Errorf("cannot connect: %w: %s is an address of this node, and no BGP speaker listens there", err, s.peer.Address)
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("cannot connect: %w: no BGP speaker listens there, or it does not know this node as a neighbor", err)
	}
	return nil, fmt.Errorf("cannot connect: %w", err)
}

// withoutPorts returns the cause of a network error. The rest has the local port, which
// is another for each connection, and would make the same reason look like a new one.
func withoutPorts(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}

// explain adds to an error of a connection what it mostly means.
func explain(err error, p Peer) error {
	err = withoutPorts(err)
	var bad *wire.MessageError
	switch {
	case errors.As(err, &bad) && bad.TypeCode == wire.BGP_ERROR_OPEN_MESSAGE_ERROR && bad.SubTypeCode == wire.BGP_ERROR_SUB_BAD_PEER_AS:
		return fmt.Errorf("the router is not in AS %d: %w", p.PeerASN, err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("the router is silent: %w", err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return fmt.Errorf("the router closed the connection without a reason (%w); it may not know this node as a neighbor, or restart", err)
	}
	return err
}

// handshake exchanges OPEN messages and their confirmation.
func (s *session) handshake(conn net.Conn) (terms, error) {
	s.announcer.mu.Lock()
	routerID := s.announcer.routerID
	s.announcer.mu.Unlock()
	if err := conn.SetDeadline(time.Now().Add(openTimeout)); err != nil {
		return terms{}, err
	}
	if s.ctx.Err() != nil { // its deadline has just been overwritten
		return terms{}, s.ctx.Err()
	}
	m, err := open(s.peer, routerID, !s.hadSession)
	if err != nil {
		return terms{}, err
	}
	if err := write(conn, m); err != nil {
		return terms{}, err
	}
	s.enter(openSent)
	body, err := expect(conn, wire.BGP_MSG_OPEN, 1)
	if err != nil {
		return terms{}, err
	}
	t, err := agree(s.peer, routerID, body)
	if err != nil {
		return t, reject(conn, err)
	}
	if err := write(conn, wire.NewBGPKeepAliveMessage()); err != nil {
		return t, err
	}
	s.enter(openConfirm)
	_, err = expect(conn, wire.BGP_MSG_KEEPALIVE, 2)
	return t, err
}

// expect reads a message that must be of one kind; subcode is that of the error
// otherwise (RFC 6608).
func expect(conn net.Conn, kind, subcode uint8) ([]byte, error) {
	got, body, err := readMessage(conn)
	if err == nil && got != kind {
		err = wire.NewMessageError(wire.BGP_ERROR_FSM_ERROR, subcode, []byte{got}, fmt.Sprintf("message of type %d instead of %d", got, kind))
	}
	if err != nil {
		return nil, reject(conn, err)
	}
	return body, nil
}

// reject sends the router the notification that err stands for, if any, and returns
// err.
func reject(conn net.Conn, err error) error {
	var bad *wire.MessageError
	if errors.As(err, &bad) {
		_ = conn.SetWriteDeadline(time.Now().Add(lingerTime))
		_ = write(conn, wire.NewBGPNotificationMessage(bad.TypeCode, bad.SubTypeCode, bad.Data))
	}
	return err
}

// write sends messages with one system call.
func write(conn net.Conn, messages ...*wire.BGPMessage) error {
	var all []byte
	for _, m := range messages {
		b, err := m.Serialize()
		if err != nil {
			return err
		}
		all = append(all, b...)
	}
	_, err := conn.Write(all)
	return err
}
