package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
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

func send(t *testing.T, c *Conn, b *Batch[string]) []Refusal[string] {
	t.Helper()
	refused, err := Send(c, b)
	if err != nil {
		t.Fatal(err)
	}
	return refused
}

func dump(t *testing.T, c *Conn) []string {
	t.Helper()
	var all []Service
	if err := c.Services(func(s Service) { all = append(all, s) }); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, s := range all {
		out = append(out, fmt.Sprintf("%s %s %d %s", s.Key, s.Scheduler, s.Flags, s.Persistence))
		if err := c.Dests(s.Key, func(d Dest) { out = append(out, fmt.Sprintf("%s -> %s %d", s.Key, d.Addr, d.Weight)) }); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(out)
	return out
}

func at(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func TestServersOfEveryKind(t *testing.T) {
	inside(t, func(c *Conn) {
		b := NewBatch[string](c)
		web, dns, tel, marked := AddressKey(svc.TCP, at("10.96.0.1:80")), AddressKey(svc.UDP, at("[fd00::1]:53")),
			AddressKey(svc.SCTP, at("10.96.0.1:80")), MarkKey(7, svc.IPv6)
		b.AddService("", Service{Key: web, Scheduler: "rr"})
		b.AddDest("", web, Dest{Addr: at("10.0.0.1:8080"), Weight: 1})
		b.AddDest("", web, Dest{Addr: at("10.0.0.2:8080"), Weight: 3})
		b.AddService("", Service{Key: dns, Scheduler: "sh", Flags: Fallback, Persistence: 3 * time.Hour})
		b.AddDest("", dns, Dest{Addr: at("[fd00::2]:53"), Weight: 1})
		b.AddService("", Service{Key: tel, Scheduler: "wlc"})
		b.AddService("", Service{Key: marked, Scheduler: "lc"})
		b.AddDest("", marked, Dest{Addr: at("[fd00::2]:80"), Weight: 1})
		if refused := send(t, c, b); len(refused) > 0 {
			t.Fatal(refused)
		}
		want := []string{
			"fwm 7 (IPv6) -> [fd00::2]:80 1", "fwm 7 (IPv6) lc 0 0s", "sctp 10.96.0.1:80 wlc 0 0s", "tcp 10.96.0.1:80 -> 10.0.0.1:8080 1",
			"tcp 10.96.0.1:80 -> 10.0.0.2:8080 3", "tcp 10.96.0.1:80 rr 0 0s", "udp [fd00::1]:53 -> [fd00::2]:53 1", "udp [fd00::1]:53 sh 8 3h0m0s",
		}
		if got := dump(t, c); !slices.Equal(got, want) {
			t.Errorf("there is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		b = NewBatch[string](c)
		b.SetService("", Service{Key: web, Scheduler: "lc", Persistence: time.Second})
		b.SetDest("", web, Dest{Addr: at("10.0.0.1:8080"), Weight: 0})
		b.DelDest("", web, Dest{Addr: at("10.0.0.2:8080")})
		b.DelService("", dns)
		b.DelService("", tel)
		b.DelService("", marked)
		if refused := send(t, c, b); len(refused) > 0 {
			t.Fatal(refused)
		}
		want = []string{"tcp 10.96.0.1:80 -> 10.0.0.1:8080 0", "tcp 10.96.0.1:80 lc 0 1s"}
		if got := dump(t, c); !slices.Equal(got, want) {
			t.Errorf("there is %q, want %q", got, want)
		}
	})
}

// A rejected change costs none of the others, and is returned with its owner.
func TestRefusals(t *testing.T) {
	inside(t, func(c *Conn) {
		b := NewBatch[string](c)
		const n = 2*perSend + 10
		for i := range n {
			s := Service{Key: AddressKey(svc.TCP, netip.AddrPortFrom(netip.MustParseAddr("10.96.0.1"), uint16(i+1))), Scheduler: "rr"}
			if i%1000 == 7 {
				s.Scheduler = "nosuch"
			}
			b.AddService(fmt.Sprint(i), s)
		}
		refused := send(t, c, b)
		if len(refused) != 2 || refused[0].Owner != "7" || refused[1].Owner != "1007" || !errors.Is(refused[1].Err, unix.ENOENT) ||
			!strings.Contains(refused[0].Err.Error(), "scheduler nosuch") {
			t.Errorf("refused %v, want 7 and 1007 for their scheduler", refused)
		}
		if got := len(dump(t, c)); got != n-2 {
			t.Errorf("%d servers, want %d", got, n-2)
		}
	})
}

func TestTimeouts(t *testing.T) {
	inside(t, func(c *Conn) {
		before, err := c.Timeouts()
		if err != nil || before.TCP == 0 || before.UDP == 0 {
			t.Fatalf("%+v, %v", before, err)
		}
		if err := c.SetTimeouts(Timeouts{TCP: time.Hour, UDP: 1500 * time.Millisecond}); err != nil {
			t.Fatal(err)
		}
		want := Timeouts{TCP: time.Hour, TCPFin: before.TCPFin, UDP: 2 * time.Second}
		if got, err := c.Timeouts(); err != nil || got != want {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
	})
}

// Without CAP_NET_ADMIN the error names what is missing.
func TestNoCapability(t *testing.T) {
	self := fmt.Sprintf("/proc/%d/exe", os.Getpid())
	out, err := exec.CommandContext(t.Context(), "setpriv", "--bounding-set=-net_admin", "--inh-caps=-all", self,
		"-test.run=^TestHelperWithoutCapability$", "-test.v").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "it needs CAP_NET_ADMIN") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestHelperWithoutCapability(t *testing.T) {
	c, err := Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	b := NewBatch[string](c)
	b.AddService("", Service{Key: MarkKey(1, svc.IPv4), Scheduler: "rr"})
	for _, r := range send(t, c, b) {
		t.Log(r.Err)
	}
	b = NewBatch[string](c)
	b.DelService("", MarkKey(1, svc.IPv4))
	send(t, c, b)
}

// What the kernel sends is foreign: whatever it is, it ends in a server or in
// none.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{6, 0, 1, 0, 2, 0, 0, 0}, true)
	f.Add([]byte{20, 0, 3, 0, 10, 0, 0, 1}, false)
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, b []byte, six bool) {
		fam := svc.IPv4
		if six {
			fam = svc.IPv6
		}
		if s, ok := decodeService(b); ok && s.Mark == 0 && svc.FamilyOf(s.Addr.Addr()) != s.Family && !s.Addr.Addr().Is4In6() {
			t.Errorf("server %+v", s)
		}
		if d, ok := decodeDest(b, fam); ok && !d.Addr.IsValid() {
			t.Errorf("real server %+v", d)
		}
	})
}
