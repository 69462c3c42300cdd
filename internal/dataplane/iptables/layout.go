package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/svc"
)

// mode is this mode's name.
const mode = "iptables"

// prefix begins the names of all our chains. Whatever else begins so is
// removed.
const prefix = "FAIRLEAD-"

func ours(chain string) bool { return strings.HasPrefix(chain, prefix) }

// counted begins the names of the sets that count lost packets.
const counted drops.Prefix = "fairlead-iptables-"

// The tables we write to.
const (
	tableNAT    = "nat"
	tableFilter = "filter"
)

// The names of the chains that are always there. Those of the trees' roots have
// rules by what is in the trees.
const (
	chainServices    = prefix + "SERVICES"
	chainOutput      = prefix + "OUTPUT"
	chainPostrouting = prefix + "POSTROUTING"
	chainVIPs        = prefix + "VIPS"
	chainNodePorts   = prefix + "NODEPORTS"
	chainHairpin     = prefix + "HAIRPIN"
	chainMarkMasq    = prefix + "MARK-MASQ"
	chainMarkOutside = prefix + "MARK-OUTSIDE"
	chainRefuse      = prefix + "REFUSE"
	chainDrop        = prefix + "DROP"

	chainInput   = prefix + "INPUT"
	chainForward = prefix + "FORWARD"
	chainInvalid = prefix + "INVALID"
)

// chainTry holds what is tried out. Nothing leads to it, and it is there for a
// moment only.
const chainTry = prefix + "TRY"

// layout is what differs between the two families.
type layout struct {
	family svc.Family
	// alen and pad are the bits of an address, and those before it that make
	// it whole strides.
	alen, pad int
	// fullMask is the netmask of one address.
	fullMask string
	refusal  string
	cfg      *Config
	// counts reports that what is refused or dropped is counted.
	counts bool
}

func newLayout(f svc.Family, cfg *Config) *layout {
	l := &layout{family: f, alen: 32, pad: 1, fullMask: "255.255.255.255", refusal: "icmp-port-unreachable", cfg: cfg}
	if f == svc.IPv6 {
		l.alen, l.pad = 128, 1
		l.fullMask, l.refusal = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "icmp6-port-unreachable"
	}
	return l
}

// What follows the address in the key of a frontend: protocol and port, in whole
// strides.
const (
	protoBits = 3
	portPad   = 2
	portBits  = 16
)

// addrBits is where the address ends in a key.
func (l *layout) addrBits() int { return l.pad + l.alen }

func (l *layout) orderOf(k dataplane.FrontKey) treeKey {
	var key treeKey
	at := 0
	if !k.Node {
		key, at = l.orderOfAddr(k.Addr), l.addrBits()
	}
	key.setBits(at, protoBits, protoIndex(k.Proto))
	key.setBits(at+protoBits+portPad, portBits, uint32(k.Port))
	return key
}

func (l *layout) orderOfAddr(a netip.Addr) treeKey {
	var key treeKey
	for i, b := range a.AsSlice() {
		key.setBits(l.pad+8*i, 8, uint32(b))
	}
	return key
}

func protoIndex(p svc.Protocol) uint32 {
	return uint32(slices.Index(protocols, p))
}

// protocols are in the order of keys.
var protocols = []svc.Protocol{svc.TCP, svc.UDP, svc.SCTP}

func (k *treeKey) bits(at, n int) uint32 {
	v := uint32(0)
	for i := range n {
		v = v<<1 | uint32(k.bit(at+i))
	}
	return v
}

func (l *layout) addrOf(slot *treeKey) netip.Addr {
	b := make([]byte, l.alen/8)
	for i := range b {
		b[i] = byte(slot.bits(l.pad+8*i, 8))
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// A slot is told by an address with the number of its bits that count, then by
// the protocol, then by the first port with the number of its bits that count.

func (l *layout) vipSlot(slot treeKey, bits int) string {
	if bits <= l.addrBits() {
		return l.shorten("V-", hex.EncodeToString(l.addrOf(&slot).AsSlice())+"-"+strconv.Itoa(bits-l.pad))
	}
	return l.shorten("V-", hex.EncodeToString(l.addrOf(&slot).AsSlice())+portSlot(slot, bits, l.addrBits()))
}

func (l *layout) nodeSlot(slot treeKey, bits int) string {
	return prefix + "N-" + portSlot(slot, bits, 0)
}

func (l *layout) hairpinSlot(slot treeKey, bits int) string {
	return l.shorten("H-", hex.EncodeToString(l.addrOf(&slot).AsSlice())+"-"+strconv.Itoa(bits-l.pad))
}

func portSlot(slot treeKey, bits, at int) string {
	name := protocols[slot.bits(at, protoBits)].String()[:1]
	at += protoBits + portPad
	if bits <= at {
		return name
	}
	return fmt.Sprintf("%s%04x-%d", name, slot.bits(at, portBits), bits-at)
}

// ownName names a chain of one frontend.
func (l *layout) ownName(kind byte, k dataplane.FrontKey) string {
	port := fmt.Sprintf("%s%04x", k.Proto.String()[:1], k.Port)
	if k.Node {
		return prefix + string(kind) + "-N-" + port
	}
	return l.shorten(string(kind)+"-", hex.EncodeToString(k.Addr.AsSlice())+port)
}

// shorten makes a name of at most 28 letters, all that iptables allows: for
// IPv6 that is too few for an address, and a hash stands for it.
func (l *layout) shorten(kind, id string) string {
	if l.family == svc.IPv4 {
		return prefix + kind + id
	}
	h := sha256.Sum256([]byte(id))
	return prefix + kind + base32.StdEncoding.EncodeToString(h[:10])
}

// vipMatch matches what has a slot of the tree of virtual IPs, nodeMatch of
// that of node ports.
func (l *layout) vipMatch(slot treeKey, bits int) string {
	if bits <= l.addrBits() {
		return "-d " + l.addrOf(&slot).String() + "/" + strconv.Itoa(bits-l.pad) + " "
	}
	return destination(l.addrOf(&slot)) + portMatch(slot, bits, l.addrBits())
}

func (l *layout) nodeMatch(slot treeKey, bits int) string { return portMatch(slot, bits, 0) }

func portMatch(slot treeKey, bits, at int) string {
	p := protoName(protocols[slot.bits(at, protoBits)])
	at += protoBits + portPad
	if bits <= at {
		return "-p " + p + " "
	}
	first := slot.bits(at, portBits)
	m := "-p " + p + " -m " + p + " --dport " + strconv.Itoa(int(first))
	if size := uint32(1) << (at + portBits - bits); size > 1 {
		m += ":" + strconv.Itoa(int(first+size-1))
	}
	return m + " "
}

// hairpin is a local endpoint's address, an item of the tree of them.
type hairpin struct {
	addr  netip.Addr
	order treeKey
}

func (h *hairpin) key() *treeKey { return &h.order }
func (h *hairpin) weight() int   { return 1 }
func (h *hairpin) guarded() bool { return false }

func (l *layout) mark(bits ...int) string {
	v := uint32(0)
	for _, b := range bits {
		v |= 1 << b
	}
	return fmt.Sprintf("%#x", v)
}

// rules makes the lines of a chain from pairs of match and target.
func rules(chain string, pairs ...string) []byte {
	w := writer{chain: chain}
	for i := 0; i < len(pairs); i += 2 {
		w.rule(pairs[i], pairs[i+1])
	}
	return w.b
}

// base writes the chains that are always there, but for the roots of trees.
func (l *layout) base(set *dataplane.Settings, emit func(table, name string, lines []byte)) {
	m, r := l.mark(l.cfg.MasqueradeBit), l.mark(l.cfg.RejectBit)
	both := l.mark(l.cfg.MasqueradeBit, l.cfg.RejectBit)
	nat := func(name string, pairs ...string) { emit(tableNAT, name, rules(name, pairs...)) }
	// ACCEPT ends the way through the table: no later rule decides about what was
	// decided.
	nat(chainRefuse, "", "-j MARK --set-xmark "+r+"/"+both, "", "-j ACCEPT")
	nat(chainDrop, "", "-j MARK --set-xmark "+both+"/"+both, "", "-j ACCEPT")
	nat(chainMarkMasq, "", "-j MARK --set-xmark "+m+"/"+m)
	var outside []string
	for _, i := range set.PodInterfaces {
		outside = append(outside, input(i), "-j RETURN")
	}
	for _, p := range set.Pods {
		outside = append(outside, source(p), "-j RETURN")
	}
	nat(chainMarkOutside, append(outside, "", "-j MARK --set-xmark "+m+"/"+m)...)

	var services []string
	if set.Localhost {
		// No other client may reach a frontend there.
		services = append(services, "! -s 127.0.0.0/8 -d 127.0.0.0/8 ", "-j RETURN")
	}
	services = append(services, "", "-j "+chainVIPs)
	var output []string
	for _, a := range set.NodeAddrs {
		if a.IsLoopback() {
			// No other client may reach it.
			output = append(output, destination(a), "-g "+chainNodePorts)
		} else {
			services = append(services, destination(a), "-g "+chainNodePorts)
		}
	}
	nat(chainServices, services...)
	nat(chainOutput, append(output, "", "-j "+chainServices)...)

	var post []string
	if set.Localhost {
		// What left 127.0.0.0/8 for an endpoint elsewhere gets an address that
		// can be answered.
		post = append(post, "-s 127.0.0.0/8 ! -o lo -m conntrack --ctstate DNAT ", "-j MASQUERADE --random-fully")
	}
	nat(chainPostrouting, append(post,
		"-m conntrack --ctstate DNAT ", "-j "+chainHairpin,
		"-m mark ! --mark "+m+"/"+m+" ", "-j RETURN",
		"", "-j MARK --set-xmark "+m+"/0x0",
		"", "-j MASQUERADE --random-fully")...)
	l.baseFilter(set, m, r, both, emit)
}

// baseFilter writes the chains of table filter. They carry out what the
// packet's mark says, since iptables cannot refuse packets in table nat.
func (l *layout) baseFilter(set *dataplane.Settings, m, r, both string, emit func(table, name string, lines []byte)) {
	filter := func(name string, pairs ...string) { emit(tableFilter, name, rules(name, pairs...)) }
	// Nothing but what ends here is counted; it still has the destination that
	// it was sent to.
	count := func(how drops.Fate) []string {
		if !l.counts {
			return nil
		}
		return []string{"", counted.Rule(l.family, how)}
	}
	filter(chainDrop, append(count(drops.Dropped), "", "-j DROP")...)
	filter(chainRefuse, slices.Concat(
		[]string{"-m mark --mark " + both + "/" + both + " ", "-g " + chainDrop}, count(drops.Rejected),
		[]string{"-p tcp ", "-j REJECT --reject-with tcp-reset", "", "-j REJECT --reject-with " + l.refusal})...)
	refuse := []string{"-m mark --mark " + r + "/" + r + " ", "-g " + chainRefuse}
	// What is sent to the addresses of Services, but to none that there is,
	// must not leave this node. Everything else has another destination by now.
	var unserved []string
	for _, p := range set.Services {
		unserved = append(unserved, "-d "+p.String()+" -m conntrack --ctstate NEW ", "-j DROP")
	}
	var input []string
	if set.Guard {
		// route_localnet must not open the node's own 127.0.0.0/8 to other
		// machines (kubernetes/kubernetes#90259).
		input = []string{"-d 127.0.0.0/8 ! -i lo -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT ", "-j DROP"}
	}
	filter(chainInput, append(input, refuse...)...)
	filter(chainOutput, slices.Concat(refuse, unserved)...)
	var invalid []string
	if l.cfg.DropInvalid {
		// It would arrive untranslated, and the client would answer the unknown peer
		// with a reset (kubernetes/kubernetes#74839).
		invalid = []string{"-m conntrack --ctstate INVALID ", "-j " + chainInvalid}
	}
	// Where a neighbour's policy is to forward nothing, Services work all the
	// same, as with kube-proxy.
	open := "-m conntrack --ctstate RELATED,ESTABLISHED "
	if !l.cfg.AcceptEstablished {
		open += "-m conntrack --ctstate DNAT "
	}
	filter(chainForward, slices.Concat(refuse, unserved, invalid, []string{
		"-m mark --mark " + m + "/" + m + " ", "-j ACCEPT", open, "-j ACCEPT",
	})...)
}

// comment marks the rules in chains that are not ours.
const comment = `-m comment --comment "fairlead services" `

// jumps are the rules in chains that are not ours: table, chain, rule.
func jumps() [][3]string {
	return [][3]string{
		{tableNAT, "PREROUTING", comment + "-j " + chainServices},
		{tableNAT, "OUTPUT", comment + "-j " + chainOutput},
		{tableNAT, "POSTROUTING", comment + "-j " + chainPostrouting},
		{tableFilter, "INPUT", comment + "-j " + chainInput},
		{tableFilter, "FORWARD", comment + "-j " + chainForward},
		{tableFilter, "OUTPUT", comment + "-j " + chainOutput},
	}
}
