package acme

import (
	"crypto/x509"
	"math/big"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/acme/nsupdate"
)

// A namespace has a name certified by DNS-01, which proves nothing about who serves it, only if no other namespace may serve it, nor
// with * any of the names that it covers.
func TestNamesOfZones(t *testing.T) {
	m := &Manager{o: Options{
		DNS: nsupdate.New([]nsupdate.Zone{{Name: "shop.example"}, {Name: "bank.example"}}, nsupdate.Key{}),
		Domains: []Domain{
			{Name: "shop.example", Namespaces: []string{"shop"}}, {Name: "www.shop.example", Namespaces: []string{"web"}},
			{Name: "both.shop.example", Namespaces: []string{"shop", "web"}}, {Name: "bank.example"},
			{Name: "nozone.example", Namespaces: []string{"shop"}}, {Name: "own.shop.example", Namespaces: []string{"shop", "shop"}},
		},
	}}
	for _, c := range []struct {
		namespace, host string
		dns, others     bool // whether it may
	}{
		{"shop", "a.shop.example", true, true},
		{"shop", "shop.example", true, true},
		{"shop", "*.a.shop.example", true, true},
		{"shop", "*.own.shop.example", true, true},
		{"shop", "*.shop.example", false, true}, // has www
		{"shop", "www.shop.example", false, true},
		{"shop", "x.www.shop.example", false, true},
		{"web", "www.shop.example", true, true},
		{"web", "*.www.shop.example", true, true},
		{"web", "a.shop.example", false, false},
		{"web", "both.shop.example", false, true},
		{"shop", "notshop.example", false, false},
		{"shop", "a.bank.example", false, true},
		{"shop", "a.nozone.example", false, true},
	} {
		for _, by := range []string{dialect.DNS01, dialect.HTTP01, ""} {
			want := c.others
			if by == dialect.DNS01 {
				want = c.dns
			}
			it := &item{Want: Want{Hosts: []string{c.host}, Challenge: by}}
			if why := m.refusal(it, c.namespace, c.host); (why == "") != want {
				t.Errorf("%s in namespace %s by %q: %q", c.host, c.namespace, by, why)
			}
		}
	}
	m.o.DNS = nil
	if m.refusal(&item{Want: Want{Challenge: dialect.DNS01}}, "shop", "a.shop.example") == "" {
		t.Error("without a zone")
	}
}

// A time in the window of a renewal is chosen once, and again if the window moves. A certificate has the ID that RFC 9773 gives as its
// example.
func TestWindows(t *testing.T) {
	start := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	chosen := map[time.Time]bool{}
	for range 50 {
		w := &window{id: "x"}
		if w.replaces() != "" {
			t.Error("replaces a certificate that the authority has not named")
		}
		w.choose(start, start.Add(day))
		at := w.at
		if chosen[at] = true; at.Before(start) || !at.Before(start.Add(day)) {
			t.Errorf("%v is not in the window", at)
		}
		if w.choose(start, start.Add(day)); w.at != at {
			t.Error("another time in the same window")
		}
		if w.choose(start.Add(-day), start); !w.at.Before(start) || w.replaces() != "x" {
			t.Errorf("the window has moved, and the time %v has not", w.at)
		}
	}
	if len(chosen) < 40 {
		t.Errorf("%d times by chance", len(chosen))
	}
	now := start
	for text, want := range map[string]time.Duration{
		"": askAgain, "120": 2 * time.Minute, "x": askAgain, "-5": askAgain, now.Add(time.Hour).Format(time.RFC1123): askAgain,
		now.Add(time.Hour).Format("Mon, 02 Jan 2006 15:04:05 GMT"): time.Hour,
	} {
		if got := readRetryAfter(text, now); got != want {
			t.Errorf("Retry-After %q: %v", text, got)
		}
	}
	key := []byte{0x69, 0x88, 0x5b, 0x6b, 0x87, 0x46, 0x40, 0x41, 0xe1, 0xb3, 0x7b, 0x84, 0x7b, 0xa0, 0xae, 0x2c, 0xde, 0x01, 0xc8, 0xd4}
	leaf := &x509.Certificate{AuthorityKeyId: key, SerialNumber: big.NewInt(0x87654321)}
	if got := certificateID(leaf); got != "aYhba4dGQEHhs3uEe6CuLN4ByNQ.AIdlQyE" {
		t.Errorf("the certificate's ID is %s", got)
	}
	if got := certificateID(&x509.Certificate{SerialNumber: big.NewInt(1)}); got != "" {
		t.Errorf("without the key of its authority: %s", got)
	}
}
