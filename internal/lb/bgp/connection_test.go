package bgp

import (
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
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
