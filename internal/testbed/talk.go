package testbed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Answer is the answer of a server made by Serve: who it is, and from which
// address it sees the client come.
type Answer struct {
	Name   string
	Client netip.AddrPort
}

// Serve answers on a port of h, on all its addresses of both families, until
// the test ends: one line "NAME CLIENT" as soon as a TCP connection is there,
// then everything it is sent back again; the same line for each datagram.
func (h *Host) Serve(p svc.Protocol, port uint16) {
	h.net.t.Helper()
	h.ServeAs(h.name, p, netip.AddrPortFrom(netip.IPv6Unspecified(), port))
}

// ServeAs is Serve on one address (the unspecified IPv6 address is all of
// them), with a name other than the host's.
func (h *Host) ServeAs(name string, p svc.Protocol, at netip.AddrPort) {
	t := h.net.t
	t.Helper()
	switch p {
	case svc.TCP:
		l := h.ListenTCP(at)
		greetTCP(t, l, name)
	case svc.UDP:
		c := h.ListenUDP(at)
		serveUDP(t, c, name)
	case svc.SCTP:
		if !HasSCTP() {
			h.serveRawSCTP(name, at.Port())
			return
		}
		var l net.Listener
		var err error
		h.Do(func() { l, err = listenSCTP(at) })
		must(t, err, "%s", h.name)
		greetTCP(t, l, name)
	default:
		t.Fatalf("testbed: Serve cannot speak %s", p)
	}
}

// ListenTCP opens a listener on the host. The test closes it, or its end does.
func (h *Host) ListenTCP(at netip.AddrPort) net.Listener {
	t := h.net.t
	t.Helper()
	var l net.Listener
	var err error
	h.Do(func() { l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at)) })
	must(t, err, "%s: listen on TCP %s", h.name, at)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// ListenUDP opens a UDP socket on the host. The test closes it, or its end
// does.
func (h *Host) ListenUDP(at netip.AddrPort) *net.UDPConn {
	t := h.net.t
	t.Helper()
	var c *net.UDPConn
	var err error
	h.Do(func() { c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)) })
	must(t, err, "%s: listen on UDP %s", h.name, at)
	must(t, wantDestination(c), "%s: ask for destinations", h.name)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func greetTCP(t testing.TB, l net.Listener, name string) {
	Serve(t, l, func(c net.Conn) {
		_, _ = fmt.Fprintf(c, "%s %s\n", name, unmapped(c.RemoteAddr()))
		_, _ = io.Copy(c, c)
	})
}

// Serve has handle called with each connection of l, many at a time, until the test
// ends; it closes them and l.
func Serve(t testing.TB, l net.Listener, handle func(net.Conn)) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			mu.Unlock()
			wg.Go(func() {
				defer func() {
					mu.Lock()
					delete(open, c)
					mu.Unlock()
					_ = c.Close()
				}()
				handle(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for c := range open {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
}

func serveUDP(t testing.TB, c *net.UDPConn, name string) {
	var wg sync.WaitGroup
	wg.Go(func() {
		buf, oob := make([]byte, 2048), make([]byte, 256)
		for {
			_, n, _, from, err := c.ReadMsgUDPAddrPort(buf, oob)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // an ICMP error of an earlier answer
			}
			line := fmt.Appendf(nil, "%s %s\n", name, unmapped(net.UDPAddrFromAddrPort(from)))
			_, _, _ = c.WriteMsgUDPAddrPort(line, answerFrom(oob[:n]), from)
		}
	})
	t.Cleanup(func() {
		_ = c.Close()
		wg.Wait()
	})
}

// wantDestination makes the kernel add to each datagram the address that it was
// sent to; a host has several.
func wantDestination(c *net.UDPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		if set != nil {
			set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
	})
	return errors.Join(err, set)
}

// answerFrom turns the control message of a received datagram into the one
// with which the answer leaves from the address the question was sent to.
func answerFrom(oob []byte) []byte {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for _, m := range msgs {
		switch {
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO:
			return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: [16]byte(m.Data)})
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO:
			return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte(m.Data[4:])})
		}
	}
	return nil
}

func unmapped(a net.Addr) netip.AddrPort {
	ap := netip.MustParseAddrPort(a.String())
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// answerTime is how long an answer may take where a test gives no deadline.
const answerTime = 30 * time.Second

// Dial opens a connection from the host. Its deadline is ctx's, or in 30 s
// without one.
func (h *Host) Dial(ctx context.Context, p svc.Protocol, to netip.AddrPort) (net.Conn, error) {
	return h.DialFrom(ctx, p, netip.AddrPort{}, to)
}

// DialFrom is Dial from a given address and port of the host; an invalid or
// unspecified one leaves the choice to the kernel.
func (h *Host) DialFrom(ctx context.Context, p svc.Protocol, from, to netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	network := strings.ToLower(p.String())
	if from.IsValid() {
		if p == svc.UDP {
			d.LocalAddr = net.UDPAddrFromAddrPort(from)
		} else {
			d.LocalAddr = net.TCPAddrFromAddrPort(from)
		}
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(answerTime)
	}
	d.Deadline = deadline
	var c net.Conn
	var err error
	gone := h.ns.enter(func() {
		if p == svc.SCTP {
			ctx, cancel := context.WithDeadline(ctx, deadline)
			defer cancel()
			c, err = dialSCTP(ctx, from, to)
			return
		}
		c, err = d.DialContext(ctx, network, to.String())
	})
	if err = errors.Join(gone, err); err != nil {
		return nil, err
	}
	return c, c.SetDeadline(deadline)
}

// Ask opens one connection to a server made by Serve and returns its answer.
// It waits until ctx's deadline, 30 s without one.
func (h *Host) Ask(ctx context.Context, p svc.Protocol, to netip.AddrPort) (Answer, error) {
	return h.AskFrom(ctx, p, netip.AddrPort{}, to)
}

// AskFrom is Ask from a given address and port of the host.
func (h *Host) AskFrom(ctx context.Context, p svc.Protocol, from, to netip.AddrPort) (Answer, error) {
	if p == svc.SCTP && !HasSCTP() {
		return h.askRawSCTP(ctx, to)
	}
	c, err := h.DialFrom(ctx, p, from, to)
	if err != nil {
		return Answer{}, err
	}
	defer func() { _ = c.Close() }()
	return AskOn(c)
}

// AskOn reads one answer from an open connection: on UDP it sends a question
// first, on TCP it reads the greeting, so only once per connection.
func AskOn(c net.Conn) (Answer, error) {
	if _, udp := c.(*net.UDPConn); udp {
		if _, err := c.Write([]byte("?\n")); err != nil && !ownRefusal(err) {
			return Answer{}, err
		}
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return Answer{}, err
	}
	return parseAnswer(line)
}

// ownRefusal reports whether err is what a write gets if this host's own rules
// refuse its packet. The refusal itself comes with the next read.
func ownRefusal(err error) bool { return errors.Is(err, syscall.EPERM) }

func parseAnswer(line string) (Answer, error) {
	name, client, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	at, err := netip.ParseAddrPort(client)
	if err != nil {
		return Answer{}, fmt.Errorf("answer %q: %w", line, err)
	}
	return Answer{Name: name, Client: at}, nil
}

// Refused reports whether err is the answer of a host or a firewall that rejects,
// rather than of silence.
func Refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// Silent reports whether err is the lack of any answer.
func Silent(err error) bool {
	var ne net.Error
	return errors.Is(err, context.DeadlineExceeded) || (errors.As(err, &ne) && ne.Timeout())
}
