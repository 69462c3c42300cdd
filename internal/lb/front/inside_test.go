package front

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// patience is how long a test waits for what does not fail.
const patience = 30 * time.Second

var vips = []netip.Addr{netip.MustParseAddr("192.168.77.200"), netip.MustParseAddr("fd00:77::200")}

// insideRig is a node with a load balancer. Pods of TCP are on the node's loopback, Pods of UDP on the test's own.
type insideRig struct {
	*testing.T
	node, client *testbed.Host
	server       *proxied.Server
	store        *store
	local        *localAddresses
	service      proxied.Service
}

// newInsideRig makes a Service with ports of TCP and UDP.
func newInsideRig(t *testing.T, tcp, udp []uint16, annotations map[string]string) *insideRig {
	t.Helper()
	n := testbed.NewNetwork(t)
	return newInsideRigAt(t, n, n.Host("node"), tcp, udp, annotations)
}

// newInsideRigAt is newInsideRig with a chosen node.
func newInsideRigAt(
	t *testing.T, n *testbed.Network, node *testbed.Host, tcp, udp []uint16, annotations map[string]string,
) *insideRig {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	f := filter.New(func() {})
	r := &insideRig{T: t, node: node, client: n.Outside("client"), store: &store{kept: map[string]*os.File{}}}
	r.server = proxied.New(proxied.Options{Log: log, Store: r.store})
	r.local = newLocalAddresses(log, &Network{
		SetVIPs: link.SetVIPs, SetClusterIPs: link.SetClusterIPs, ClusterIPs: link.ClusterIPs, Filter: f,
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r.server.Close(ctx)
		_ = f.Close()
	})
	for _, a := range vips {
		r.client.Route(netip.PrefixFrom(a, a.BitLen()), r.node.Addr(svc.FamilyOf(a)))
	}
	r.node.Do(func() {
		if !f.Redirects() {
			t.Fatal("this kernel leads no packets to other sockets")
		}
	})
	r.server.BindInside()
	r.service = proxied.Service{Name: svc.Name{Namespace: "default", Name: "web"}, Addrs: vips, Backends: map[uint16][]netip.AddrPort{},
		Datagrams: map[uint16][]netip.AddrPort{}}
	asked := dialect.Service{Annotations: annotations}
	for _, port := range tcp {
		asked.Ports = append(asked.Ports, dialect.Port{Name: fmt.Sprint("t", port), Number: port, Protocol: "TCP"})
		r.service.Backends[port] = []netip.AddrPort{r.pod()}
	}
	for _, port := range udp {
		asked.Ports = append(asked.Ports, dialect.Port{Name: fmt.Sprint("u", port), Number: port, Protocol: "UDP"})
		r.service.Datagrams[port] = []netip.AddrPort{r.echo()}
	}
	r.service.Spec = dialect.Read(asked).Spec
	return r
}

// pod answers connections with "pod" and what it reads first. After a header of the PROXY protocol it reads on: a Pod that closes
// with a byte unread resets the connection.
func (r *insideRig) pod() netip.AddrPort {
	r.Helper()
	l := r.node.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0")) // the relay's threads have the network of the node
	testbed.Serve(r, l, func(c net.Conn) {
		buf := make([]byte, 1024)
		n, err := c.Read(buf)
		for err == nil && strings.HasPrefix(string(buf[:n]), "PROXY ") && strings.HasSuffix(string(buf[:n]), "\r\n") {
			var more int
			more, err = c.Read(buf[n:])
			n += more
		}
		_, _ = fmt.Fprintf(c, "pod %s", buf[:n])
	})
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// echo answers a datagram with "pod", the datagram, and as many thousand bytes as its first character, a digit, names.
func (r *insideRig) echo() netip.AddrPort {
	r.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = c.Close() })
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n > 0 {
				_, _ = c.WriteToUDPAddrPort([]byte("pod "+string(buf[:n])+strings.Repeat("x", 1000*int(buf[0]-'0'))), from)
			}
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// set serves the Service on the node.
func (r *insideRig) set(services ...*proxied.Service) {
	r.Helper()
	r.node.Do(func() {
		r.local.close(r.server.Doors(), services)
		if failed := r.server.Set(services); len(failed) > 0 {
			r.Fatal(failed)
		}
		if err := r.local.set(r.server.Doors()); err != nil {
			r.Fatal(err)
		}
	})
}

// ask sends a text to an address, and returns the answer.
func (r *insideRig) ask(from *testbed.Host, p svc.Protocol, to netip.AddrPort, text string) (string, error) {
	r.Helper()
	c, err := from.Dial(r.Context(), p, to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := c.Write([]byte(text)); err != nil {
		return "", err
	}
	if p == svc.UDP {
		buf := make([]byte, 64<<10)
		n, err := c.Read(buf)
		return string(buf[:n]), err
	}
	_ = c.(*net.TCPConn).CloseWrite()
	out, err := io.ReadAll(c)
	return string(out), err
}

func (r *insideRig) wants(from *testbed.Host, p svc.Protocol, to netip.AddrPort, text, want string) {
	r.Helper()
	if got, err := r.ask(from, p, to, text); err != nil || !strings.HasPrefix(got, want) {
		r.Errorf("%s asks %s %s: %.80q, %v, want %q", from.Name(), p, to, got, err, want)
	}
}

// Listeners of load balancers and other programs of the node have one port each, whoever was first: by IPv4 and IPv6, TCP and
// UDP, from elsewhere and from the node itself. Nothing but packets for a listener reaches it, and none of them reaches
// another program, also after the listener has gone without a word.
func TestNoPortIsTaken(t *testing.T) {
	t.Parallel()
	r := newInsideRig(t, []uint16{22, 9100}, []uint16{53, 22}, nil)
	r.node.Serve(svc.TCP, 22)
	r.node.Serve(svc.UDP, 53)
	pod := r.node.Pod("caller") // behind a bridge, as Pods of many clusters
	r.set(&r.service)
	r.node.Serve(svc.TCP, 9100) // fails if the port is taken
	r.node.Serve(svc.UDP, 22)
	all := func(want string) {
		t.Helper()
		for _, from := range []*testbed.Host{r.client, r.node, pod} {
			for _, a := range vips {
				own := r.node.Addr(svc.FamilyOf(a))
				for _, port := range []uint16{22, 9100} {
					r.wants(from, svc.TCP, netip.AddrPortFrom(a, port), "x", want+" x")
					r.wants(from, svc.TCP, netip.AddrPortFrom(own, port), "x", "node ")
				}
				for _, port := range []uint16{22, 53} {
					r.wants(from, svc.UDP, netip.AddrPortFrom(a, port), "0", want+" 0")
					r.wants(from, svc.UDP, netip.AddrPortFrom(a, port), "4", want+" 4xxxx") // the answer in fragments
					r.wants(from, svc.UDP, netip.AddrPortFrom(own, port), "0", "node ")
				}
			}
		}
	}
	all("pod")
	doors := r.server.Doors()
	if len(doors) != 8 {
		t.Fatalf("doors are %v", doors)
	}
	for _, d := range doors {
		p, ctx := svc.TCP, t.Context()
		if d.UDP {
			p = svc.UDP
		}
		ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		if c, err := r.node.Dial(ctx, p, d.Inside); err == nil {
			_, _ = c.Write([]byte("0"))
			if n, err := c.Read(make([]byte, 100)); err == nil {
				t.Errorf("%d bytes come directly from %v", n, d)
			}
			_ = c.Close()
		}
	}
	refused := func(port uint16, p svc.Protocol) {
		t.Helper()
		for _, from := range []*testbed.Host{r.client, r.node, pod} {
			for _, a := range vips {
				if got, err := r.ask(from, p, netip.AddrPortFrom(a, port), "0"); !testbed.Refused(err) {
					t.Errorf("%s port %d at %s from %s: %q, %v", p, port, a, from.Name(), got, err)
				}
			}
		}
	}
	refused(9101, svc.TCP)
	refused(9100, svc.UDP)
	// A process that is killed leaves its rules.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r.server.Close(ctx)
	for name := range r.store.kept {
		_ = r.store.Drop(name)
	}
	for _, port := range []uint16{22, 9100} {
		refused(port, svc.TCP)
	}
	refused(53, svc.UDP)
}

// What comes by a bridge reaches listeners, also if it is the node's first one and is made while the listeners are there.
func TestBridgeComesLater(t *testing.T) {
	t.Parallel()
	n := testbed.NewNetwork(t)
	r := newInsideRigAt(t, n, n.Outside("node"), []uint16{80}, nil, nil) // a Host has a bridge from the beginning
	r.set(&r.service)
	guest := n.Outside("guest")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	up := func(name, address string) {
		l, err := netlink.LinkByName(name)
		must(err)
		if address != "" {
			a, err := netlink.ParseAddr(address)
			must(err)
			must(netlink.AddrAdd(l, a))
		}
		must(netlink.LinkSetUp(l))
	}
	r.node.Do(func() {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		must(netlink.LinkAdd(bridge))
		must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "port", MasterIndex: bridge.Index}, PeerName: "by",
			PeerNamespace: netlink.NsFd(guest.NSFd())}))
		up("br0", "192.168.99.1/24")
		up("port", "")
	})
	guest.Do(func() {
		up("by", "192.168.99.2/24")
		must(netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: vips[0].AsSlice(), Mask: net.CIDRMask(32, 32)}, Gw: net.IPv4(192, 168, 99, 1)}))
	})
	testbed.Until(t, "a guest of the bridge reaches the listener", func() error {
		r.set(&r.service)
		got, err := r.ask(guest, svc.TCP, netip.AddrPortFrom(vips[0], 80), "x")
		if err == nil && got != "pod x" {
			err = fmt.Errorf("%q", got)
		}
		return err
	})
}

// Pods hear of the client's address and the Service's (PROXY protocol), and source ranges are of clients; a port that comes
// or goes concerns no other one.
func TestInsideKeepsAddresses(t *testing.T) {
	t.Parallel()
	r := newInsideRig(t, []uint16{80, 443}, []uint16{53}, map[string]string{"fairlead.dev/lb-proxy-protocol": "v1"})
	r.set(&r.service)
	r.local.setSources([]netip.Addr{r.node.Addr4(), r.node.Addr6()}) // as its Node object comes
	r.set(&r.service)
	for _, a := range vips {
		from := r.client.Addr(svc.FamilyOf(a))
		family := map[bool]string{true: "TCP4", false: "TCP6"}[a.Is4()]
		r.wants(r.client, svc.TCP, netip.AddrPortFrom(a, 443), "x", fmt.Sprintf("pod PROXY %s %s %s ", family, from, a))
		own := r.node.Addr(svc.FamilyOf(a)) // not the address that it asks
		r.wants(r.node, svc.TCP, netip.AddrPortFrom(a, 443), "x", fmt.Sprintf("pod PROXY %s %s %s ", family, own, a))
	}
	less := r.service
	less.Spec.Listeners = less.Spec.Listeners[:1]
	less.Spec.SourceRanges = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.PrefixFrom(r.client.Addr6(), 128)}
	r.set(&less)
	r.wants(r.client, svc.TCP, netip.AddrPortFrom(vips[1], 80), "x", "pod PROXY TCP6")
	if got, err := r.ask(r.client, svc.TCP, netip.AddrPortFrom(vips[0], 80), "x"); err == nil && got != "" {
		t.Errorf("a client outside of the source ranges gets %q", got)
	}
	for _, port := range []uint16{443, 53} {
		if got, err := r.ask(r.client, svc.TCP, netip.AddrPortFrom(vips[1], port), "x"); !testbed.Refused(err) {
			t.Errorf("port %d after it has gone: %q, %v", port, got, err)
		}
	}
	r.set(&r.service)
	r.wants(r.client, svc.TCP, netip.AddrPortFrom(vips[0], 443), "x", "pod PROXY TCP4")
}

// store is systemd's: it has the listeners of a process that ends for the next one.
type store struct {
	kept  map[string]*os.File
	names map[net.Listener]string
}

func (s *store) Inherited() (out []net.Listener) {
	s.names = map[net.Listener]string{}
	for name, f := range s.kept {
		if l, err := net.FileListener(f); err == nil {
			s.names[l] = name
			out = append(out, l)
		}
	}
	return out
}

func (s *store) NameOf(l net.Listener) string { return s.names[l] }

func (s *store) Keep(name string, l *net.TCPListener) (err error) {
	s.kept[name], err = l.File()
	return err
}

func (s *store) Drop(name string) error {
	err := s.kept[name].Close()
	delete(s.kept, name)
	return err
}

// While the process restarts connections wait at the sockets that systemd keeps, and the next process serves them: it
// knows each by its name. Sockets that come have other addresses than these.
func TestInsideIsHandedOver(t *testing.T) {
	t.Parallel()
	r := newInsideRig(t, []uint16{22, 80}, nil, nil)
	r.set(&r.service)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	kept := r.server.Close(ctx)
	if len(kept) != 4 {
		t.Fatalf("%v are kept", kept)
	}
	r.node.Do(func() { r.local.release(kept) })
	r.node.Serve(svc.TCP, 22)
	answers := make(chan string, len(kept))
	for _, d := range kept {
		c, err := r.client.Dial(t.Context(), svc.TCP, d.At)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = c.Write([]byte("x"))
			got, _ := io.ReadAll(c)
			_ = c.Close()
			answers <- string(got)
		}()
	}
	f := filter.New(func() {})
	t.Cleanup(func() { _ = f.Close() })
	log := slog.New(slog.DiscardHandler)
	r.server = proxied.New(proxied.Options{Log: log, Store: r.store})
	r.local = newLocalAddresses(log, &Network{
		SetVIPs: link.SetVIPs, SetClusterIPs: link.SetClusterIPs, ClusterIPs: link.ClusterIPs, Filter: f,
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r.server.Close(ctx)
	})
	r.server.BindInside()
	r.set() // before its Services are known
	if doors := r.server.Doors(); len(doors) != 4 || !doors[0].Inherited {
		t.Errorf("before the Services are known: %v", doors)
	}
	more := r.service
	more.Spec.Listeners = append(more.Spec.Listeners[:2:2], dialect.Listener{Port: 443, Protocol: dialect.TCP, Backend: dialect.TCP})
	more.Backends[443] = []netip.AddrPort{r.pod()}
	r.set(&more)
	for range kept {
		if got := <-answers; got != "pod x" {
			t.Errorf("a connection that waited gets %q", got)
		}
	}
	for _, a := range vips {
		for _, port := range []uint16{22, 80, 443} {
			r.wants(r.client, svc.TCP, netip.AddrPortFrom(a, port), "x", "pod x")
		}
	}
	bound := map[netip.AddrPort]bool{}
	for _, d := range r.server.Doors() {
		if bound[d.Inside] = true; !d.Inside.IsValid() || d.Inherited {
			t.Errorf("%+v", d)
		}
	}
	if len(bound) != 6 {
		t.Errorf("bound at %v", bound)
	}
}
