package ipset

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

func TestMain(m *testing.M) { uml.Main(m) }

func inside(t *testing.T, f func(c *Conn)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		c, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		f(c)
	})
}

func list(t *testing.T, c *Conn, set string) []string {
	t.Helper()
	var out []string
	if err := c.List(set, func(e Element) { out = append(out, e.String()) }); err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	if n, err := c.Len(set); err != nil || n != len(out) {
		t.Errorf("Len of %s: %d, %v, want %d", set, n, err, len(out))
	}
	return out
}

func ip(s string) netip.Addr       { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// Every type keeps what is added and drops what is deleted.
func TestTypes(t *testing.T) {
	inside(t, func(c *Conn) {
		if err := c.Probe(); err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			set  Set
			list []Element
			want []string
		}{
			{Set{Type: HashIP, Family: svc.IPv4}, []Element{{IP: ip("10.0.0.1")}, {IP: ip("10.0.0.2")}}, []string{"10.0.0.1", "10.0.0.2"}},
			{Set{Type: HashIP, Family: svc.IPv6}, []Element{{IP: ip("fd00::1")}}, []string{"fd00::1"}},
			{Set{Type: HashNet, Family: svc.IPv4}, []Element{{Net: prefix("10.0.0.0/8")}, {Net: prefix("1.2.3.4/32")}},
				[]string{"1.2.3.4/32", "10.0.0.0/8"}},
			{Set{Type: HashIPPort, Family: svc.IPv4}, []Element{{IP: ip("10.0.0.1"), Proto: svc.TCP, Port: 80},
				{IP: ip("10.0.0.1"), Proto: svc.SCTP, Port: 80}}, []string{"10.0.0.1,sctp:80", "10.0.0.1,tcp:80"}},
			{Set{Type: HashIPPort, Family: svc.IPv6, Marks: true}, []Element{{IP: ip("fd00::1"), Proto: svc.UDP, Port: 53, Mark: 0x666c0001}},
				[]string{"fd00::1,udp:53 skbmark 0x666c0001"}},
			{Set{Type: HashIPPortIP, Family: svc.IPv4}, []Element{{IP: ip("10.0.0.1"), Proto: svc.TCP, Port: 80, IP2: ip("10.0.0.1")}},
				[]string{"10.0.0.1,tcp:80,10.0.0.1"}},
			{Set{Type: HashIPPortNet, Family: svc.IPv4}, []Element{{IP: ip("10.0.0.1"), Proto: svc.TCP, Port: 80, Net: prefix("192.0.2.0/24")}},
				[]string{"10.0.0.1,tcp:80,192.0.2.0/24"}},
			{Set{Type: HashIPPortNet, Family: svc.IPv6}, []Element{{IP: ip("fd00::1"), Proto: svc.TCP, Port: 80, Net: prefix("8000::/1")}},
				[]string{"fd00::1,tcp:80,8000::/1"}},
		} {
			x.set.Name = fmt.Sprintf("%s-%s-%t", x.set.Type, x.set.Family, x.set.Marks)
			for range 2 { // a second time is no error
				if err := c.Create(x.set); err != nil {
					t.Fatal(err)
				}
				if err := c.Add(x.set.Name, x.list); err != nil {
					t.Fatal(err)
				}
			}
			if got := list(t, c, x.set.Name); !slices.Equal(got, x.want) {
				t.Errorf("%s has %q, want %q", x.set.Name, got, x.want)
			}
			for range 2 {
				if err := c.Del(x.set.Name, x.list[:1]); err != nil {
					t.Fatal(err)
				}
			}
			if got := list(t, c, x.set.Name); len(got) != len(x.want)-1 {
				t.Errorf("%s has %q, want one less", x.set.Name, got)
			}
			other := x.set
			other.Type = HashIP
			if x.set.Type == HashIP {
				other.Type = HashNet
			}
			if err := c.Create(other); err == nil {
				t.Errorf("made %s again with another type", other.Name)
			}
		}
		names, err := c.Names()
		if err != nil || len(names) != 8 {
			t.Errorf("Names = %q, %v, want 8", names, err)
		}
		if err := c.Destroy(append(names, "not-there")...); err != nil {
			t.Error(err)
		}
		if names, err := c.Names(); err != nil || len(names) != 0 {
			t.Errorf("Names = %q, %v, want none", names, err)
		}
	})
}

// A mark that an element gets later replaces that which it had.
func TestMarkChanges(t *testing.T) {
	inside(t, func(c *Conn) {
		if err := c.Create(Set{Name: "m", Type: HashIPPort, Family: svc.IPv4, Marks: true}); err != nil {
			t.Fatal(err)
		}
		for mark := range uint32(3) {
			if err := c.Add("m", []Element{{IP: ip("10.0.0.1"), Proto: svc.TCP, Port: 80, Mark: mark + 1}}); err != nil {
				t.Fatal(err)
			}
			if got := list(t, c, "m"); len(got) != 1 || !strings.HasSuffix(got[0], fmt.Sprintf("%#x", mark+1)) {
				t.Errorf("%q, want mark %d", got, mark+1)
			}
		}
	})
}

func TestManyElementsAndErrors(t *testing.T) {
	inside(t, func(c *Conn) {
		if err := c.Create(Set{Name: "many", Type: HashIP, Family: svc.IPv4}); err != nil {
			t.Fatal(err)
		}
		var all []Element
		for i := range 5000 {
			all = append(all, Element{IP: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})})
		}
		if err := c.Add("many", all); err != nil {
			t.Fatal(err)
		}
		if n := len(list(t, c, "many")); n != len(all) {
			t.Errorf("%d elements, want %d", n, len(all))
		}
		if err := c.Flush("many"); err != nil || len(list(t, c, "many")) != 0 {
			t.Errorf("Flush = %v, or it left something", err)
		}
		if err := c.Add("none", all[:1]); !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "none") {
			t.Errorf("%v, want that there is no such set", err)
		}
		if err := c.List("none", func(Element) {}); !errors.Is(err, unix.ENOENT) {
			t.Errorf("%v, want that there is no such set", err)
		}
		if err := c.Add("many", []Element{all[0], {IP: ip("fd00::1")}}); err == nil {
			t.Error("an IPv6 address went into a set of IPv4")
		}
		out, err := exec.CommandContext(t.Context(), "iptables-legacy", "-A", "INPUT", "-m", "set", "--match-set", "many", "src", "-j",
			"DROP").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := c.Destroy("many"); !errors.Is(err, ErrInUse) {
			t.Errorf("%v, want ErrInUse", err)
		}
	})
}

// Elements of a set with counters count what rules find in them; to be added
// again renews their time and leaves the count. A set with a size takes no more.
func TestCountersTimesAndSizes(t *testing.T) {
	inside(t, func(c *Conn) {
		set := Set{Name: "n", Type: HashIPPort, Family: svc.IPv4, Counters: true, Timeout: time.Hour, Size: 2}
		for range 2 {
			if err := c.Create(set); err != nil {
				t.Fatal(err)
			}
		}
		other := set
		other.Timeout = time.Minute
		if err := c.Create(other); err == nil {
			t.Error("made the set again with another timeout")
		}
		el := Element{IP: ip("127.0.0.1"), Proto: svc.UDP, Port: 9}
		if err := c.Add("n", []Element{el}); err != nil {
			t.Fatal(err)
		}
		count := func() (n Count) {
			if err := c.Counts("n", func(x Count) {
				if x.Element == el {
					n = x
				}
			}); err != nil {
				t.Fatal(err)
			}
			return n
		}
		if n := count(); n.Packets != 0 || n.Left < 50*time.Minute || n.Left > time.Hour {
			t.Errorf("a new element has %d packets and %s left", n.Packets, n.Left)
		}
		for _, args := range [][]string{{"ip", "link", "set", "lo", "up"}, {"iptables-legacy", "-A", "OUTPUT", "-m", "set", "--match-set", "n",
			"dst,dst", "-j", "DROP"}} {
			if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %v: %s", args, err, out)
			}
		}
		udp, err := net.Dial("udp4", "127.0.0.1:9")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = udp.Close() }()
		for range 3 {
			_, _ = udp.Write([]byte("?")) // a dropped datagram is an error to its sender
		}
		if err := c.Add("n", []Element{el}); err != nil {
			t.Fatal(err)
		}
		if n := count(); n.Packets != 3 || n.Left < 50*time.Minute {
			t.Errorf("%d packets and %s left, want 3 and all of the time", n.Packets, n.Left)
		}
		var more []Element
		for i := range 1000 {
			more = append(more, Element{IP: ip("10.0.0.1"), Proto: svc.TCP, Port: uint16(i + 1)})
		}
		if err := c.Add("n", more); err == nil {
			t.Error("a set of 2 took 1,001 elements")
		}
	})
}

func TestRemoveWhatIsPresent(t *testing.T) {
	inside(t, func(c *Conn) {
		for range 2 {
			if err := Remove(t.Context(), "a", "b"); err != nil {
				t.Fatal(err)
			}
			if err := c.Create(Set{Name: "b", Type: HashIP, Family: svc.IPv4}, Set{Name: "c", Type: HashIP, Family: svc.IPv6}); err != nil {
				t.Fatal(err)
			}
			if got, err := Present("a", "b"); err != nil || !slices.Equal(got, []string{"b"}) {
				t.Errorf("Present = %q, %v, want b", got, err)
			}
		}
		if err := Remove(t.Context(), "a", "b"); err != nil {
			t.Fatal(err)
		}
		if got, err := c.Names(); err != nil || !slices.Equal(got, []string{"c"}) {
			t.Errorf("there is %q, %v, want c alone", got, err)
		}
		// A set that is in use is waited for, but not for ever.
		out, err := exec.CommandContext(t.Context(), "ip6tables-legacy", "-A", "INPUT", "-m", "set", "--match-set", "c", "src", "-j",
			"DROP").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := Remove(ctx, "c"); !errors.Is(err, ErrInUse) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want ErrInUse and that the time was over", err)
		}
	})
}

func TestHalves(t *testing.T) {
	for p, want := range map[string]string{
		"0.0.0.0/0": "[0.0.0.0/1 128.0.0.0/1]", "::/0": "[::/1 8000::/1]", "10.1.2.3/8": "[10.0.0.0/8]",
	} {
		if got := fmt.Sprint(Halves(prefix(p))); got != want {
			t.Errorf("Halves(%s) = %s, want %s", p, got, want)
		}
	}
}

// What the kernel sends is foreign: whatever it is, it ends in an element.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{12, 0, 1, 128, 8, 0, 1, 64, 10, 0, 0, 1})
	f.Add([]byte{5, 0, 3, 0, 255, 0, 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) {
		e := decode(b)
		_ = e.String()
	})
}
