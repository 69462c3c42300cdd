package link

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// overlayTable is the nft table of Overlay.
var overlayTable = nftables.Table{Family: nftables.Inet, Name: "fairlead-overlay"}

// overlayFilter lets packets of VXLAN in only from the peers: VXLAN itself checks no
// sender. It drops what pods send to that port of machines: it would arrive with the address
// of this node, as a packet of VXLAN with any sender inside. It keeps connection tracking
// from the packets of VXLAN, and with it all NAT of the outer packet: a mark of the inner one
// would have it masqueraded, which before Linux 5.7 broke its checksum (Linux ea64d8d6c675).
// And it gives packets that leave by the overlay, from addresses that are no pod's, one of
// this node's among its pods: the answer would not come back by the overlay otherwise.
type overlayFilter struct {
	port uint16
	conn *nftables.Conn
	// written are the peers of the table, nil if it must be written as a whole, as when
	// devices or pods differ.
	written map[netip.Addr]bool
	devices map[string]bool
	pods    []netip.Prefix
}

func (f *overlayFilter) close() error {
	if f.conn == nil {
		return nil
	}
	return f.conn.Close()
}

// set writes what differs from the last call.
func (f *overlayFilter) set(peers []Peer, devices map[string]bool, pods []netip.Prefix) error {
	if len(peers) == 0 {
		f.written = nil
		return RemoveOverlayFilter()
	}
	if f.conn == nil {
		conn, err := nftables.Dial()
		if err != nil {
			return err
		}
		f.conn = conn
	}
	want := map[netip.Addr]bool{}
	for _, p := range peers {
		want[p.Addr] = true
	}
	b := nftables.NewBatch()
	whole := f.written == nil || !maps.Equal(devices, f.devices) || !slices.Equal(pods, f.pods)
	if whole {
		f.written = nil
		f.write(b, devices, pods)
	}
	for a := range f.written {
		if !want[a] {
			b.DelElem(overlayTable, peersOf(a), a.AsSlice())
		}
	}
	for a := range want {
		if !f.written[a] {
			b.AddElem(overlayTable, peersOf(a), &nftables.Elem{Key: a.AsSlice()})
		}
	}
	if b.Empty() {
		return nil
	}
	if err := f.commit(b, whole); err != nil {
		f.written = nil // the table differs from the last one written
		return err
	}
	f.written, f.devices, f.pods = want, maps.Clone(devices), slices.Clone(pods)
	return nil
}

func (f *overlayFilter) commit(b *nftables.Batch, whole bool) error {
	if whole {
		return f.conn.CommitTable(overlayTable, b)
	}
	if err := f.conn.Commit(b); err != nil {
		return fmt.Errorf("change nft table %s: %w", overlayTable, err)
	}
	return nil
}

func peersOf(a netip.Addr) string {
	if a.Is6() {
		return "peers6"
	}
	return "peers4"
}

// write makes the table without peers.
func (f *overlayFilter) write(b *nftables.Batch, devices map[string]bool, pods []netip.Prefix) {
	t := overlayTable
	b.Tag(nftables.InetTables)
	b.ReplaceTable(t, "VXLAN to pods of nodes on other networks, only from and to these nodes")
	const input, forward, before, output, post = "input", "forward", "prerouting", "output", "postrouting"
	b.Tag("a chain, or an expression of a rule")
	for name, hook := range map[string]nftables.Hook{
		before: {Type: "filter", Number: nftables.Prerouting, Priority: nftables.PriorityRaw},
		output: {Type: "filter", Number: nftables.Output, Priority: nftables.PriorityRaw},
		input:  {Type: "filter", Number: nftables.Input},
		// Before anything that gives pods' packets the node's address.
		forward: {Type: "filter", Number: nftables.Forward},
		post:    {Type: "nat", Number: nftables.Postrouting, Priority: nftables.PrioritySrcNAT - 1},
	} {
		b.AddChain(t, nftables.Chain{Name: name, Hook: &hook})
	}
	port := binary.BigEndian.AppendUint16(nil, f.port)
	for _, whole := range []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)} {
		h := nftables.HeaderOf(svc.FamilyOf(whole.Addr()))
		set := peersOf(whole.Addr())
		b.AddSet(t, nftables.Set{Name: set, Key: []nftables.Type{h.Addr}, Comment: "nodes on other networks"})
		vxlan := func(sources netip.Prefix) *nftables.Program {
			return h.InetPrefix(h.Source, sources).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{unix.IPPROTO_UDP}).
				Port(0, nftables.Destination).Equal(0, port)
		}
		peer := func(offset uint32) *nftables.Program { return vxlan(whole).Network(0, offset, h.Len).InSet(set, 0) }
		b.AddRule(t, before, nftables.NewRule(peer(h.Source).Untracked(), "udp dport %d %s saddr @%s notrack", f.port, h.Word, set))
		b.AddRule(t, output, nftables.NewRule(peer(h.Destination).Untracked(), "udp dport %d %s daddr @%s notrack", f.port, h.Word, set))
		b.AddRule(t, input, nftables.NewRule(peer(h.Source).Return(), "udp dport %d %s saddr @%s return", f.port, h.Word, set))
		ranges := slices.DeleteFunc(slices.Clone(pods), func(p netip.Prefix) bool { return p.Addr().Is4() != whole.Addr().Is4() })
		for _, p := range ranges {
			b.AddRule(t, forward, nftables.NewRule(h.InetPrefix(h.Destination, p).Return(), "%s daddr %s return", h.Word, p))
			b.AddRule(t, post, nftables.NewRule(h.InetPrefix(h.Source, p).Return(), "%s saddr %s return", h.Word, p))
		}
		// To any address but pods': a node has more than the one by which it is a peer.
		for _, p := range ranges {
			b.AddRule(t, forward, nftables.NewRule(vxlan(p).Drop(), "%s saddr %s udp dport %d drop", h.Word, p, f.port))
		}
	}
	b.AddRule(t, input, nftables.NewRule(new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{unix.IPPROTO_UDP}).
		Port(0, nftables.Destination).Equal(0, port).Drop(), "udp dport %d drop", f.port))
	for name := range devices {
		b.AddRule(t, post, masqueradeBy(name))
	}
}

// masqueradeBy gives packets that leave by a device its address.
func masqueradeBy(device string) nftables.Rule {
	match := new(nftables.Program).Meta(0, nftables.MetaOifName).Equal(0, nftables.DeviceKey(device))
	return nftables.NewRule(match.Masquerade(), "oifname %s masquerade", device)
}

// RemoveOverlayFilter removes the rules of an Overlay. It is no error if there are none.
func RemoveOverlayFilter() error { return nftables.RemoveTable(overlayTable) }
