package nsupdate

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed/nszone"
)

const keyText = nszone.KeyFile

// Records are added beside others, awaited at all servers of the zone, and removed without the others. A server with another key,
// or of a zone that is not ours, is reported.
func TestUpdates(t *testing.T) {
	t.Parallel()
	key, err := ParseKey(keyText)
	if err != nil {
		t.Fatal(err)
	}
	start := func(secret string) *nszone.Server { return nszone.Start(t, "shop.example", secret, nil) }
	first, second := start(key.secret), start(key.secret)
	other := start("YW5vdGhlciBrZXkgb2YgMTYgYnl0ZXM=")
	zone, err := ParseZone("Shop.Example.=" + first.Addr + "," + second.Addr)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := ParseZone("bank.example=" + other.Addr)
	if err != nil {
		t.Fatal(err)
	}
	u := New([]Zone{{Name: "example", Servers: []string{other.Addr}}, zone, foreign}, key)
	const name = "_acme-challenge.shop.example"
	ctx := t.Context()
	for _, value := range []string{"one", "two", "one"} {
		if err := u.Add(ctx, name, value); err != nil {
			t.Fatal(err)
		}
	}
	if got, _ := first.Records(); got != name+" two, "+name+" one" {
		t.Errorf("the server has %q", got)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	missing := "server " + second.Addr + " of zone shop.example does not"
	if err := u.Await(short, name, "one"); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("a server of the zone does not have the record: %v", err)
	}
	cancel()
	second.Put(name + " one")
	if err := u.Await(ctx, name, "one"); err != nil {
		t.Error(err)
	}
	err = u.Remove(ctx, name, "one")
	if got, _ := first.Records(); err != nil || got != name+" two" {
		t.Errorf("removed: %v, the server has %q", err, got)
	}
	err = u.Add(ctx, "www.bank.example", "x")
	if got, n := other.Records(); err == nil || n > 0 || got != "" {
		t.Errorf("an update with another key: %v, %q", err, got)
	}
	if err := u.Add(ctx, "www.test", "x"); err == nil || u.Has("www.test") || !u.Has("a.shop.example") || u.Has("notshop.exampl") {
		t.Errorf("no zone of ours: %v", err)
	}
	if (*Updater)(nil).Has("shop.example") {
		t.Error("no zones have a name")
	}
}

// Keys and zones that cannot be used are rejected, without their secrets.
func TestWrongKeysAndZones(t *testing.T) {
	for _, text := range []string{
		"", "MDEyMzQ1Njc4OWFiY2RlZj4/", strings.Replace(keyText, "hmac-sha256", "hmac-md5", 1),
		strings.Replace(keyText, "MDEyMzQ1Njc4OWFiY2RlZj4/", "MDEyMzQ1", 1), strings.Replace(keyText, "secret", "#secret2", 1),
	} {
		if _, err := ParseKey(text); err == nil || strings.Contains(err.Error(), "MDEy") {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, text := range []string{"", "shop.example", "=127.0.0.1", "*.shop.example=127.0.0.1", "shop.example=127.0.0.1,,"} {
		if z, err := ParseZone(text); err == nil {
			t.Errorf("%q: %+v", text, z)
		}
	}
	z, err := ParseZone("a.example=::1,[::1]:54,ns.example")
	if want := []string{"[::1]:53", "[::1]:54", "ns.example:53"}; err != nil || !slices.Equal(z.Servers, want) {
		t.Errorf("%v: %q", err, z.Servers)
	}
}
