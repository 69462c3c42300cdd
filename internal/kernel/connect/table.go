package connect

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Front is what connections are told apart by: a frontend's address, or a node port, whose Addr is the
// unspecified one of its family.
type Front struct {
	Addr     netip.AddrPort
	Protocol uint8
	Node     bool
}

// Masquerade is which clients' connections would leave with the node's address; dataplane.Masquerading has the same
// values.
type Masquerade uint8

// Route is where a Front leads: to the slots of List[0] or, with Split, for clients on this node and its Pods, List[1]. A Count
// of 0 leaves the clients to the packet filter.
type Route struct {
	List, Count [2]uint32
	Split       bool
	Masquerade  Masquerade
}

// ErrFull is wrapped by the error where a map has no room for more.
var ErrFull = errors.New("the map has no room")

func (f *Front) key() programFrontKey {
	k := programFrontKey{Addr: as16(f.Addr.Addr()), Port: swapped(f.Addr.Port()), Protocol: f.Protocol}
	if f.Node {
		k.Node = 1
	}
	return k
}

// swapped turns a port into the order of the network, or back.
func swapped(p uint16) uint16 { return p<<8 | p>>8 }

// Fronts calls f with every frontend that is installed.
func (p *Programs) Fronts(f func(Front, Route)) error {
	return problem("read frontends", each(p.maps.Fronts, func(k *programFrontKey, v *programFront) {
		f(Front{Addr: netip.AddrPortFrom(addrOf(k.Addr), swapped(k.Port)), Protocol: k.Protocol, Node: k.Node != 0},
			Route{List: v.List, Count: v.Count, Split: v.Split != 0, Masquerade: Masquerade(v.Masquerade)})
	}))
}

// PutFront installs a frontend in one step: a connection meets its old route or its new one.
func (p *Programs) PutFront(f Front, r Route) error {
	v := programFront{List: r.List, Count: r.Count, Masquerade: uint8(r.Masquerade)}
	if r.Split {
		v.Split = 1
	}
	k := f.key()
	return problem("write a frontend", p.maps.Fronts.Put(&k, &v))
}

// DelFront removes a frontend; none is no error.
func (p *Programs) DelFront(f Front) error {
	k := f.key()
	return problem("remove a frontend", gone(p.maps.Fronts.Delete(&k)))
}

// Slots calls f with every slot that is installed, in no order, and with the zero AddrPort for a block of slots that are all empty.
func (p *Programs) Slots(f func(list, slot uint32, at netip.AddrPort)) error {
	return problem("read endpoints", each(p.maps.Slots, func(k *programSlotKey, v *programBlock) {
		in := inBlock(v.Six != 0)
		if v.Port == [inBlock4]uint16{} {
			f(k.List, k.Block*in, netip.AddrPort{})
		}
		for i := range in {
			if v.Port[i] != 0 {
				f(k.List, k.Block*in+i, v.at(i))
			}
		}
	}))
}

// PutSlots installs the endpoints of a list, of one family, that no frontend leads to yet.
func (p *Programs) PutSlots(list uint32, endpoints []netip.AddrPort) error {
	if len(endpoints) == 0 {
		return nil
	}
	keys := blocksOf(list, endpoints)
	values, in := make([]programBlock, len(keys)), int(inBlock(isIPv6(endpoints)))
	for i, at := range endpoints {
		values[i/in].put(i%in, at)
	}
	_, err := p.maps.Slots.BatchUpdate(keys, values, nil)
	return problem("write endpoints", err)
}

// DelSlots removes the endpoints of a list that no frontend leads to any more.
func (p *Programs) DelSlots(list uint32, endpoints []netip.AddrPort) error {
	keys := blocksOf(list, endpoints)
	for i := range keys {
		if err := gone(p.maps.Slots.Delete(&keys[i])); err != nil {
			return problem("remove endpoints", err)
		}
	}
	return nil
}

// inBlock4 and inBlock6 are IN_BLOCK4 and IN_BLOCK6 of bpf/connect.c.
const inBlock4, inBlock6 = 16, 4

func inBlock(six bool) uint32 {
	if six {
		return inBlock6
	}
	return inBlock4
}

// isIPv6 reports the family of a list, which may have holes. One with nothing else may be of either: the smaller blocks of IPv6 have
// the numbers of all blocks of IPv4 among theirs.
func isIPv6(endpoints []netip.AddrPort) bool {
	return !slices.ContainsFunc(endpoints, func(at netip.AddrPort) bool { return at.Addr().Is4() })
}

// blocksOf returns the keys of a list's blocks.
func blocksOf(list uint32, endpoints []netip.AddrPort) []programSlotKey {
	in := int(inBlock(isIPv6(endpoints)))
	keys := make([]programSlotKey, (len(endpoints)+in-1)/in)
	for i := range keys {
		keys[i] = programSlotKey{List: list, Block: uint32(i)}
	}
	return keys
}

// put fills the slot i.
func (b *programBlock) put(i int, at netip.AddrPort) {
	e := endpointOf(at)
	b.Port[i] = e.Port
	if at.Addr().Is6() {
		b.Six = 1
		copy(b.Word[4*i:], e.Addr.Word[:])
		return
	}
	b.Word[i] = e.Addr.Word[3]
}

// at returns what is in the slot i. Port 0 means that the slot is empty.
func (b *programBlock) at(i uint32) netip.AddrPort {
	e := programEndpoint{Addr: as16(netip.IPv4Unspecified()), Port: b.Port[i]}
	if b.Six != 0 {
		e.Addr.Word = [4]uint32(b.Word[4*i:])
	} else {
		e.Addr.Word[3] = b.Word[i]
	}
	return e.addrPort()
}

// Own calls f with every endpoint whose own connections are left to the packet filter.
func (p *Programs) Own(f func(list uint32, a netip.Addr)) error {
	return problem("read endpoints of this node", each(p.maps.Own, func(k *programOwnKey, _ *uint8) { f(k.List, addrOf(k.Addr)) }))
}

// PutOwn leaves connections that the endpoint a makes to its own list to the packet filter.
func (p *Programs) PutOwn(list uint32, a netip.Addr) error {
	return problem("write an endpoint of this node", p.maps.Own.Put(&programOwnKey{List: list, Addr: as16(a)}, uint8(1)))
}

// DelOwn undoes PutOwn.
func (p *Programs) DelOwn(list uint32, a netip.Addr) error {
	return problem("remove an endpoint of this node", gone(p.maps.Own.Delete(&programOwnKey{List: list, Addr: as16(a)})))
}

// Members calls f with every endpoint that may keep the sockets of a list.
func (p *Programs) Members(f func(list uint32, at netip.AddrPort)) error {
	return problem("read serving endpoints", each(p.maps.Members, func(k *programMemberKey, _ *uint8) { f(k.List, k.At.addrPort()) }))
}

// PutMembers lets sockets that send datagrams to an endpoint go on when their frontend leads to the list.
func (p *Programs) PutMembers(list uint32, endpoints []netip.AddrPort) error {
	if len(endpoints) == 0 {
		return nil
	}
	keys, values := make([]programMemberKey, len(endpoints)), make([]uint8, len(endpoints))
	for i, at := range endpoints {
		keys[i] = programMemberKey{List: list, At: endpointOf(at)}
	}
	_, err := p.maps.Members.BatchUpdate(keys, values, nil)
	return problem("write serving endpoints", err)
}

// DelMember undoes PutMembers for one endpoint.
func (p *Programs) DelMember(list uint32, at netip.AddrPort) error {
	return problem("remove a serving endpoint", gone(p.maps.Members.Delete(&programMemberKey{List: list, At: endpointOf(at)})))
}

func endpointOf(at netip.AddrPort) programEndpoint {
	return programEndpoint{Addr: as16(at.Addr()), Port: swapped(at.Port())}
}

func (e programEndpoint) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(addrOf(e.Addr), swapped(e.Port))
}

// Nodes returns the addresses on which node ports answer, as installed.
func (p *Programs) Nodes() (out []netip.Addr, err error) {
	err = each(p.maps.Nodes, func(k *programAddress, _ *uint8) { out = append(out, addrOf(*k)) })
	return out, problem("read the node's addresses", err)
}

// PutNode has node ports answer on a.
func (p *Programs) PutNode(a netip.Addr) error {
	k := as16(a)
	return problem("write an address of the node", p.maps.Nodes.Put(&k, uint8(1)))
}

// DelNode undoes PutNode.
func (p *Programs) DelNode(a netip.Addr) error {
	k := as16(a)
	return problem("remove an address of the node", gone(p.maps.Nodes.Delete(&k)))
}

// firstBatch is how many entries the first system call reads, and batch how many the later ones do: most reads are of maps that
// have few entries.
const firstBatch, batch = 256, 4096

// batched is what each needs of an ebpf.Map.
type batched interface {
	MaxEntries() uint32
	BatchLookup(cursor *ebpf.MapBatchCursor, keys, values any, opts *ebpf.BatchOptions) (int, error)
}

// each calls f for each entry of a map.
func each[K, V any](m batched, f func(*K, *V)) error {
	size := min(firstBatch, int(m.MaxEntries()))
	keys, values := make([]K, size), make([]V, size)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			f(&keys[i], &values[i])
		}
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist): // the end
			return nil
		case errors.Is(err, unix.ENOSPC): // more entries have the same hash
			keys, values = make([]K, 2*len(keys)), make([]V, 2*len(values))
		case err != nil:
			return err
		case len(keys) < batch:
			keys, values = make([]K, 2*len(keys)), make([]V, 2*len(values))
		}
	}
}

func gone(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

func problem(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("cannot %s: %w: %w", what, ErrFull, err)
	}
	return fmt.Errorf("cannot %s: %w", what, err)
}
