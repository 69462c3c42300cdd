package node

import (
	"errors"
	"log/slog"
	"net/url"
	"testing"

	"github.com/fairlead/fairlead/internal/runner/api"
)

// A node makes one trace at a time, and few wait for it.
func TestTracesWait(t *testing.T) {
	tr := newTracing("n1", nil, slog.New(slog.DiscardHandler))
	for range maxTraces {
		tr.slots <- struct{}{}
	}
	_, err := tr.trace(t.Context(), api.Sender{}, url.Values{"address": {"10.96.0.1:80"}})
	var busy api.Busy
	if !errors.As(err, &busy) {
		t.Errorf("one trace too many: %v", err)
	}
	if len(tr.slots) != maxTraces {
		t.Errorf("%d traces are counted, want %d", len(tr.slots), maxTraces)
	}
}

func TestPacketToTrace(t *testing.T) {
	tr := newTracing("n1", nil, slog.New(slog.DiscardHandler))
	for query, ok := range map[string]bool{
		"address=10.96.0.1:80": true, "address=[fd00::1]:80": true, "address=10.96.0.1:80&protocol=UDP": true, "address=127.0.0.1:80": true,
		"": false, "address=web:80": false, "address=10.96.0.1": false, "address=10.96.0.1:0": false, "address=10.96.0.1:80&protocol=SCTP": false,
		"address=10.96.0.1:80&protocol=x": false, "address=224.0.0.5:80": false, "address=[ff02::1]:80": false, "address=0.0.0.0:80": false,
		"address=[::]:80": false, "address=255.255.255.255:80": false, "address=[fe80::1%25lo]:80": false,
	} {
		v, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		_, err = tr.packet(api.Sender{}, v)
		var bad api.BadQuery
		if (err == nil) != ok || err != nil && !errors.As(err, &bad) {
			t.Errorf("%s: %v", query, err)
		}
	}
	p, err := tr.packet(api.Sender{Pod: "default/web", Netns: "/proc/1/ns/net"}, url.Values{"address": {"[::ffff:10.96.0.1]:80"}})
	if err != nil || len(p.Spaces) != 2 || p.Spaces[0].Path == "" || p.Spaces[1].Name != "node n1" || p.To.String() != "10.96.0.1:80" {
		t.Errorf("%+v, %v", p, err)
	}
}
