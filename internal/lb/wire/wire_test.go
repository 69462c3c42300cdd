package wire

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
)

func TestTransportRejects(t *testing.T) {
	key := bytes.Repeat([]byte{7}, claim.KeyBytes)
	mac := hmac.New(sha256.New, key)
	message := &quorum.Message{Kind: quorum.Request, Nonce: 9, Attrs: "x"}
	good := seal(mac, "a", "b", message)
	r, err := open(mac, "b", good)
	if err != nil || r.From != "a" || !reflect.DeepEqual(r.Message, message) {
		t.Fatalf("%+v, %v", r, err)
	}
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1
		if _, err := open(mac, "b", bad); !errors.Is(err, errMAC) {
			t.Fatalf("byte %d altered: %v, want %v", i, err, errMAC)
		}
	}
	for n := range good {
		if _, err := open(mac, "b", good[:n]); err == nil {
			t.Fatalf("%d of %d bytes are accepted", n, len(good))
		}
	}
	if _, err := open(mac, "c", good); !errors.Is(err, errTo) {
		t.Errorf("a message for another speaker: %v", err)
	}
	if _, err := open(mac, "a", seal(mac, "a", "a", message)); !errors.Is(err, errTo) {
		t.Errorf("a message in the speaker's own name: %v", err)
	}
	other := hmac.New(sha256.New, bytes.Repeat([]byte{8}, claim.KeyBytes))
	if _, err := open(other, "b", good); !errors.Is(err, errMAC) {
		t.Errorf("a message with another key: %v", err)
	}
	// Whoever has the key may be broken, but breaks no other.
	for n := range 80 {
		mac.Reset()
		body := bytes.Repeat([]byte{1}, n)
		mac.Write(body)
		if r, err := open(mac, "b", mac.Sum(body)); err == nil {
			t.Errorf("%d ones were read as %+v", n, r)
		}
	}
}

// A datagram that another machine sends again does not make the messages for a speaker go there.
func TestReplayRedirectsNothing(t *testing.T) {
	node := quorum.NewNode("b", 0, rand.Uint64)
	node.SetList(0, quorum.List{Version: 1, Voters: []quorum.Voter{{Name: "b", Address: "127.0.0.1:1"}}})
	now := 2 * quorum.Promise
	wire := &Conn{peers: map[string]netip.AddrPort{}}
	true1, true2 := netip.MustParseAddrPort("192.0.2.1:10262"), netip.MustParseAddrPort("192.0.2.2:10262")
	thief := netip.MustParseAddrPort("192.0.2.66:10262")
	// handle returns the answer and where it goes.
	handle := func(source netip.AddrPort, m quorum.Message) (answer *quorum.Message, to netip.AddrPort) {
		m.Kind, m.ListVersion = quorum.Request, 1
		r := &Received{From: "a", Source: source, Message: &m}
		node.Receive(now, r.From, r.Message)
		for _, e := range node.Take() {
			if e.Message.Kind == quorum.Reply {
				answer, to = e.Message, wire.address(&e, r)
			}
		}
		return answer, to
	}
	notice := func() netip.AddrPort {
		return wire.address(&quorum.Envelope{To: "a", Message: &quorum.Message{Kind: quorum.Notice}}, nil)
	}
	offer, to := handle(true1, quorum.Message{Nonce: 1})
	if offer == nil || offer.Offer == 0 || to != true1 {
		t.Fatalf("%+v to %s", offer, to)
	}
	second := quorum.Message{Nonce: 2, Session: offer.Offer, Attrs: "x"}
	if answer, to := handle(true1, second); answer == nil || !answer.Promised || to != true1 || notice() != true1 {
		t.Fatalf("%+v to %s, notices to %s", answer, to, notice())
	}
	for _, m := range []quorum.Message{second, {Nonce: 1}} {
		if _, to := handle(thief, m); to == true1 {
			t.Errorf("the request %d of another source is answered to %s", m.Nonce, to)
		}
		if notice() != true1 {
			t.Fatalf("after request %d was sent again, notices go to %s", m.Nonce, notice())
		}
	}
	if _, to := handle(true2, quorum.Message{Nonce: 3, Session: offer.Offer, Attrs: "x"}); to != true2 || notice() != true2 {
		t.Errorf("after the speaker's address has changed: answer to %s, notices to %s", to, notice())
	}
}
