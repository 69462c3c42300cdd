package bgp

import (
	"bytes"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// testConnection returns an established session that announces one address, and the
// router's end of it.
func testConnection(t *testing.T) (*connection, net.Conn) {
	t.Helper()
	a := New(Options{Log: slog.New(slog.DiscardHandler), NodeName: "n"})
	a.Announce(netip.MustParseAddr("192.0.2.1"), Attributes{})
	ours, theirs := net.Pipe()
	t.Cleanup(func() { _ = theirs.Close() })
	p := Peer{LocalASN: 64512, PeerASN: 64513}
	return &connection{session: newSession(a, p), conn: ours, sent: map[netip.Prefix]string{}, over: make(chan struct{}),
		terms: terms{peer: p, hold: 90 * time.Second, keep: 30 * time.Second,
			family: map[wire.Family]bool{wire.RF_IPv4_UC: true}, hops: nextHops{v4: netip.MustParseAddr("198.51.100.1")}}}, theirs
}

// A router that asks for all routes without pause gets them once a second.
func TestRefreshWithoutPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, router := testConnection(t)
		done := make(chan error, 1)
		go func() { done <- c.run() }()
		var updates atomic.Int32
		go func() {
			for {
				kind, _, err := readMessage(router)
				if err != nil {
					return
				}
				if kind == wire.BGP_MSG_UPDATE {
					updates.Add(1)
				}
			}
		}()
		synctest.Wait()
		first := updates.Load()
		ask := binary.BigEndian.AppendUint16(nil, wire.AFI_IP)
		ask = append(ask, 0, wire.SAFI_UNICAST)
		head := make([]byte, 16, 23)
		for i := range head {
			head[i] = 0xff
		}
		message := append(append(head, 0, 23, wire.BGP_MSG_ROUTE_REFRESH), ask...)
		for range 100 {
			if _, err := router.Write(message); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(10 * refreshPeriod) // of the bubble's clock
		synctest.Wait()
		if n := updates.Load() - first; first != 1 || n < 1 || n > 2 {
			t.Errorf("%d updates at first, %d after 100 requests at once", first, n)
		}
		c.session.cancel()
		<-done
	})
}

// A session ends soon although its router reads nothing.
func TestGoodbyeToADeafRouter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := testConnection(t)
		done := make(chan error, 1)
		go func() { done <- c.run() }()
		synctest.Wait() // it has begun to write
		began := time.Now()
		c.session.cancel()
		<-done
		if took := time.Since(began); took > 3*lingerTime {
			t.Errorf("it took %s", took)
		}
	})
}

// Before a restart, a router that keeps routes gets the withdrawals of those that have just ended. The end of the session does not wait
// for the reader of its messages.
func TestGoodbyeBeforeARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, router := testConnection(t)
		gone := netip.MustParsePrefix("192.0.2.1/32")
		c.sent[gone] = ""
		c.terms.restarts = true
		c.session.returns.Store(true)
		c.session.mark(c.session.announcer.table.withdraw(gone.Addr()))
		c.session.cancel()
		incoming, told := make(chan ending, 1), make(chan uint8, 1)
		incoming <- ending{}
		go func() {
			kind, _, _ := readMessage(router)
			told <- kind
		}()
		_ = c.goodbye(incoming)
		_ = c.conn.Close()
		if kind := <-told; kind != wire.BGP_MSG_UPDATE || len(c.sent) > 0 {
			t.Errorf("message of type %d, and the router has %v", kind, c.sent)
		}
	})
}

// No OPEN ends the process, whatever is in it.
func FuzzAgree(f *testing.F) {
	p := Peer{LocalASN: 64512, PeerASN: 64513, HoldTime: DefaultHoldTime, GracefulRestart: true, RestartTime: time.Minute}
	id := netip.MustParseAddr("192.0.2.1")
	m, err := open(Peer{LocalASN: 64513, PeerASN: 64512, HoldTime: DefaultHoldTime, GracefulRestart: true, RestartTime: time.Minute},
		netip.MustParseAddr("192.0.2.2"), true)
	if err != nil {
		f.Fatal(err)
	}
	body, err := m.Body.Serialize()
	if err != nil {
		f.Fatal(err)
	}
	if _, err := agree(p, id, body); err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	for i := range body {
		f.Add(body[:i])
	}
	f.Fuzz(func(_ *testing.T, body []byte) { _, _ = agree(p, id, body) })
}

// What a router sends, in any pieces, ends the session with an error or is a message of a
// length that RFC 4271 allows; nothing is read beyond it, and nothing ends the process.
func FuzzReadMessage(f *testing.F) {
	keepalive, err := wire.NewBGPKeepAliveMessage().Serialize()
	if err != nil {
		f.Fatal(err)
	}
	goodbye, err := cease(wire.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN).Serialize()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(keepalive)
	f.Add(goodbye)
	for _, length := range [][2]byte{{0, 0}, {0, 18}, {0, 20}, {16, 0}, {16, 1}, {0xff, 0xff}} {
		m := bytes.Clone(keepalive)
		copy(m[16:], length[:])
		f.Add(append(m, make([]byte, 4096)...))
	}
	for _, text := range []string{"", "\x00", "\x04work", "\xffwork", "\x02\xff\xff"} {
		m := append(bytes.Clone(goodbye[:21]), text...)
		binary.BigEndian.PutUint16(m[16:], uint16(len(m)))
		f.Add(m)
	}
	f.Add(append(bytes.Clone(keepalive), goodbye...))
	f.Fuzz(func(t *testing.T, stream []byte) {
		r := bytes.NewReader(stream)
		for left := r.Len(); ; left = r.Len() {
			kind, body, err := readMessage(iotest.OneByteReader(r))
			if err != nil {
				if err.Error() == "" {
					t.Error("an error without a text")
				}
				return
			}
			length := wire.BGP_HEADER_LENGTH + len(body)
			if length > wire.BGP_MAX_MESSAGE_LENGTH || left-r.Len() != length {
				t.Fatalf("message of type %d: %d bytes, of which %d were read", kind, length, left-r.Len())
			}
		}
	})
}

// Whatever a router sends in an established session, the session ends or goes on; only
// whole messages ask for routes.
func FuzzSession(f *testing.F) {
	head := bytes.Repeat([]byte{0xff}, 16)
	message := func(kind uint8, body ...byte) []byte {
		m := binary.BigEndian.AppendUint16(bytes.Clone(head), uint16(19+len(body)))
		return append(append(m, kind), body...)
	}
	f.Add(message(wire.BGP_MSG_KEEPALIVE))
	f.Add(message(wire.BGP_MSG_ROUTE_REFRESH, 0, 1, 0, 1))
	f.Add(message(wire.BGP_MSG_ROUTE_REFRESH, 0, 1, 1, 1))
	f.Add(message(wire.BGP_MSG_ROUTE_REFRESH, 0, 1, 0))
	f.Add(message(wire.BGP_MSG_ROUTE_REFRESH))
	f.Add(message(wire.BGP_MSG_UPDATE, 0xff, 0xff, 0xff))
	f.Add(message(wire.BGP_MSG_OPEN))
	f.Add(message(200))
	f.Fuzz(func(t *testing.T, stream []byte) {
		ours, theirs := net.Pipe()
		go func() {
			_, _ = theirs.Write(stream)
			_ = theirs.Close()
		}()
		c := &connection{conn: ours, over: make(chan struct{})}
		refresh := make(chan wire.Family, len(stream)/19+1)
		err := c.read(refresh)
		_ = ours.Close()
		if err == nil || len(refresh) > len(stream)/23 {
			t.Errorf("%v with %d requests for routes", err, len(refresh))
		}
	})
}
