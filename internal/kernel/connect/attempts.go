package connect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attempt is a connection of TCP that was translated, and has no answer yet.
type Attempt struct {
	// Front is where its program connects to, To the endpoint that it was led to, and From its own address.
	Front, To, From netip.AddrPort
	namespace       uint64
	family          uint8
	id              netlink.SocketID
}

// Attempts returns the connections of TCP that have no answer and may not stay. stay is asked as by EndSockets, also for
// connections that have an answer. Without attempts it costs a walk over the map, and one over the sockets of each namespace with a
// connection that may not stay. Sockets of the kernel, and the ones that had no room in the map, are not found. With an error the list
// may lack some.
func (p *Programs) Attempts(stay func(front, endpoint netip.AddrPort) bool) ([]Attempt, error) {
	found, _, err := unwanted(p.maps.Streams, stay)
	errs := []error{problem("read connections", err)}
	if len(found) == 0 {
		return nil, errs[0]
	}
	var out []Attempt
	_, err = allNamespaces(p.homePath()).each(found, func(cookie uint64) error {
		attempts, err := found[cookie].attempts(unanswered)
		out = append(out, attempts...)
		return err
	})
	return out, errors.Join(append(errs, err)...)
}

// unanswered returns a struct inet_diag_msg for each socket of TCP that has no answer yet, in the network namespace of the calling thread.
// With netlink.ErrDumpInterrupted it may lack some.
func unanswered(family uint8) ([][]byte, error) {
	req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	req.AddRawData(diagRequest(family, unix.IPPROTO_TCP, 1<<unix.BPF_TCP_SYN_SENT, &netlink.SocketID{}))
	return req.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
}

// attempts returns the ones that list finds, which is unanswered. With an error there may be more.
func (s stale) attempts(list func(family uint8) ([][]byte, error)) (out []Attempt, err error) {
	var errs []error
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := list(family)
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot list all connections without an answer: %w", err))
		}
		for _, body := range all {
			one, ok := diagMessage(body)
			was, translated := s[one.cookie]
			if !ok || !translated || one.to != was.To.addrPort() {
				continue
			}
			out = append(out, Attempt{
				Front: was.frontAddr(), To: one.to, From: one.from, namespace: was.Cookie, family: family, id: one.id(family),
			})
		}
	}
	return out, errors.Join(errs...)
}

// diagSocket is what counts of a struct inet_diag_msg: sock_diag(7).
type diagSocket struct {
	from, to netip.AddrPort
	device   uint32
	cookie   uint64
}

// The layout of struct inet_diag_msg: a family, then the socket's identity.
const (
	diagPorts   = 4
	diagSource  = 8
	diagDest    = 24
	diagDevice  = 40
	diagCookie  = 44
	diagLeast   = 52
	diagAddress = 16
)

func diagMessage(b []byte) (s diagSocket, ok bool) {
	if len(b) < diagLeast {
		return s, false
	}
	n := diagAddress
	if b[0] == unix.AF_INET {
		n = 4
	}
	from, _ := netip.AddrFromSlice(b[diagSource : diagSource+n])
	to, _ := netip.AddrFromSlice(b[diagDest : diagDest+n])
	return diagSocket{
		from:   netip.AddrPortFrom(from.Unmap(), binary.BigEndian.Uint16(b[diagPorts:])),
		to:     netip.AddrPortFrom(to.Unmap(), binary.BigEndian.Uint16(b[diagPorts+2:])),
		device: native.Uint32(b[diagDevice:]), cookie: native.Uint64(b[diagCookie:]),
	}, true
}

// id names the socket, which has the family, to the kernel. One of IPv6 may have IPv4 addresses.
func (s *diagSocket) id(family uint8) netlink.SocketID {
	bytes := func(a netip.Addr) []byte {
		if b := a.As16(); family == unix.AF_INET6 {
			return b[:]
		}
		return a.AsSlice()
	}
	return netlink.SocketID{
		SourcePort: s.from.Port(), DestinationPort: s.to.Port(), Source: bytes(s.from.Addr()), Destination: bytes(s.to.Addr()),
		Interface: s.device, Cookie: [2]uint32{uint32(s.cookie), uint32(s.cookie >> 32)},
	}
}

// EndAttempts ends the sockets of attempts: their programs get ECONNABORTED. It returns how many were ended. It is no error if one is
// gone.
func (p *Programs) EndAttempts(all []Attempt) (ended int, err error) {
	of := map[uint64]stale{}
	for i := range all {
		of[all[i].namespace] = stale{}
	}
	_, err = allNamespaces(p.homePath()).each(of, func(cookie uint64) error {
		var errs []error
		for i := range all {
			a := &all[i]
			if a.namespace != cookie {
				continue
			}
			switch err := destroy(a.family, unix.IPPROTO_TCP, &a.id); {
			case err == nil:
				ended++
			case !errors.Is(err, unix.ENOENT):
				errs = append(errs, fmt.Errorf("cannot end an attempt to connect with %s: %w", a.To, err))
			}
		}
		return errors.Join(errs...)
	})
	return ended, err
}

// Choose returns an endpoint that the programs may choose for a new connection of the attempt's client to its Service. The zero value is
// none: the programs leave the client to the packet filter, or do not know it yet. An endpoint with the client's own address is none,
// since the packet filter masquerades what is sent to it.
func (p *Programs) Choose(a *Attempt) (to netip.AddrPort, err error) {
	// Twice, as the programs do: the list that a frontend had may be gone when its slot is looked up.
	for range 2 {
		front, err := p.maps.route(a.Front)
		if front == nil {
			return to, err
		}
		list, err := p.maps.listFor(front, a, p.cookie)
		if list < 0 {
			return to, err
		}
		count := front.Count[list]
		for i, first := uint32(0), rand.Uint32(); i < count; i++ {
			at, err := p.maps.slot(front.List[list], (first%count+i)%count, a.Front.Addr().Is6())
			if err != nil {
				return to, err
			}
			if at.Port() != 0 && at.Addr() != a.From.Addr() {
				return at, nil
			}
		}
	}
	return to, nil
}

// slot returns the endpoint at a slot of a list, the zero value if the list is gone: slot_of of connect.c.
func (m *programMaps) slot(list, slot uint32, six bool) (netip.AddrPort, error) {
	var b programBlock
	in := inBlock(six)
	err := m.Slots.Lookup(&programSlotKey{List: list, Block: slot / in}, &b)
	if err != nil {
		return netip.AddrPort{}, problem("read an endpoint", gone(err))
	}
	if (b.Six != 0) != six { // another program's
		return netip.AddrPort{}, nil
	}
	return b.at(slot % in), nil
}

// route returns what a connection with an address of TCP finds, nil for nothing: find of connect.c.
func (m *programMaps) route(at netip.AddrPort) (*programFront, error) {
	lookup := func(f Front) (*programFront, error) {
		var front programFront
		k := f.key()
		switch err := m.Fronts.Lookup(&k, &front); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil, nil
		case err != nil:
			return nil, problem("read a frontend", err)
		}
		return &front, nil
	}
	front, err := lookup(Front{Addr: at, Protocol: unix.IPPROTO_TCP})
	if front != nil || err != nil {
		return front, err
	}
	k, is := as16(at.Addr()), uint8(0)
	if err := m.Nodes.Lookup(&k, &is); err != nil {
		return nil, problem("read the node's addresses", gone(err))
	}
	all := netip.IPv4Unspecified()
	if at.Addr().Is6() {
		all = netip.IPv6Unspecified()
	}
	return lookup(Front{Addr: netip.AddrPortFrom(all, at.Port()), Protocol: unix.IPPROTO_TCP, Node: true})
}

// listFor returns which list of a frontend the client of an attempt is sent to, below 0 for none: list_for of connect.c. home is the
// cookie of the node's namespace.
func (m *programMaps) listFor(front *programFront, a *Attempt, home uint64) (list int, err error) {
	if a.namespace == home {
		return int(front.Split), nil
	}
	var c programClient
	if err := m.Clients.Lookup(a.namespace, &c); err != nil || c.State != statePod {
		return -1, problem("read a client", gone(err))
	}
	six := 0
	if a.To.Addr().Is6() {
		six = 1
	}
	switch flags := c.Flags[six]; {
	case front.Split != 0 && flags&flagLocal != 0:
		return 1, nil
	case front.Masquerade == masqueradeNone, front.Masquerade == masqueradeOutside && flags&flagInPods != 0:
		return 0, nil
	}
	return -1, nil
}

// The values of enum in connect.c.
const (
	masqueradeNone    = 0
	masqueradeOutside = 2
)
