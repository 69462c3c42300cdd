package bgp_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"go.uber.org/goleak"

	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestParsePeer(t *testing.T) {
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr
	const as = ",peer-asn=64512,local-asn=64513"
	for _, c := range []struct {
		flag, fails string
		want        bgp.Peer
	}{
		{flag: "192.0.2.1" + as, want: bgp.Peer{Name: "192.0.2.1", Address: addr("192.0.2.1"), PeerASN: 64512, LocalASN: 64513}},
		{flag: "192.0.2.1:1179,peer-asn=4294967295,local-asn=4294967295,hold-time=9s,keepalive-time=2s,password-file=" + password,
			want: bgp.Peer{Name: "192.0.2.1", Address: addr("192.0.2.1"), Port: 1179, PeerASN: 4294967295, LocalASN: 4294967295,
				HoldTime: 9 * time.Second, KeepaliveTime: 2 * time.Second, Password: "s3cret"}},
		{flag: "[2001:db8::1]:179" + as + ",name=rack1,graceful-restart,multihop=3,source-address=2001:db8::2,interface=eth1",
			want: bgp.Peer{Name: "rack1", Address: addr("2001:db8::1"), Port: 179, PeerASN: 64512, LocalASN: 64513, GracefulRestart: true,
				MultihopTTL: 3, SourceAddress: addr("2001:db8::2"), Interface: "eth1"}},
		{flag: "fe80::1%eth0" + as + ",graceful-restart=30s",
			want: bgp.Peer{Name: "fe80::1%eth0", Address: addr("fe80::1%eth0"), PeerASN: 64512, LocalASN: 64513, GracefulRestart: true,
				RestartTime: 30 * time.Second}},
		{flag: "router" + as, fails: "want ADDRESS or ADDRESS:PORT"},
		{flag: "", fails: "want ADDRESS"},
		{flag: "0.0.0.0" + as, fails: "not that of a router"},
		{flag: "224.0.0.1" + as, fails: "not that of a router"},
		{flag: "::ffff:192.0.2.1" + as, fails: "not that of a router"},
		{flag: "fe80::1" + as, fails: "link-local"},
		{flag: "192.0.2.1", fails: "AS number is missing"},
		{flag: "192.0.2.1,peer-asn=1", fails: "local AS number is missing"},
		{flag: "192.0.2.1,peer-asn=4294967296,local-asn=1", fails: "value out of range"},
		{flag: "192.0.2.1,peer-asn=-1,local-asn=1", fails: "invalid syntax"},
		{flag: "192.0.2.1" + as + ",hold-time=2s", fails: "hold time 2s is not between 3s"},
		{flag: "192.0.2.1" + as + ",hold-time=3s,keepalive-time=3s", fails: "not below the hold time"},
		{flag: "192.0.2.1" + as + ",multihop=256", fails: "between 1 and 255"},
		{flag: "192.0.2.1,peer-asn=1,local-asn=1,multihop=2", fails: "another AS"},
		{flag: "192.0.2.1" + as + ",source-address=2001:db8::1", fails: "different families"},
		{flag: "192.0.2.1" + as + ",graceful-restart=2h", fails: "restart time"},
		{flag: "192.0.2.1" + as + ",password-file=/nonexistent", fails: "no such file"},
		{flag: "192.0.2.1" + as + ",password-file=" + empty, fails: "is empty"},
		{flag: "192.0.2.1" + as + ",bfd=1ms", fails: "the BFD transmit interval 1ms is not between 10ms and 1m0s"},
		{flag: "192.0.2.1" + as + ",bfd-multiplier=3", fails: "give bfd before it"},
		{flag: "192.0.2.1" + as + ",bfd,bfd-multiplier=1", fails: "multiplier 1 is not between 2 and 255"},
		{flag: "192.0.2.1" + as + ",colour=red", fails: "unknown option"},
	} {
		got, err := bgp.ParsePeer(c.flag)
		switch {
		case c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)):
			t.Errorf("%q: %v, want %q", c.flag, err, c.fails)
		case c.fails == "" && (err != nil || got != c.want):
			t.Errorf("%q: %+v, want %+v: %v", c.flag, got, c.want, err)
		}
	}
}

func TestParseCommunity(t *testing.T) {
	for text, want := range map[string]string{
		"64512:100": "64512:100", "0:65535": "0:65535", "1:2:4294967295": "1:2:4294967295", "no-export": "65535:65281",
		"no-advertise": "65535:65282", "no-export-subconfed": "65535:65283", "blackhole": "65535:666",
		"": "", "100": "", "65536:1": "", "1:-1": "", "1:2:4294967296": "", "1:2:3:4": "", "1:": "", "export": "", "1:a": "",
	} {
		c, err := bgp.ParseCommunity(text)
		if want == "" {
			if err == nil || !strings.Contains(err.Error(), "64512:100") {
				t.Errorf("%q: %v, %v, want an error that says what it wants", text, c, err)
			}
		} else if err != nil || c.String() != want {
			t.Errorf("%q: %s, want %s: %v", text, c, want, err)
		}
	}
}

// router is the other end of a session, as a test writes it: it answers a connection
// with serve.
func router(t *testing.T, serve func(net.Conn)) bgp.Peer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(testbed.Patience))
			serve(c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	at := netip.MustParseAddrPort(l.Addr().String())
	return bgp.Peer{Name: "fake", Address: at.Addr(), Port: at.Port(), LocalASN: 64513, PeerASN: 64512}
}

// openOf is the OPEN message of a router of an AS.
func openOf(as uint32, hold uint16, capabilities ...wire.ParameterCapabilityInterface) []byte {
	m, _ := wire.NewBGPOpenMessage(uint16(as), hold, netip.MustParseAddr("192.0.2.1"),
		[]wire.OptionParameterInterface{wire.NewOptionParameterCapability(capabilities)})
	b, _ := m.Serialize()
	return b
}

func serialized(m *wire.BGPMessage) []byte {
	b, _ := m.Serialize()
	return b
}

// read reads one message.
func read(c net.Conn) (*wire.BGPMessage, error) {
	head := make([]byte, wire.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(c, head); err != nil {
		return nil, err
	}
	var h wire.BGPHeader
	if err := h.DecodeFromBytes(head); err != nil {
		return nil, err
	}
	body := make([]byte, int(h.Len)-len(head))
	if _, err := io.ReadFull(c, body); err != nil {
		return nil, err
	}
	return wire.ParseBGPBody(&h, body)
}

// Routers that do not do what they should: the status says what is wrong, and
// nothing else happens.
func TestBadRouters(t *testing.T) {
	four := wire.NewCapFourOctetASNumber(64512)
	keepalive := serialized(wire.NewBGPKeepAliveMessage())
	says := func(messages ...[]byte) func(net.Conn) {
		return func(c net.Conn) {
			for _, m := range messages {
				if _, err := read(c); err != nil {
					return
				}
				_, _ = c.Write(m)
			}
			_, _ = io.Copy(io.Discard, c)
		}
	}
	long := bytes.Clone(keepalive)
	long[16], long[17] = 0x20, 0
	unmarked := bytes.Clone(keepalive)
	unmarked[3] = 0
	for _, c := range []struct {
		what, reason string
		serve        func(net.Conn)
		peer         func(*bgp.Peer)
	}{
		{what: "closes at once", serve: func(net.Conn) {}, reason: "closed the connection without a reason"},
		{what: "speaks HTTP", serve: says([]byte("HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n")), reason: "marker is not all ones"},
		{what: "another AS", serve: says(openOf(64999, 90, wire.NewCapFourOctetASNumber(64999))), reason: "the router is not in AS 64512"},
		{what: "no wide AS numbers", serve: says(openOf(64512, 90)), reason: "no four-octet AS numbers"},
		{what: "hold time of 1 s", serve: says(openOf(64512, 1, four)), reason: "unacceptable hold time 1"},
		{what: "rejects", serve: says(serialized(wire.NewBGPNotificationMessage(wire.BGP_ERROR_CEASE,
			wire.BGP_ERROR_SUB_CONNECTION_REJECTED, nil))),
			reason: "it may not know this node as a neighbor"},
		{what: "is shut down", serve: says(serialized(wire.NewBGPNotificationMessage(wire.BGP_ERROR_CEASE,
			wire.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, []byte("\x04work")))), reason: `"work"`},
		{what: "wrong text", serve: says(serialized(wire.NewBGPNotificationMessage(wire.BGP_ERROR_CEASE,
			wire.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, []byte("\xffwork")))), reason: "administrative shutdown"},
		{what: "two OPENs", serve: says(openOf(64512, 90, four), openOf(64512, 90, four)), reason: "message of type 1 instead of 4"},
		{what: "too long a message", serve: says(openOf(64512, 90, four), keepalive, long), reason: "message of 8192 bytes"},
		{what: "no marker", serve: says(openOf(64512, 90, four), keepalive, unmarked), reason: "marker is not all ones"},
		{what: "OPEN in a session", serve: says(openOf(64512, 90, four), keepalive, openOf(64512, 90, four)), reason: "message of type 1"},
		{what: "own address", serve: func(net.Conn) {}, peer: func(p *bgp.Peer) { p.Port = 1 }, reason: "127.0.0.1 is an address of this node"},
	} {
		t.Run(c.what, func(t *testing.T) {
			p := router(t, c.serve)
			if c.peer != nil {
				c.peer(&p)
			}
			status := make(chan bgp.PeerStatus, 64)
			a := bgp.New(bgp.Options{Log: slog.New(slog.DiscardHandler), NodeName: "n", OnChange: func(s bgp.PeerStatus) {
				select {
				case status <- s:
				default:
				}
			}})
			a.Announce(vip4, bgp.Attributes{})
			a.SetPeers([]bgp.Peer{p})
			defer a.Close(context.Background())
			timeout := time.After(testbed.Patience)
			for {
				select {
				case s := <-status:
					if s.Reason == "" {
						continue
					}
					if !strings.Contains(s.Reason, c.reason) {
						t.Errorf("%q, want %q", s.Reason, c.reason)
					}
					if strings.Contains(s.Reason, fmt.Sprint(p.Port)) && p.Port > 1000 {
						t.Errorf("%q has a port, and would change", s.Reason)
					}
				case <-timeout:
					t.Fatalf("no status; want %q", c.reason)
				}
				return
			}
		})
	}
}

// A router without IPv6, on an interface without IPv6: the status says that IPv6
// routes are missing, and the others are announced.
func TestRoutesThatCannotBeAnnounced(t *testing.T) {
	serve := func(capabilities ...wire.ParameterCapabilityInterface) func(net.Conn, chan<- *wire.BGPUpdate) {
		return func(c net.Conn, updates chan<- *wire.BGPUpdate) {
			if _, err := read(c); err != nil {
				return
			}
			_, _ = c.Write(openOf(64512, 90, append(capabilities, wire.NewCapFourOctetASNumber(64512))...))
			_, _ = c.Write(serialized(wire.NewBGPKeepAliveMessage()))
			for {
				m, err := read(c)
				if err != nil || m.Header.Type == wire.BGP_MSG_NOTIFICATION {
					return
				}
				if m.Header.Type == wire.BGP_MSG_UPDATE {
					updates <- m.Body.(*wire.BGPUpdate)
				}
			}
		}
	}
	for want, serve := range map[string]func(net.Conn, chan<- *wire.BGPUpdate){
		"IPv6 routes are not announced: the router does not take the family": serve(),
		"IPv6 routes are not announced: interface lo has no IPv6 address": serve(
			wire.NewCapMultiProtocol(wire.RF_IPv4_UC), wire.NewCapMultiProtocol(wire.RF_IPv6_UC)),
	} {
		updates := make(chan *wire.BGPUpdate, 64)
		a := bgp.New(bgp.Options{Log: slog.New(slog.DiscardHandler), NodeName: "n"})
		a.Announce(vip4, bgp.Attributes{})
		a.Announce(vip6, bgp.Attributes{})
		a.SetPeers([]bgp.Peer{router(t, func(c net.Conn) { serve(c, updates) })})
		testbed.Until(t, want, func() error {
			s := a.Peers()[0]
			if !s.Established() || s.Prefixes != 1 || !strings.Contains(s.Reason, want) {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		m := <-updates
		if len(m.NLRI) != 1 || m.NLRI[0].NLRI.String() != route4 {
			t.Errorf("announced %v, want %s", m.NLRI, route4)
		}
		a.Close(context.Background())
	}
}

// A router that takes nothing from its socket does not hold Close up, nor does one
// that cannot be reached or never answers; and nothing is left behind.
func TestCloseIsBounded(t *testing.T) {
	release := make(chan struct{})
	mute := router(t, func(c net.Conn) { <-release })
	deaf := router(t, func(c net.Conn) {
		_, _ = c.Write(openOf(64512, 0, wire.NewCapFourOctetASNumber(64512)))
		_, _ = c.Write(serialized(wire.NewBGPKeepAliveMessage()))
		<-release
	})
	mute.Name, deaf.Name = "mute", "deaf"
	before := goleak.IgnoreCurrent()
	unreachable := bgp.Peer{Name: "unreachable", Address: netip.MustParseAddr("192.0.2.1"), LocalASN: 1, PeerASN: 2}
	a := bgp.New(bgp.Options{Log: slog.New(slog.DiscardHandler), NodeName: "n"})
	a.Announce(vip4, bgp.Attributes{})
	a.SetPeers([]bgp.Peer{mute, deaf, unreachable})
	testbed.Until(t, "a session", func() error {
		if s := a.Peers()[0]; !s.Established() {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	began := time.Now()
	a.Close(context.Background())
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("Close took %s", took)
	}
	if p := a.Peers(); len(p) != 0 {
		t.Errorf("%v after Close", p)
	}
	a.SetPeers([]bgp.Peer{deaf}) // does nothing
	if p := a.Peers(); len(p) != 0 {
		t.Errorf("%v after Close and SetPeers", p)
	}
	goleak.VerifyNone(t, before)
	close(release)
}
