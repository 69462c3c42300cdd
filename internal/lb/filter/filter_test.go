package filter_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

var (
	vips     = []netip.Addr{netip.MustParseAddr("192.168.77.200"), netip.MustParseAddr("fd00:77::200")}
	other    = netip.MustParseAddr("192.168.77.201")
	patience = 30 * time.Second
)

func listeners(addrs []netip.Addr, ports ...uint16) (out []filter.Listener) {
	for _, a := range addrs {
		for _, port := range ports {
			out = append(out, filter.Listener{Protocol: svc.TCP, At: netip.AddrPortFrom(a, port)})
		}
	}
	return out
}

// What listens on all addresses of a node is reached at its own ones, and at a load balancer's only if it is a
// listener of that, by IPv4 and IPv6, from other machines and from the node itself. ICMP stays, and so does an
// established connection of a listener that is gone. What another program damages is repaired.
func TestOnlyListenersAreReached(t *testing.T) {
	n := testbed.NewNetwork(t)
	node, client := n.Host("node"), n.Outside("client")
	for _, port := range []uint16{22, 80, 443} {
		node.Serve(svc.TCP, port)
	}
	node.Serve(svc.UDP, 53)
	for _, a := range vips {
		client.Route(netip.PrefixFrom(a, a.BitLen()), node.Addr(svc.FamilyOf(a)))
	}
	client.Route(netip.PrefixFrom(other, 32), node.Addr4())
	var woken atomic.Int32
	noticed := make(chan struct{}, 1)
	f := filter.New(func() {
		woken.Add(1)
		select {
		case noticed <- struct{}{}:
		default:
		}
	})
	set := func(addrs []netip.Addr, l []filter.Listener) {
		t.Helper()
		node.Do(func() {
			if err := errors.Join(f.Set(addrs, l), link.SetVIPs(addrs, nil)); err != nil {
				t.Fatal(err)
			}
		})
	}
	t.Cleanup(func() { _ = f.Close() })
	check := func(when, want string, from *testbed.Host, addrs ...netip.Addr) {
		t.Helper()
		reaches(t, when, want, from, addrs)
	}
	both := append(vips[:2:2], other)
	set(both, listeners(vips, 80))
	check("80", "80", client, vips...)
	check("none", "", client, other)
	check("80, locally", "80", node, vips...)
	check("its own address", "22 80 443 udp", client, node.Addr4(), node.Addr6())
	established, err := dial(t, client, "tcp", vips[0], 80)
	if err != nil {
		t.Fatal(err)
	}
	set(vips, listeners(vips, 443))
	check("443", "443", client, vips...)
	if _, err := established.Write([]byte("y")); err != nil {
		t.Fatal(err)
	}
	if _, err := established.Read(make([]byte, 100)); err != nil {
		t.Errorf("the established connection of a former listener: %v", err)
	}
	if woken.Load() != 0 {
		t.Error("its own changes count as another program's")
	}
	for _, damage := range []string{"flush ruleset", "delete element inet fairlead-lb addresses-4 { 192.168.77.200 }"} {
		testbed.Until(t, "the damage to be noticed", func() error {
			// A late message about earlier damage may have marked the table: a mark is reported once.
			set(vips, listeners(vips, 443))
			select {
			case <-noticed:
			default:
			}
			if out, err := node.Command(t.Context(), "nft", damage).CombinedOutput(); err != nil {
				t.Fatalf("%v %s", err, out)
			}
			select {
			case <-noticed:
				return nil
			case <-time.After(5 * time.Second):
				return errors.New("not yet")
			}
		})
		set(vips, listeners(vips, 443))
		check("after "+damage, "443", client, vips[0])
	}
	// The next process takes over what it finds.
	f2 := filter.New(func() {})
	defer f2.Close()
	node.Do(func() {
		if err := f2.Set(vips, listeners(vips, 80)); err != nil {
			t.Fatal(err)
		}
	})
	check("another process", "80", client, vips...)
	node.Do(func() {
		if err := errors.Join(f2.Set(nil, nil), filter.Remove(), filter.Remove()); err != nil {
			t.Error(err)
		}
		if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("left: %v\n%s", err, out)
		}
	})
}

// dial connects, and waits for an answer.
func dial(t *testing.T, from *testbed.Host, network string, a netip.Addr, port uint16) (c net.Conn, err error) {
	from.Do(func() { c, err = net.DialTimeout(network, netip.AddrPortFrom(a, port).String(), patience) })
	if err == nil {
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		_, err = c.Write([]byte("x\n"))
	}
	if err == nil {
		_, err = c.Read(make([]byte, 100))
	}
	return c, err
}

// reaches compares which ports of addresses a host reaches; they answer its echo requests.
func reaches(t *testing.T, when, want string, from *testbed.Host, addrs []netip.Addr) {
	t.Helper()
	for _, a := range addrs {
		var got []string
		for _, port := range []uint16{22, 80, 443} {
			if _, err := dial(t, from, "tcp", a, port); err == nil {
				got = append(got, fmt.Sprint(port))
			} else if !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s: %s port %d from %s: %v", when, a, port, from.Name(), err)
			}
		}
		if _, err := dial(t, from, "udp", a, 53); err == nil {
			got = append(got, "udp")
		} else if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %s UDP from %s: %v", when, a, from.Name(), err)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: at %s %s reaches %q, want %q", when, a, from.Name(), got, want)
		}
		for _, size := range []int{56, 3000} { // the larger one in fragments
			if err := ping(from, a, size); err != nil {
				t.Errorf("%s: ping of %s by %s: %v", when, a, from.Name(), err)
			}
		}
	}
}

// ping sends an echo request of so many bytes, and waits for the answer.
func ping(from *testbed.Host, to netip.Addr, size int) (err error) {
	network, request, answer := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, answer = "ip6:ipv6-icmp", 128, 129
	}
	var c net.Conn
	if from.Do(func() { c, err = net.Dial(network, to.String()) }); err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	m := make([]byte, 8+size)
	m[0], m[4] = request, 77
	if to.Is4() { // of IPv6 the kernel computes it
		sum := 0xffff - (int(request)<<8 + 77<<8)
		m[2], m[3] = byte(sum>>8), byte(sum)
	}
	if _, err := c.Write(m); err != nil {
		return err
	}
	for got := make([]byte, 64<<10); ; {
		n, err := c.Read(got)
		if err != nil {
			return err
		}
		if n >= len(m) && got[n-len(m)] == answer && got[n-len(m)+4] == 77 {
			return nil
		}
	}
}

// Listeners become First, and no longer are, in the table that is there: while the kernel replaces one, it refuses connections.
func TestTableIsNotReplaced(t *testing.T) {
	t.Parallel()
	node := testbed.NewNetwork(t).Host("node")
	node.Do(func() {
		f := filter.New(func() {})
		t.Cleanup(func() { _ = f.Close() })
		bound := filter.Bound{Listener: listeners(vips[:1], 80)[0], Inside: netip.MustParseAddrPort("240.0.0.1:1000")}
		first := bound
		first.First = true
		handle := ""
		for i, l := range []filter.Bound{bound, first, bound, first} {
			if err := f.SetBound(vips[:1], []filter.Bound{l}); err != nil {
				t.Fatal(err)
			}
			out, err := node.Command(t.Context(), "nft", "-a", "list", "table", "inet", "fairlead-lb").CombinedOutput()
			if err != nil || strings.Contains(string(out), "192.168.77.200 . tcp . 80 }") != l.First {
				t.Errorf("step %d: %v\n%s", i, err, out)
			}
			head, _, _ := strings.Cut(string(out), "\n") // with the handle
			if handle == "" {
				handle = head
			}
			if head != handle || !strings.Contains(head, "# handle") {
				t.Errorf("step %d: the table is %q, before %q", i, head, handle)
			}
		}
	})
}
