package link

import (
	"errors"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// inside runs f in a namespace that has eth0, and device "virtual" with its Addresses.
func inside(t *testing.T, f func(c *Addresses)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() { f(open(t, "virtual")) })
}

func open(t *testing.T, name string) *Addresses {
	t.Helper()
	// Not every kernel has dummy devices. Without a carrier IPv6 addresses are not
	// announced.
	err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
	if err := errors.Join(Up(name), Up(name+"p")); err != nil {
		t.Fatal(err)
	}
	c, err := DialAddresses(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func remove(name string) error {
	return netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}})
}

func list(t *testing.T, c *Addresses) []string {
	t.Helper()
	mine, err := c.List()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for a := range mine {
		if !a.IsLinkLocalUnicast() {
			out = append(out, a.String())
		}
	}
	slices.Sort(out)
	return out
}

func addrs(list ...string) (out []netip.Addr) {
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

// numbered are n addresses.
func numbered(n int) (out []netip.Addr) {
	for i := range n {
		out = append(out, netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}))
	}
	return out
}

func done(t *testing.T, failed map[netip.Addr]error) {
	t.Helper()
	for _, err := range failed {
		t.Fatalf("%d failed: %v", len(failed), err)
	}
}

func TestAddressesComeAndGo(t *testing.T) {
	inside(t, func(c *Addresses) {
		for range 2 { // again is no error
			done(t, c.Add(addrs("10.96.0.1", "fd00:10:96::1", "10.96.0.2")))
			if got := list(t, c); !slices.Equal(got, []string{"10.96.0.1", "10.96.0.2", "fd00:10:96::1"}) {
				t.Errorf("there is %q", got)
			}
		}
		for range 2 {
			done(t, c.Del(addrs("fd00:10:96::1", "10.96.0.1", "10.96.0.77")))
			if got := list(t, c); !slices.Equal(got, []string{"10.96.0.2"}) {
				t.Errorf("there is %q", got)
			}
		}
		stays := addrs("10.96.0.2")
		if err := c.CatchUp(); err != nil || !c.Has(stays[0]) || c.Has(addrs("10.96.0.1")[0]) {
			t.Errorf("followed wrongly, or %v", err)
		}
		if out, err := exec.CommandContext(t.Context(), "ip", "address", "del", "10.96.0.2/32", "dev", "virtual").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := c.CatchUp(); err != nil || c.Has(stays[0]) {
			t.Errorf("an address that another program removed is there, or %v", err)
		}
		many := numbered(2*perSend + 7)
		done(t, c.Add(many))
		if got := list(t, c); len(got) != len(many) {
			t.Errorf("%d addresses, want %d", len(got), len(many))
		}
		// One that cannot be costs none of the others, and is reported by its name.
		bad := netip.MustParseAddr("fd00:10:96::2")
		if err := remove("virtual"); err != nil {
			t.Fatal(err)
		}
		if failed := c.Add([]netip.Addr{bad}); !errors.Is(failed[bad], unix.ENODEV) ||
			!strings.Contains(failed[bad].Error(), "add address fd00:10:96::2 on device virtual: ") {
			t.Errorf("without the device: %v", failed)
		}
	})
}

// As soon as an address is added, packets to it are this machine's, and go nowhere
// else.
func TestAddressesAreLocalAtOnce(t *testing.T) {
	inside(t, func(c *Addresses) {
		for i := range 200 {
			a := numbered6(i)
			done(t, c.Add([]netip.Addr{a}))
			routes, err := netlink.RouteGet(a.AsSlice())
			if err != nil || len(routes) != 1 || routes[0].Type != unix.RTN_LOCAL {
				t.Fatalf("address %d, %s: %+v, %v, want a local route", i, a, routes, err)
			}
		}
	})
}

func numbered6(i int) netip.Addr {
	a := netip.MustParseAddr("fd00:10:96::").As16()
	a[14], a[15] = byte(i>>8), byte(i)
	return netip.AddrFrom16(a)
}

// What is on other interfaces is known as soon as it is there, and nothing is
// listed for that: cost follows change.
func TestCatchUp(t *testing.T) {
	inside(t, func(c *Addresses) {
		other := open(t, "other")
		// Without this socket nothing can be listed.
		if err := c.nl.Close(); err != nil {
			t.Fatal(err)
		}
		elsewhere := func(want ...string) {
			t.Helper()
			all := addrs("203.0.113.1", "2001:db8::1", "203.0.113.2")
			// The kernel announces an IPv6 address after the carrier, in its own time.
			for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
				if err := c.CatchUp(); err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, a := range all {
					if slices.Contains(c.Others(), a) != c.Elsewhere(a) {
						t.Errorf("Others = %v", c.Others())
					}
					if c.Elsewhere(a) {
						got = append(got, a.String())
					}
				}
				if slices.Equal(got, want) {
					return
				}
				if time.Now().After(deadline) {
					t.Fatalf("elsewhere are %q, want %q", got, want)
				}
			}
		}
		elsewhere()
		done(t, other.Add(addrs("203.0.113.1", "2001:db8::1")))
		elsewhere("203.0.113.1", "2001:db8::1")
		done(t, other.Del(addrs("203.0.113.1")))
		done(t, other.Add(addrs("203.0.113.2")))
		elsewhere("2001:db8::1", "203.0.113.2")
		// What the device itself gets is not elsewhere, until another one has it.
		mine := open(t, "virtual")
		done(t, mine.Add(addrs("203.0.113.1")))
		elsewhere("2001:db8::1", "203.0.113.2")
		third := open(t, "third")
		done(t, third.Add(addrs("203.0.113.2")))
		if err := remove("other"); err != nil {
			t.Fatal(err)
		}
		elsewhere("203.0.113.2")
		if err := remove("third"); err != nil {
			t.Fatal(err)
		}
		elsewhere()
	})
}

// Where more came than the kernel keeps for a listener, all are listed again.
func TestCatchUpAfterTooMuch(t *testing.T) {
	inside(t, func(c *Addresses) {
		other, witness := open(t, "other"), open(t, "virtual")
		many := numbered(500)
		for range 20 {
			done(t, other.Add(many))
			done(t, other.Del(many[100:]))
		}
		if err := witness.changes.Events(func(uint16, []byte) {}); !errors.Is(err, unix.ENOBUFS) {
			t.Fatalf("%v: all of it was kept, so this shows nothing", err)
		}
		if err := c.CatchUp(); err != nil {
			t.Fatal(err)
		}
		for i, a := range many {
			if c.Elsewhere(a) != (i < 100) {
				t.Fatalf("%s is elsewhere: %t", a, c.Elsewhere(a))
			}
		}
	})
}

// What the kernel sends is foreign: whatever it is, it ends in an address or in
// none.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 8, 0, 2, 0, 10, 0, 0, 1})
	f.Add([]byte{1, 0, 0, 0, 20, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, a, ok := decodeAddress(b); ok != a.IsValid() {
			t.Errorf("%v, %t", a, ok)
		}
	})
}
