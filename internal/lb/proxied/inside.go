package proxied

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// Door is where connections, or datagrams, for one port of an address come in.
type Door struct {
	UDP bool
	// At is the address of a Service, with the port.
	At netip.AddrPort
	// Inside is where the socket is bound: the packet filter leads what is for At there (filter.Listener). Without it the
	// socket is bound to At.
	Inside netip.AddrPort
	// ClusterIP is true if At is a ClusterIP, which other programs lead elsewhere unless the packet filter is first.
	ClusterIP bool
	// Inherited means that an earlier process has left the socket, and that no Service has asked for it yet.
	Inherited bool
}

// insides binds sockets where they take no port from other programs of the node, nor other programs theirs: a socket at
// port 22 of a Service's address and an sshd on all addresses exclude each other. Each socket has an address that
// no machine has, of a block that is reserved, and which no packet from elsewhere can reach; all share one port for
// each protocol and family, which the kernel chooses among the ephemeral ones.
type insides struct {
	last [2]uint64    // the last address, by family
	port [2][2]uint16 // the port, by family and protocol; 0 before the first one
}

// The blocks of insides: 240.0.0.0/8 is of "future use" (RFC 1112), 100::/64 is discard-only (RFC 6666).
var (
	insides4 = netip.MustParsePrefix("240.0.0.0/8")
	insides6 = netip.MustParsePrefix("100::/64")
)

// maxBinds bounds how many addresses are tried for one socket: an earlier process, or another one, may have some.
const maxBinds = 100

// bind calls open with addresses until one is free. open returns where the socket is bound.
func (n *insides) bind(udp bool, of netip.Addr, open func(netip.AddrPort) (netip.AddrPort, error)) (at netip.AddrPort, err error) {
	family, protocol := 0, 0
	if of.Is6() {
		family = 1
	}
	if udp {
		protocol = 1
	}
	port := &n.port[family][protocol]
	for range maxBinds {
		n.last[family]++
		at, err = open(netip.AddrPortFrom(n.address(family), *port))
		if err == nil {
			*port = at.Port()
			return at, nil
		}
		if !errors.Is(err, relay.ErrPortTaken) {
			break
		}
		*port = 0 // a program has taken it since
	}
	return at, err
}

// address returns the last address of a family.
func (n *insides) address(family int) netip.Addr {
	if family == 0 {
		a := insides4.Addr().As4()
		binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])|uint32(n.last[0]&0xffffff))
		return netip.AddrFrom4(a)
	}
	a := insides6.Addr().As16()
	binary.BigEndian.PutUint64(a[8:], n.last[1])
	return netip.AddrFrom16(a)
}

// inherit goes on after an address of an earlier process.
func (n *insides) inherit(a netip.Addr) {
	switch {
	case insides4.Contains(a):
		b := a.As4()
		n.last[0] = max(n.last[0], uint64(binary.BigEndian.Uint32(b[:])&0xffffff))
	case insides6.Contains(a):
		b := a.As16()
		n.last[1] = max(n.last[1], binary.BigEndian.Uint64(b[8:]))
	}
}

// BindInside makes the Server bind its sockets where they take no port from other programs. The caller must lead packets
// there, as Doors reports. It is called before Set.
func (s *Server) BindInside() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.insides == nil {
		s.insides = &insides{}
	}
	for _, l := range s.inherited {
		s.insides.inherit(addrPort(l.Addr()).Addr())
	}
}

// open opens a socket for the address at. It calls the argument open with the address to bind and the options of the socket.
// If n is nil, that is at itself.
func (n *insides) open(udp bool, at netip.AddrPort, open func(net.ListenConfig, netip.AddrPort) (net.Addr, error)) error {
	o := socket.Options{AnyAddress: true, Shared: true, KeepAlive: !udp} // shared with one that drains
	if n == nil {
		_, err := open(socket.ListenConfig(at, o), at)
		if errors.Is(err, relay.ErrPortTaken) {
			err = fmt.Errorf("another program of this node has the port: %w", err)
		}
		return err
	}
	o.Shared, o.Transparent = false, true // an address of an earlier process must not be shared with it
	_, err := n.bind(udp, at.Addr(), func(inside netip.AddrPort) (netip.AddrPort, error) {
		bound, err := open(socket.ListenConfig(inside, o), inside)
		if err != nil {
			return inside, err
		}
		return netip.ParseAddrPort(bound.String())
	})
	return err
}

// listenTCP opens a socket for connections to an address.
func (n *insides) listenTCP(ctx context.Context, at netip.AddrPort) (made *net.TCPListener, err error) {
	err = n.open(false, at, func(lc net.ListenConfig, where netip.AddrPort) (net.Addr, error) {
		l, err := lc.Listen(ctx, "tcp", where.String())
		if err != nil {
			return nil, err
		}
		made = l.(*net.TCPListener)
		return l.Addr(), nil
	})
	return made, err
}

// listenPackets opens a socket for datagrams to an address.
func (n *insides) listenPackets(ctx context.Context, at netip.AddrPort) (made *net.UDPConn, err error) {
	err = n.open(true, at, func(lc net.ListenConfig, where netip.AddrPort) (net.Addr, error) {
		c, err := lc.ListenPacket(ctx, "udp", where.String())
		if err != nil {
			return nil, err
		}
		made = c.(*net.UDPConn)
		return c.LocalAddr(), nil
	})
	return made, err
}

// doorAt returns the door of an address whose socket is bound to another address, or to the same.
func doorAt(udp bool, at, bound netip.AddrPort) Door {
	if at == bound {
		bound = netip.AddrPort{}
	}
	return Door{UDP: udp, At: at, Inside: bound}
}

// Doors returns where connections and datagrams come in, sorted by address. They include the sockets of an earlier process
// whose Services are not known yet.
func (s *Server) Doors() (out []Door) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, l := range s.inherited {
		d := inheritedDoor(s.store, at, l)
		d.Inherited = true
		out = append(out, d)
	}
	for _, l := range s.listeners {
		out = append(out, l.door())
	}
	for at, l := range s.udp {
		bound := l.socket.LocalAddr().(*net.UDPAddr).AddrPort()
		out = append(out, doorAt(true, at, netip.AddrPortFrom(bound.Addr().Unmap(), bound.Port())))
	}
	slices.SortFunc(out, func(a, b Door) int {
		order := a.At.Compare(b.At)
		if order == 0 && a.UDP != b.UDP { // TCP first
			order = 1
			if b.UDP {
				order = -1
			}
		}
		return order
	})
	return out
}

// door returns where the connections of a listener come in.
func (l *Listener) door() Door {
	d := doorAt(false, l.at, l.bound)
	d.ClusterIP = l.config.Load().clusterIP
	return d
}

// inheritedDoor is door for a listener of an earlier process, which the store has kept.
func inheritedDoor(store Store, at netip.AddrPort, l *net.TCPListener) Door {
	d := doorAt(false, at, addrPort(l.Addr()))
	d.ClusterIP = strings.HasPrefix(store.NameOf(l), clusterIPPrefix)
	return d
}

// The names of listeners begin with one of these. An earlier release knows only the first.
const (
	vipPrefix       = "lb-"
	clusterIPPrefix = "ip-"
)

// storedName names a listener without colons.
func storedName(at netip.AddrPort, clusterIP bool) string {
	prefix := vipPrefix
	if clusterIP {
		prefix = clusterIPPrefix
	}
	return fmt.Sprintf("%s%x-%d", prefix, at.Addr().AsSlice(), at.Port())
}

// addressOf returns the address that a listener of an earlier process is for: by the name under which the store kept it, or
// where it is bound.
func addressOf(l *net.TCPListener, store Store) netip.AddrPort {
	var text string
	var port uint16
	name := store.NameOf(l)
	if rest, is := strings.CutPrefix(name, clusterIPPrefix); is {
		name = vipPrefix + rest
	}
	if _, err := fmt.Sscanf(name, vipPrefix+"%x-%d", &text, &port); err == nil {
		if a, ok := netip.AddrFromSlice([]byte(text)); ok {
			return netip.AddrPortFrom(a, port)
		}
	}
	return addrPort(l.Addr())
}

// Listening returns where connections are accepted.
func (s *Server) Listening() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Keys(s.listeners), netip.AddrPort.Compare)
}
