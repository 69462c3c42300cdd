package nodelocal

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Priorities of netfilter hooks: before connection tracking (-200), and just
// before the translation of the proxy (-100).
const (
	priorityRaw   = -300
	priorityFirst = -110
)

// protocols that DNS is spoken over.
var protocols = [...]byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP}

// write replaces the table. With sockets, packets from outside of this node are
// led by whether there is a socket; otherwise by the set.
func write(c Config, sockets bool) error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	t := &nftables.Table{Name: table, Family: nftables.TableFamilyINet}
	conn.AddTable(t) // so that deleting cannot fail
	conn.DelTable(t)
	conn.AddTable(t)
	// alive has an element for each family whose server has spoken lately. It
	// begins with them: else what the node asks between this transaction and the
	// server's next packet would be led elsewhere.
	alive := &nftables.Set{Table: t, Name: "alive", KeyType: nftables.TypeNFProto, HasTimeout: true, Dynamic: true, Size: 16}
	if err := conn.AddSet(alive, living(c.Addrs)); err != nil {
		return err
	}
	chain := func(name string, typ nftables.ChainType, hook *nftables.ChainHook, priority int32) func(...expr.Any) {
		ch := conn.AddChain(&nftables.Chain{Name: name, Table: t, Type: typ, Hooknum: hook, Priority: nftables.ChainPriorityRef(nftables.ChainPriority(priority))})
		return func(e ...expr.Any) { conn.AddRule(&nftables.Rule{Table: t, Chain: ch, Exprs: e}) }
	}
	in := chain("prerouting", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, priorityRaw)
	out := chain("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, priorityRaw)
	elsewhere := []func(...expr.Any){
		chain("elsewhere", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, priorityFirst),
		chain("elsewhere-output", nftables.ChainTypeNAT, nftables.ChainHookOutput, priorityFirst),
	}
	family := &expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}
	isLiving := &expr.Lookup{SourceRegister: 1, SetName: alive.Name, SetID: alive.ID}
	lives := &expr.Dynset{SrcRegKey: 1, SetName: alive.Name, SetID: alive.ID, Operation: uint32(unix.NFT_DYNSET_OP_UPDATE), Timeout: Patience}
	for _, a := range c.Addrs {
		for _, p := range protocols {
			to, from := match(a, p, c.Port, false), match(a, p, c.Port, true)
			byTime := append(append([]expr.Any{}, to...), family, isLiving, &expr.Notrack{})
			if sockets {
				// It is about whether there is a socket at all, in any state;
				// ours are not transparent.
				in(append(append([]expr.Any{}, to...),
					&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1},
					&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0}}, &expr.Notrack{})...)
			} else {
				in(byTime...)
			}
			// On its way out a packet has the socket of its sender.
			out(byTime...)
			out(append(from, family, lives, &expr.Notrack{})...)
			for _, rule := range toOthers(to, a, c.Others) {
				for _, add := range elsewhere {
					add(rule...)
				}
			}
		}
	}
	return conn.Flush()
}

// living are the elements of the families of addrs, for as long as a packet of a
// server would leave them.
func living(addrs []netip.Addr) []nftables.SetElement {
	var out []nftables.SetElement
	for _, f := range []struct {
		is4   bool
		proto byte
	}{{true, unix.NFPROTO_IPV4}, {false, unix.NFPROTO_IPV6}} {
		if slices.ContainsFunc(addrs, func(a netip.Addr) bool { return a.Is4() == f.is4 }) {
			out = append(out, nftables.SetElement{Key: []byte{f.proto}, Timeout: Patience})
		}
	}
	return out
}

// match are the expressions for a protocol, and an address and a port as
// destination or source.
func match(a netip.Addr, proto byte, port uint16, source bool) []expr.Any {
	family, offset, size := byte(unix.NFPROTO_IPV4), uint32(16), uint32(4)
	if a.Is6() {
		family, offset, size = unix.NFPROTO_IPV6, 24, 16
	}
	portAt := uint32(2)
	if source {
		offset, portAt = offset-size, 0
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a.AsSlice()},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: portAt, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(port)},
	}
}

// toOthers are the rules that send what matches to one of the others of a's
// family, each with the same chance.
func toOthers(matching []expr.Any, a netip.Addr, others []netip.AddrPort) [][]expr.Any {
	var same []netip.AddrPort
	for _, o := range others {
		if o.Addr().Is4() == a.Is4() && len(same) < MaxOthers {
			same = append(same, o)
		}
	}
	family := uint32(unix.NFPROTO_IPV4)
	if a.Is6() {
		family = unix.NFPROTO_IPV6
	}
	var out [][]expr.Any
	for i, o := range same {
		rule := append([]expr.Any{}, matching...)
		if left := len(same) - i; left > 1 {
			rule = append(rule,
				&expr.Numgen{Register: 1, Modulus: uint32(left), Type: unix.NFT_NG_RANDOM},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)})
		}
		out = append(out, append(rule,
			&expr.Immediate{Register: 1, Data: o.Addr().AsSlice()},
			&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(o.Port())},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: 1, RegProtoMin: 2}))
	}
	return out
}
