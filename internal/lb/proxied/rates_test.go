package proxied

import (
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/svc"
)

// A client has as many requests a second as it may, and at once the requests of one second; an IPv6 network of 64 bits is one client.
func TestRates(t *testing.T) {
	var r rates
	at := time.Now()
	a, v6, same := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::ffff")
	allowed := func(client netip.Addr, tries int) (n int) {
		for range tries {
			if r.allow(client, 10, at) {
				n++
			}
		}
		return n
	}
	if n := allowed(a, 100); n != 10 {
		t.Errorf("%d at once, want 10", n)
	}
	if n := allowed(netip.MustParseAddr("::ffff:192.0.2.1"), 5); n != 0 {
		t.Errorf("the same client in IPv6 has %d", n)
	}
	if n := allowed(v6, 5) + allowed(same, 100); n != 10 {
		t.Errorf("a network has %d, want 10", n)
	}
	at = at.Add(300 * time.Millisecond)
	if n := allowed(a, 100); n != 3 {
		t.Errorf("%d after 0.3 s, want 3", n)
	}
	at = at.Add(time.Hour)
	if n := allowed(a, 100); n != 10 {
		t.Errorf("%d after an hour, want 10", n)
	}
}

// The number of counted clients is bounded: a client that has sent none for some time is forgotten.
func TestRatesAreBounded(t *testing.T) {
	var r rates
	at := time.Now()
	client := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}) }
	known := 0
	for i := range maxRates + 1000 {
		if r.allow(client(i), 1, at) {
			known++
		}
	}
	if known != maxRates+1 || len(r.due) != maxRates+1 {
		t.Errorf("%d requests of %d clients, want %d: further clients count as one", known, len(r.due), maxRates+1)
	}
	if at = at.Add(2 * time.Second); !r.allow(client(1<<20), 1, at) || len(r.due) != 1 {
		t.Errorf("%d clients after a while", len(r.due))
	}
}

// The limits of a route hold for it and for no other one, and each of them by itself.
func TestRatesOfRoutes(t *testing.T) {
	var r routeRates
	at, client := time.Now(), netip.MustParseAddr("192.0.2.1")
	limits := []filter.Limit{{Each: time.Second / 2, AtOnce: 11}, {Each: time.Minute / 6, AtOnce: 13}}
	allowed := func(route string) (n int) {
		for range 100 {
			if r.allowAll(client, svc.Name{Name: route}, limits, at) {
				n++
			}
		}
		return n
	}
	if n, m := allowed("a"), allowed("b"); n != 11 || m != 11 {
		t.Errorf("%d and %d at once, want 11", n, m)
	}
	if at = at.Add(time.Minute); allowed("a") != 6+2 { // 13 in all, and 6 a minute
		t.Error("the limit of a minute does not hold")
	}
}

// Many clients of a route do not end its limits, nor the ones of another route: further ones count as one client.
func TestRatesOfRoutesAreBounded(t *testing.T) {
	var r routeRates
	at := time.Now()
	client := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}) }
	limits := []filter.Limit{{Each: time.Minute, AtOnce: 2}}
	many, other, known := svc.Name{Name: "many"}, svc.Name{Name: "other"}, 0
	for i := range maxRouteRates + 1000 {
		if r.allowAll(client(i), many, limits, at) {
			known++
		}
	}
	if want := maxRouteRates + limits[0].AtOnce; known != want || len(r.of[many].due) != maxRouteRates+1 {
		t.Errorf("%d requests of %d clients, want %d", known, len(r.of[many].due), want)
	}
	if !r.allowAll(client(0), many, limits, at) || r.allowAll(client(0), many, limits, at) {
		t.Error("a client that is counted does not have its own limit")
	}
	for i := range 100 {
		for n, want := range []bool{true, true, false} {
			if got := r.allowAll(client(i), other, limits, at); got != want {
				t.Fatalf("client %d of another route: request %d: %v", i, n, got)
			}
		}
	}
	if at = at.Add(time.Hour); !r.allowAll(client(0), svc.Name{Name: "new"}, limits, at) || len(r.of) != 1 {
		t.Errorf("%d routes are counted after an hour, want 1", len(r.of))
	}
}
