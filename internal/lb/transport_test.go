package lb

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"reflect"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/quorum"
)

func TestTransportRejects(t *testing.T) {
	key := bytes.Repeat([]byte{7}, KeyBytes)
	mac := hmac.New(sha256.New, key)
	message := &quorum.Message{Kind: quorum.Request, Nonce: 9, Attrs: "x"}
	good := seal(mac, "a", "b", message)
	r, err := open(mac, "b", good)
	if err != nil || r.from != "a" || !reflect.DeepEqual(r.message, message) {
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
	other := hmac.New(sha256.New, bytes.Repeat([]byte{8}, KeyBytes))
	if _, err := open(other, "b", good); !errors.Is(err, errMAC) {
		t.Errorf("a message with another key: %v", err)
	}
	// Whoever has the key may be broken, but breaks nobody else.
	for n := range 80 {
		mac.Reset()
		body := bytes.Repeat([]byte{1}, n)
		mac.Write(body)
		if r, err := open(mac, "b", mac.Sum(body)); err == nil {
			t.Errorf("%d ones were read as %+v", n, r)
		}
	}
}
