package nftables

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Verdict is what a rule does with a packet that matches.
type Verdict string

// The verdicts. A rule without one, such as a counter, has "".
const (
	Accepts Verdict = "accepts"
	Drops   Verdict = "drops"
	Rejects Verdict = "rejects"
	Jumps   Verdict = "jumps"
	Returns Verdict = "returns"
	// Other is one that is not understood, such as to queue for a program.
	Other Verdict = "other"
)

// Decoded is a rule of any program, as far as it is understood.
type Decoded struct {
	Chain  BaseChain
	Handle uint64
	// Source and Destination are the addresses that the rule is for, invalid for all.
	Source, Destination netip.Prefix
	// Family is that of the packets, 0 for both.
	Family Family
	// Conditions are others that are understood; a packet has to meet them all.
	Conditions []Condition
	// Opaque is set if the rule has any other condition: which packets meet it is not known.
	Opaque  bool
	Verdict Verdict
	// Target is the chain, if the rule jumps there. Goto is set if packets do not come back from it.
	Target string
	Goto   bool
}

// Field is what a Condition is about.
type Field string

// The fields of Conditions.
const (
	Protocol   Field = "protocol"
	SourcePort Field = "sport"
	Port       Field = "dport"
	InDevice   Field = "iifname"
	OutDevice  Field = "oifname"
	State      Field = "ct state"
	Status     Field = "ct status"
)

// Protocols are the numbers of protocols by the names that iptables has for them.
func Protocols() map[string]uint8 {
	return map[string]uint8{
		"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP, "icmp": unix.IPPROTO_ICMP, "ipv6-icmp": unix.IPPROTO_ICMPV6,
	}
}

// Condition is one on a field of a packet. Of its values the ones of the field count; none are known if all are empty.
type Condition struct {
	Field Field
	// Text is for people, such as "dport 80".
	Text     string
	Protocol uint8
	// Ports has the first and the last port of each range.
	Ports [][2]uint16
	// Devices are names; a * at the end stands for any rest.
	Devices []string
	Mask    uint32
}

// Ruleset is what the programs of the machine have in nf_tables, for the families IPv4, IPv6 and Inet.
type Ruleset struct {
	// Base are the base chains at a place of packets, by Hook.Number.
	Base map[uint32][]BaseChain
	// Dropping has the base chains whose policy is to drop.
	Dropping map[BaseChain]bool
	// Rules are the rules of each chain, in their order. A rule for several addresses of a set, or with several verdicts, is here once
	// for each.
	Rules map[BaseChain][]Decoded
	// Partial is set if rules were left out.
	Partial bool
}

// Ruleset reads the rules of all chains, except where skip returns true. At most limit rules are kept.
func (c *Conn) Ruleset(limit int, skip func(at BaseChain) bool) (*Ruleset, error) {
	out := &Ruleset{Base: map[uint32][]BaseChain{}, Dropping: map[BaseChain]bool{}, Rules: map[BaseChain][]Decoded{}}
	sets := setReader{conn: c, known: map[setName][]element{}, left: maxElements, decoded: maxDecoded}
	for _, f := range []Family{IPv4, IPv6, Inet} {
		if err := c.baseChains(f, skip, out); err != nil {
			return nil, err
		}
		var rules [][]byte
		var more bool
		err := c.dump(unix.NFT_MSG_GETRULE, Table{Family: f}, func() { rules, more = nil, false }, func(*netlink.Encoder) {},
			func(body []byte) {
				switch {
				case skip(chainOf(f, body)):
				case len(rules) == limit:
					more = true
				default:
					rules = append(rules, bytes.Clone(body))
				}
			})
		if err != nil {
			return nil, err
		}
		out.Partial = out.Partial || more
		for _, body := range rules {
			for _, r := range decode(chainOf(f, body), body, &sets) {
				out.Rules[r.Chain] = append(out.Rules[r.Chain], r)
			}
		}
		if sets.err != nil {
			return nil, sets.err
		}
		limit -= len(rules)
	}
	return out, nil
}

// chainOf returns the chain of a rule.
func chainOf(f Family, rule []byte) BaseChain {
	name := func(typ uint16) string { return netlink.CString(netlink.Attr(rule, typ)) }
	return BaseChain{Table{f, name(unix.NFTA_RULE_TABLE)}, name(unix.NFTA_RULE_CHAIN)}
}

// baseChains adds the base chains of a family to out.
func (c *Conn) baseChains(f Family, skip func(at BaseChain) bool, out *Ruleset) error {
	var chains map[uint32][]BaseChain
	err := c.dump(unix.NFT_MSG_GETCHAIN, Table{Family: f}, func() { chains = map[uint32][]BaseChain{} }, func(*netlink.Encoder) {},
		func(body []byte) {
			table := Table{f, netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_TABLE))}
			at := BaseChain{table, netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_NAME))}
			if h := netlink.Attr(body, unix.NFTA_CHAIN_HOOK); h != nil && !skip(at) {
				number := uint32At(netlink.Attr(h, unix.NFTA_HOOK_HOOKNUM))
				chains[number] = append(chains[number], at)
				policy := netlink.Attr(body, unix.NFTA_CHAIN_POLICY)
				out.Dropping[at] = policy != nil && uint32At(policy) == 0 // NF_DROP
			}
		})
	for number, some := range chains {
		out.Base[number] = append(out.Base[number], some...)
	}
	return err
}

// decode returns the rules that a rule stands for.
func decode(at BaseChain, rule []byte, sets *setReader) []Decoded {
	d := decoder{loaded: map[uint32]loaded{}, low: map[string][]byte{}, sets: sets}
	d.rule.Chain = at
	if h := netlink.Attr(rule, unix.NFTA_RULE_HANDLE); len(h) == 8 {
		d.rule.Handle = binary.BigEndian.Uint64(h)
	}
	netlink.Attrs(netlink.Attr(rule, unix.NFTA_RULE_EXPRESSIONS), func(_ uint16, expr []byte) {
		d.expr(netlink.CString(netlink.Attr(expr, unix.NFTA_EXPR_NAME)), netlink.Attr(expr, unix.NFTA_EXPR_DATA))
	})
	return d.all()
}

// loaded is what a register has.
type loaded struct {
	field string // "saddr", "daddr", "family" or a Field; "" if it is not understood
	bits  int    // of an address that are compared
	six   bool   // the address is one of IPv6
	mask  uint32 // of a state, 0 without
}

// decoder reads the expressions of a rule in their order.
type decoder struct {
	rule   Decoded
	loaded map[uint32]loaded
	sets   *setReader
	// several are the elements of a set of which a packet meets one, and from what field they are of.
	several []element
	from    loaded
	// low is the first value of the range of a field, until its last one comes.
	low map[string][]byte
}

func (d *decoder) expr(name string, v []byte) {
	number := func(typ uint16) uint32 { return uint32At(netlink.Attr(v, typ)) }
	value := func(typ uint16) []byte { return netlink.Attr(netlink.Attr(v, typ), unix.NFTA_DATA_VALUE) }
	switch name {
	case "payload":
		base, offset, n := number(unix.NFTA_PAYLOAD_BASE), number(unix.NFTA_PAYLOAD_OFFSET), number(unix.NFTA_PAYLOAD_LEN)
		d.set(number(unix.NFTA_PAYLOAD_DREG), payloadField(base, offset, n))
	case "meta":
		if netlink.Attr(v, unix.NFTA_META_DREG) != nil {
			d.set(number(unix.NFTA_META_DREG), loaded{field: metaFields[number(unix.NFTA_META_KEY)]})
		}
	case "ct":
		if netlink.Attr(v, unix.NFTA_CT_DREG) != nil {
			d.set(number(unix.NFTA_CT_DREG), loaded{field: ctFields[number(unix.NFTA_CT_KEY)]})
		}
	case "bitwise":
		d.mask(number(unix.NFTA_BITWISE_SREG), number(unix.NFTA_BITWISE_DREG), value(unix.NFTA_BITWISE_MASK))
	case "cmp":
		d.compare(d.loaded[number(unix.NFTA_CMP_SREG)], number(unix.NFTA_CMP_OP), value(unix.NFTA_CMP_DATA))
	case "range":
		bound := func(typ uint16) []byte { return netlink.Attr(netlink.Attr(v, typ), unix.NFTA_DATA_VALUE) }
		d.within(d.loaded[number(unix.NFTA_RANGE_SREG)], bound(unix.NFTA_RANGE_FROM_DATA), bound(unix.NFTA_RANGE_TO_DATA),
			number(unix.NFTA_RANGE_OP) == unix.NFT_RANGE_EQ)
	case "lookup":
		inverted := netlink.Attr(v, unix.NFTA_LOOKUP_FLAGS) != nil && number(unix.NFTA_LOOKUP_FLAGS)&1 != 0 // NFT_LOOKUP_F_INV
		verdicts := netlink.Attr(v, unix.NFTA_LOOKUP_DREG) != nil
		d.lookup(d.loaded[number(unix.NFTA_LOOKUP_SREG)], netlink.CString(netlink.Attr(v, unix.NFTA_LOOKUP_SET)), inverted, verdicts)
	case "queue":
		d.rule.Verdict = Other
	case "immediate":
		d.verdict(netlink.Attr(netlink.Attr(v, unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT))
	case "reject":
		d.rule.Verdict = Rejects
	case "target": // of iptables
		switch netlink.CString(netlink.Attr(v, unix.NFTA_TARGET_NAME)) {
		case "REJECT":
			d.rule.Verdict = Rejects
		case "DROP":
			d.rule.Verdict = Drops
		}
	case "match":
		d.match(netlink.CString(netlink.Attr(v, unix.NFTA_MATCH_NAME)), number(unix.NFTA_MATCH_REV), netlink.Attr(v, unix.NFTA_MATCH_INFO))
	case "counter", "log", "objref", "notrack": // no conditions
	default:
		d.rule.Opaque = true
	}
}

func (d *decoder) set(register uint32, l loaded) { d.loaded[register] = l }

var ctFields = map[uint32]string{unix.NFT_CT_STATE: string(State), unix.NFT_CT_STATUS: string(Status)}

var metaFields = map[uint32]string{
	unix.NFT_META_L4PROTO: "protocol", unix.NFT_META_NFPROTO: "family", unix.NFT_META_PROTOCOL: "family",
	unix.NFT_META_IIFNAME: "iifname", unix.NFT_META_OIFNAME: "oifname", unix.NFT_META_IIF: "iif", unix.NFT_META_OIF: "oif",
}

// payloadField returns the field of a header. A prefix of whole bytes is loaded as so many bytes.
func payloadField(base, offset, n uint32) loaded {
	address := func(field string, most uint32) loaded {
		if n > most {
			return loaded{}
		}
		return loaded{field: field, bits: int(n) * 8, six: most == 16}
	}
	switch {
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == 12:
		return address("saddr", 4)
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == 16:
		return address("daddr", 4)
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == 8 && n > 1: // 1 is the time to live of IPv4
		return address("saddr", 16)
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == 24:
		return address("daddr", 16)
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && (offset == 9 || offset == 6) && n == 1:
		return loaded{field: "protocol"}
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == 0 && n == 2:
		return loaded{field: "sport"}
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == 2 && n == 2:
		return loaded{field: "dport"}
	}
	return loaded{}
}

// mask narrows what a register has to the bits of mask.
func (d *decoder) mask(from, to uint32, mask []byte) {
	l := d.loaded[from]
	switch l.field {
	case "saddr", "daddr":
		ones, ended := 0, false
		for _, b := range mask {
			n := bits.LeadingZeros8(^b)
			if ended && b != 0 || b<<n != 0 {
				l = loaded{}
				break
			}
			ones, ended = ones+n, ended || n < 8
		}
		if l.field != "" {
			l.bits = ones
		}
	case string(State), string(Status):
		if l.mask = 0; len(mask) == 4 {
			l.mask = binary.NativeEndian.Uint32(mask)
		}
	default:
		l = loaded{}
	}
	d.loaded[to] = l
}

// compare adds the condition that a field has a value.
func (d *decoder) compare(l loaded, op uint32, value []byte) {
	equal := op == unix.NFT_CMP_EQ
	c, ok := condition(l.field, value)
	low := d.low[l.field]
	switch {
	case op == unix.NFT_CMP_GTE && low == nil:
		d.low[l.field] = bytes.Clone(value)
	case op == unix.NFT_CMP_LTE && low != nil:
		delete(d.low, l.field)
		d.within(l, low, value, true)
	case l.field == "family" && equal:
		d.family(value)
	case l.field == string(State) || l.field == string(Status):
		if l.mask == 0 || op != unix.NFT_CMP_NEQ || len(bytes.Trim(value, "\x00")) > 0 { // other than "one of these"
			d.rule.Opaque = true
			return
		}
		d.add(Condition{Field: Field(l.field), Text: l.field, Mask: l.mask})
	case (l.field == "saddr" || l.field == "daddr") && equal:
		d.address(l, value, l.bits)
	case !ok || !equal:
		d.opaqueOf(l)
	default:
		d.add(c)
	}
}

// within adds the condition that a field has a value of a range, or none if inside is false.
func (d *decoder) within(l loaded, first, last []byte, inside bool) {
	e := element{first: bytes.Clone(first), last: bytes.Clone(last)}
	c, ok := e.condition(l.field)
	switch {
	case inside && d.several == nil && (l.field == "saddr" || l.field == "daddr"):
		d.several, d.from = []element{e}, l
	case inside && ok:
		d.add(c)
	default:
		d.opaqueOf(l)
	}
}

// family narrows the rule to IPv4 or IPv6, by a number of nf_tables or of Ethernet.
func (d *decoder) family(value []byte) {
	switch {
	case len(value) == 1:
		d.rule.Family = Family(value[0])
	case len(value) == 2 && binary.BigEndian.Uint16(value) == unix.ETH_P_IP:
		d.rule.Family = IPv4
	case len(value) == 2 && binary.BigEndian.Uint16(value) == unix.ETH_P_IPV6:
		d.rule.Family = IPv6
	default:
		d.rule.Opaque = true
	}
}

// condition returns the one that a field has a value, and false for fields and values that are not understood.
func condition(field string, value []byte) (c Condition, ok bool) {
	c.Field = Field(field)
	switch {
	case c.Field == Protocol && len(value) == 1:
		c.Protocol = value[0]
		c.Text = map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[c.Protocol]
		c.Text = cmp.Or(c.Text, fmt.Sprintf("protocol %d", c.Protocol))
	case (c.Field == SourcePort || c.Field == Port) && len(value) == 2:
		port := binary.BigEndian.Uint16(value)
		c.Ports, c.Text = [][2]uint16{{port, port}}, fmt.Sprintf("%s %d", field, port)
	case c.Field == InDevice || c.Field == OutDevice:
		name := string(value)
		if n := strings.IndexByte(name, 0); n >= 0 {
			name = name[:n]
		} else {
			name += "*" // nft compares only the bytes before it
		}
		c.Devices, c.Text = []string{name}, field+" "+name
	case (field == "iif" || field == "oif") && len(value) == 4:
		device, err := net.InterfaceByIndex(int(binary.NativeEndian.Uint32(value)))
		if err != nil { // it is gone
			return Condition{}, false
		}
		c.Field = map[string]Field{"iif": InDevice, "oif": OutDevice}[field]
		c.Devices, c.Text = []string{device.Name}, field+" "+device.Name
	case c.Field == State && len(value) == 4:
		c.Mask, c.Text = binary.NativeEndian.Uint32(value), field
	default:
		return Condition{}, false
	}
	return c, true
}

func (d *decoder) add(c Condition) { d.rule.Conditions = append(d.rule.Conditions, c) }

// opaqueOf adds a condition on a field whose values are not known.
func (d *decoder) opaqueOf(l loaded) {
	if slices.Contains([]Field{Protocol, SourcePort, Port, InDevice, OutDevice}, Field(l.field)) || l.field == "iif" || l.field == "oif" {
		d.add(Condition{Field: Field(l.field), Text: "some values of " + l.field})
		return
	}
	d.rule.Opaque = true
}

// match reads a condition of iptables that nf_tables has no expression for.
func (d *decoder) match(name string, revision uint32, info []byte) {
	const states, flags, inverted, mask = 1, 146, 148, 150 // XT_CONNTRACK_STATE; offsets in xt_conntrack_mtinfo2 and 3
	switch {
	case name == "comment":
	case name == "tcp" || name == "udp" || name == "multiport":
		d.add(Condition{Field: Port, Text: name + " ports"})
	case name == "conntrack" && revision >= 2 && len(info) >= mask+2 &&
		binary.NativeEndian.Uint16(info[flags:]) == states && binary.NativeEndian.Uint16(info[inverted:]) == 0:
		d.add(Condition{Field: State, Text: string(State), Mask: uint32(binary.NativeEndian.Uint16(info[mask:]))})
	default:
		d.rule.Opaque = true
	}
}

// address narrows the rule to a prefix.
func (d *decoder) address(l loaded, value []byte, bits int) {
	size := 4
	if l.six {
		size = 16
	}
	whole := make([]byte, size)
	copy(whole, value)
	addr, ok := netip.AddrFromSlice(whole)
	if !ok || len(value) > size || bits > size*8 {
		d.rule.Opaque = true
		return
	}
	if p := netip.PrefixFrom(addr, bits).Masked(); l.field == "saddr" {
		d.rule.Source = p
	} else {
		d.rule.Destination = p
	}
}

func (d *decoder) verdict(v []byte) {
	if v != nil { // else a value for a register
		d.rule.Verdict, d.rule.Target, d.rule.Goto = verdictOf(v)
	}
}

// verdictOf reads a verdict, and the chain of a jump.
func verdictOf(v []byte) (is Verdict, target string, leaves bool) {
	code := int32(uint32At(netlink.Attr(v, unix.NFTA_VERDICT_CODE)))
	switch code {
	case unix.NFT_JUMP, unix.NFT_GOTO:
		return Jumps, netlink.CString(netlink.Attr(v, unix.NFTA_VERDICT_CHAIN)), code == unix.NFT_GOTO
	case unix.NFT_RETURN:
		return Returns, "", false
	case unix.NFT_CONTINUE:
		return "", "", false
	case 0: // NF_DROP
		return Drops, "", false
	case 1: // NF_ACCEPT
		return Accepts, "", false
	}
	return Other, "", false
}

// String is such as "rule 5 of chain forward of table inet x drops packets to 10.244.0.0/16 (tcp, dport 80)".
func (d *Decoded) String() string {
	text := fmt.Sprintf("rule %d of %s %s packets", d.Handle, d.Chain, d.Verdict)
	if d.Source.IsValid() {
		text += " from " + d.Source.String()
	}
	if d.Destination.IsValid() {
		text += " to " + d.Destination.String()
	}
	var narrow []string
	if !d.Source.IsValid() && !d.Destination.IsValid() && d.Family != 0 {
		narrow = append(narrow, map[Family]string{IPv4: "IPv4", IPv6: "IPv6"}[d.Family])
	}
	for _, c := range d.Conditions {
		narrow = append(narrow, c.Text)
	}
	if len(narrow) > 0 {
		text += " (" + strings.Join(narrow, ", ") + ")"
	}
	return text
}
