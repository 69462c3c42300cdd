package announce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/packet"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// station is a host whose frames of ARP and NDP the test sends and records.
type station struct {
	*testbed.Host
	mac      MAC
	arp, ndp *packet.Conn

	mu   sync.Mutex
	seen []question
}

func newStation(t *testing.T, h *testbed.Host) *station {
	t.Helper()
	s := &station{Host: h}
	h.Do(func() {
		links, err := link.Interfaces()
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(links, func(l link.Interface) bool { return l.Name == "eth0" })
		s.mac = links[i].MAC
		if s.arp, err = packet.Listen(links[i].Index, packet.ARP); err != nil {
			t.Fatal(err)
		}
		if s.ndp, err = packet.Listen(links[i].Index, packet.IPv6); err != nil {
			t.Fatal(err)
		}
	})
	var wg sync.WaitGroup
	for _, c := range []*packet.Conn{s.arp, s.ndp} {
		wg.Go(func() {
			buf := make([]byte, 2000)
			for {
				n, err := c.Receive(buf)
				if errors.Is(err, os.ErrClosed) {
					return
				}
				if q, ok := parse(buf[:n]); ok {
					s.mu.Lock()
					s.seen = append(s.seen, q)
					s.mu.Unlock()
				}
			}
		})
	}
	t.Cleanup(func() {
		_ = s.arp.Close()
		_ = s.ndp.Close()
		wg.Wait()
	})
	return s
}

// ask sends one request for an address.
func (s *station) ask(a netip.Addr) {
	if a.Is4() {
		_ = s.arp.Send(arp(broadcast, s.mac, arpAsk, s.mac, s.Addr4(), MAC{}, a))
		return
	}
	group := solicitedNode(a)
	_ = s.ndp.Send(ndp(multicastMAC(group), s.mac, group, s.Addr6(), solicit, 0, a, sourceMAC))
}

// owners returns who has answered for an address or announced it since the last call.
func (s *station) owners(a netip.Addr) (macs []MAC) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.seen {
		if q.answer && q.target == a {
			macs = append(macs, q.mac)
		}
	}
	s.seen = nil
	return macs
}

type bed struct {
	*Announcer
	mac       MAC
	may       atomic.Bool
	conflicts chan Conflict
}

// start runs an Announcer on a host.
func start(t *testing.T, h *testbed.Host, peers ...MAC) *bed {
	t.Helper()
	return startWith(t, h, func(*Announcer) {}, peers...)
}

// startWith is start with a change of the Announcer's times.
func startWith(t *testing.T, h *testbed.Host, change func(*Announcer), peers ...MAC) *bed {
	t.Helper()
	b := &bed{conflicts: make(chan Conflict, 10)}
	b.may.Store(true)
	b.Announcer = New(Options{
		May: func(_ netip.Addr, send func()) bool {
			if !b.may.Load() {
				return false
			}
			send()
			return true
		},
		IsPeer:   func(m MAC) bool { return slices.Contains(peers, m) },
		Conflict: func(c Conflict) { b.conflicts <- c },
		Log:      slog.New(slog.DiscardHandler),
	})
	change(b.Announcer)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		h.Do(func() {
			if err := b.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	testbed.Until(t, "the interface to be found", func() error {
		for _, l := range b.Links() {
			if l.Name == "eth0" {
				b.mac = l.MAC
				return nil
			}
		}
		return errors.New("no eth0")
	})
	return b
}

func addresses() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("192.168.77.200"), netip.MustParseAddr("fd00:77::c8")}
}

func TestAnswersWhileItMay(t *testing.T) {
	n := testbed.NewNetwork(t)
	client := newStation(t, n.Outside("client"))
	node := start(t, n.Host("node"))
	for _, a := range addresses() {
		t.Run(a.String(), func(t *testing.T) {
			node.Take(nil, a)
			testbed.Until(t, "the address to be announced unasked", func() error {
				if got := client.owners(a); !slices.Contains(got, node.mac) {
					return fmt.Errorf("heard of %s", got)
				}
				return nil
			})
			asked := func() error {
				client.ask(a)
				if got := client.owners(a); !slices.Contains(got, node.mac) {
					return fmt.Errorf("answers: %s", got)
				}
				return nil
			}
			testbed.Until(t, "an answer", asked)
			if got := node.Where(a); !slices.Equal(got, []string{"eth0"}) {
				t.Errorf("it is answered for at %s", got)
			}
			// Frames are handled in order: what may not be answered is behind us once
			// another address is.
			other := a.Next()
			node.Take(nil, other)
			testbed.Until(t, "an answer for the other", func() error {
				client.ask(other)
				if len(client.owners(other)) == 0 {
					return errors.New("none")
				}
				return nil
			})
			node.may.Store(false)
			client.owners(a)
			for range 5 {
				client.ask(a)
			}
			node.Leave(a)
			node.may.Store(true)
			testbed.Until(t, "the next answer for the other", func() error {
				client.ask(other)
				client.mu.Lock()
				defer client.mu.Unlock()
				for _, q := range client.seen {
					if q.answer && q.target == a {
						t.Fatal("an answer that must not be given")
					}
					if q.answer && q.target == other {
						return nil
					}
				}
				return errors.New("none")
			})
		})
	}
}

// An address that a machine outside of the cluster has is reported, and not answered for.
func TestForeignOwner(t *testing.T) {
	n := testbed.NewNetwork(t)
	owner := newStation(t, n.Outside("printer"))
	// A busy machine takes longer to answer.
	node := startWith(t, n.Host("node"), func(a *Announcer) { a.probeWait, a.newWait = time.Second, time.Second })
	for _, a := range []netip.Addr{owner.Addr4(), owner.Addr6()} {
		t.Run(a.String(), func(t *testing.T) {
			node.Take(nil, a)
			select {
			case c := <-node.conflicts:
				if c.Addr != a || c.MAC != owner.mac || c.Interface != "eth0" || !c.Held {
					t.Errorf("%+v, want %s of %s", c, a, owner.mac)
				}
			case <-time.After(testbed.Patience):
				t.Fatal("the foreign owner is not noticed")
			}
			if got := node.Where(a); got != nil {
				t.Errorf("it is answered for at %s", got)
			}
		})
	}
	// A claim soon after the probe counts as its answer; one that comes later is reported.
	for _, late := range []bool{false, true} {
		a := netip.MustParseAddr("192.168.77.201")
		if late {
			a = a.Next()
		}
		node.Take(nil, a)
		testbed.Until(t, "the address to be answered for", func() error {
			node.mu.Lock()
			defer node.mu.Unlock()
			e := node.entries[a]
			if e.state != active || late && time.Since(e.began) < lateAnswer {
				return errors.New("not yet")
			}
			if !late {
				e.began = time.Now() // however busy the machine is
			}
			return nil
		})
		if got := node.Moved(); !slices.Equal(got, []netip.Addr{a}) {
			t.Errorf("%s moved, want %s, which is answered for now", got, a)
		}
		_ = owner.arp.Send(announcement(a, owner.mac, nil)[0])
		select {
		case c := <-node.conflicts:
			if silent := node.Where(a) == nil; c.Addr != a || c.Held == late || silent == late {
				t.Errorf("%+v, silent: %t, late: %t", c, silent, late)
			}
			if moved := node.Moved(); (len(moved) == 1) == late {
				t.Errorf("late: %t, %s moved by the conflict", late, moved)
			}
		case <-time.After(testbed.Patience):
			t.Fatal("the foreign owner that came later is not noticed")
		}
	}
}

// The network is asked several times for an address that no node had before.
func TestNewAddressIsProbedSeveralTimes(t *testing.T) {
	n := testbed.NewNetwork(t)
	client := newStation(t, n.Outside("client"))
	node := start(t, n.Host("node"))
	for _, a := range addresses() {
		node.TakeNew(nil, a)
		testbed.Until(t, "the announcement of "+a.String(), func() error {
			client.mu.Lock()
			defer client.mu.Unlock()
			probes := 0
			for _, q := range client.seen {
				switch {
				case q.target != a:
				case !q.answer:
					probes++
				case probes != newProbes:
					t.Fatalf("%s was announced after %d probes, want %d", a, probes, newProbes)
				default:
					return nil
				}
			}
			return fmt.Errorf("%d probes", probes)
		})
	}
}

// An interface that goes and comes back is announced at again.
func TestInterfaceComesBack(t *testing.T) {
	n := testbed.NewNetwork(t)
	client := newStation(t, n.Outside("client"))
	host := n.Host("node")
	node := start(t, host)
	for _, a := range addresses() {
		node.Take(nil, a)
	}
	answered := func(a netip.Addr) func() error {
		return func() error {
			client.ask(a)
			if !slices.Contains(client.owners(a), node.mac) {
				return errors.New("no answer")
			}
			return nil
		}
	}
	for range 2 {
		for _, a := range addresses() {
			testbed.Until(t, "an answer for "+a.String(), answered(a))
		}
		for _, args := range [][]string{
			{"link", "set", "eth0", "down"}, {"link", "set", "eth0", "up"},
			{"address", "replace", host.Addr6().String() + "/64", "dev", "eth0", "nodad"}, // the kernel drops it with the link
		} {
			if out, err := host.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
				t.Fatalf("ip %s: %v: %s", args, err, out)
			}
		}
	}
	for _, a := range addresses() {
		testbed.Until(t, "an answer for "+a.String()+" after the interface came back", answered(a))
	}
}

// More groups than one socket may join are received nevertheless.
func TestManyAddressesOfIPv6(t *testing.T) {
	n := testbed.NewNetwork(t)
	client := newStation(t, n.Outside("client"))
	node := start(t, n.Host("node"))
	base := netip.MustParseAddr("fd00:77::1:0").As16()
	var all []netip.Addr
	for i := range 3000 {
		b := base
		b[13], b[14], b[15] = 1, byte(i>>8), byte(i)
		all = append(all, netip.AddrFrom16(b))
	}
	node.Take(nil, all...)
	for _, a := range []netip.Addr{all[0], all[1500], all[2999]} {
		testbed.Until(t, "an answer for "+a.String(), func() error {
			client.ask(a)
			if !slices.Contains(client.owners(a), node.mac) {
				return errors.New("no answer")
			}
			return nil
		})
	}
	node.Leave(all...)
}

// The kernel of a node that has an address on another interface, as every node has in mode ipvs,
// does not answer beside the owner, even if the node never took an address.
func TestKernelsStaySilent(t *testing.T) {
	n := testbed.NewNetwork(t)
	client := newStation(t, n.Outside("client"))
	a := addresses()[0]
	hosts := []*testbed.Host{n.Host("owner"), n.Host("other")}
	for _, h := range hosts {
		h.Sysctl("net/ipv4/conf/all/arp_ignore", "0")
		if out, err := h.Command(t.Context(), "ip", "address", "add", a.String()+"/32", "dev", "lo").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	// Before, both kernels answer; so does this test notice one that does.
	testbed.Until(t, "the kernels to answer", func() error {
		client.ask(a)
		if len(client.owners(a)) == 0 {
			return errors.New("they do not")
		}
		return nil
	})
	owner, other := start(t, hosts[0]), start(t, hosts[1])
	client.owners(a)
	owner.Take(nil, a)
	for range 20 {
		testbed.Until(t, "an answer of the owner", func() error {
			client.ask(a)
			macs := client.owners(a)
			if slices.Contains(macs, other.mac) {
				t.Fatal("the kernel of the other node answers")
			}
			if !slices.Contains(macs, owner.mac) {
				return fmt.Errorf("answers: %s", macs)
			}
			return nil
		})
	}
}
