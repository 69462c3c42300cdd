package nftables

import (
	"encoding/binary"
	"fmt"
	"math/bits"
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
)

// Decoded is a rule of any program, as far as it is understood.
type Decoded struct {
	Chain  BaseChain
	Handle uint64
	// Source and Destination are the addresses that the rule is for, invalid for all.
	Source, Destination netip.Prefix
	// Narrow are conditions on ports, protocols, devices and states that some packets of a new connection meet, for people.
	Narrow []string
	// Opaque is set if the rule has any other condition: which packets meet it is not known.
	Opaque  bool
	Verdict Verdict
	Target  string // the chain, if the rule jumps there
}

// Ruleset is what the programs of the machine have in nf_tables, for the families IPv4, IPv6 and Inet.
type Ruleset struct {
	// Base are the base chains at a place of packets, by Hook.Number.
	Base map[uint32][]BaseChain
	// Rules are the rules of each chain, in their order.
	Rules map[BaseChain][]Decoded
}

// Ruleset reads the rules of all tables, except where skip returns true. At most limit rules are kept.
func (c *Conn) Ruleset(limit int, skip func(table string) bool) (*Ruleset, error) {
	out := &Ruleset{Base: map[uint32][]BaseChain{}, Rules: map[BaseChain][]Decoded{}}
	for _, f := range []Family{IPv4, IPv6, Inet} {
		var chains map[uint32][]BaseChain
		err := c.dump(unix.NFT_MSG_GETCHAIN, Table{Family: f}, func() { chains = map[uint32][]BaseChain{} }, func(*netlink.Encoder) {},
			func(body []byte) {
				table := Table{f, netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_TABLE))}
				at := BaseChain{table, netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_NAME))}
				if h := netlink.Attr(body, unix.NFTA_CHAIN_HOOK); h != nil && !skip(at.Table.Name) {
					number := uint32At(netlink.Attr(h, unix.NFTA_HOOK_HOOKNUM))
					chains[number] = append(chains[number], at)
				}
			})
		if err != nil {
			return nil, err
		}
		for number, some := range chains {
			out.Base[number] = append(out.Base[number], some...)
		}
		var rules []Decoded
		err = c.dump(unix.NFT_MSG_GETRULE, Table{Family: f}, func() { rules = nil }, func(*netlink.Encoder) {}, func(body []byte) {
			table := netlink.CString(netlink.Attr(body, unix.NFTA_RULE_TABLE))
			if len(rules) < limit && !skip(table) {
				rules = append(rules, decode(Table{f, table}, body))
			}
		})
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			out.Rules[r.Chain] = append(out.Rules[r.Chain], r)
		}
		limit -= len(rules)
	}
	return out, nil
}

func decode(t Table, rule []byte) Decoded {
	d := decoder{loaded: map[uint32]loaded{}}
	d.rule.Chain = BaseChain{t, netlink.CString(netlink.Attr(rule, unix.NFTA_RULE_CHAIN))}
	if h := netlink.Attr(rule, unix.NFTA_RULE_HANDLE); len(h) == 8 {
		d.rule.Handle = binary.BigEndian.Uint64(h)
	}
	netlink.Attrs(netlink.Attr(rule, unix.NFTA_RULE_EXPRESSIONS), func(_ uint16, expr []byte) {
		d.expr(netlink.CString(netlink.Attr(expr, unix.NFTA_EXPR_NAME)), netlink.Attr(expr, unix.NFTA_EXPR_DATA))
	})
	return d.rule
}

// loaded is what a register has.
type loaded struct {
	field string // "saddr", "daddr", or another name of the field; "" if it is not understood
	bits  int    // of an address that are compared
	six   bool   // the address is one of IPv6
}

// decoder reads the expressions of a rule in their order.
type decoder struct {
	rule   Decoded
	loaded map[uint32]loaded
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
			d.set(number(unix.NFTA_CT_DREG), loaded{field: map[uint32]string{unix.NFT_CT_STATE: ctState}[number(unix.NFTA_CT_KEY)]})
		}
	case "bitwise":
		d.mask(number(unix.NFTA_BITWISE_SREG), number(unix.NFTA_BITWISE_DREG), value(unix.NFTA_BITWISE_MASK))
	case "cmp":
		d.compare(d.loaded[number(unix.NFTA_CMP_SREG)], number(unix.NFTA_CMP_OP), value(unix.NFTA_CMP_DATA))
	case "range":
		d.among(d.loaded[number(unix.NFTA_RANGE_SREG)])
	case "lookup":
		d.among(d.loaded[number(unix.NFTA_LOOKUP_SREG)])
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
		switch what := netlink.CString(netlink.Attr(v, unix.NFTA_MATCH_NAME)); what {
		case "comment":
		case "tcp", "udp", "multiport":
			d.rule.Narrow = append(d.rule.Narrow, what+" ports")
		default:
			d.rule.Opaque = true
		}
	case "counter", "log", "objref", "notrack": // no conditions
	default:
		d.rule.Opaque = true
	}
}

func (d *decoder) set(register uint32, l loaded) { d.loaded[register] = l }

// ctState is the field of the state of a connection.
const ctState = "ct state"

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
		return loaded{field, int(n) * 8, most == 16}
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
	case ctState:
		const newOrEstablished = 8 | 2 // NF_CT_STATE_BIT of the kernel
		if len(mask) != 4 || binary.NativeEndian.Uint32(mask)&newOrEstablished == 0 {
			l = loaded{}
		}
	default:
		l = loaded{}
	}
	d.loaded[to] = l
}

// compare adds the condition that a field has a value.
func (d *decoder) compare(l loaded, op uint32, value []byte) {
	equal := op == unix.NFT_CMP_EQ
	switch {
	case l.field == "family":
	case l.field == ctState:
		d.narrow(ctState)
	case l.field == "" || !equal:
		d.rule.Opaque = true
	case l.field == "saddr" || l.field == "daddr":
		d.address(l, value)
	case l.field == "protocol" && len(value) == 1:
		d.narrow(map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[value[0]])
	case (l.field == "sport" || l.field == "dport") && len(value) == 2:
		d.narrow(fmt.Sprintf("%s %d", l.field, binary.BigEndian.Uint16(value)))
	case l.field == "iifname" || l.field == "oifname":
		d.narrow(l.field + " " + netlink.CString(value))
	default:
		d.narrow(l.field)
	}
}

func (d *decoder) narrow(text string) {
	if text == "" {
		text = "a protocol"
	}
	d.rule.Narrow = append(d.rule.Narrow, text)
}

// among adds the condition that a field is one of several values.
func (d *decoder) among(l loaded) {
	if slices.Contains([]string{"sport", "dport", "protocol", "iifname", "oifname"}, l.field) {
		d.narrow("several values of " + l.field)
		return
	}
	d.rule.Opaque = true
}

func (d *decoder) address(l loaded, value []byte) {
	size := 4
	if l.six {
		size = 16
	}
	whole := make([]byte, size)
	copy(whole, value)
	addr, ok := netip.AddrFromSlice(whole)
	if !ok || len(value) > size || l.bits > size*8 {
		d.rule.Opaque = true
		return
	}
	if p := netip.PrefixFrom(addr, l.bits).Masked(); l.field == "saddr" {
		d.rule.Source = p
	} else {
		d.rule.Destination = p
	}
}

func (d *decoder) verdict(v []byte) {
	if v == nil {
		return // a value for a register
	}
	switch int32(uint32At(netlink.Attr(v, unix.NFTA_VERDICT_CODE))) {
	case unix.NFT_JUMP, unix.NFT_GOTO:
		d.rule.Verdict, d.rule.Target = Jumps, netlink.CString(netlink.Attr(v, unix.NFTA_VERDICT_CHAIN))
	case unix.NFT_RETURN:
		d.rule.Verdict = Returns
	case 0: // NF_DROP
		d.rule.Verdict = Drops
	case 1: // NF_ACCEPT
		d.rule.Verdict = Accepts
	default:
		d.rule.Opaque = true
	}
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
	if len(d.Narrow) > 0 {
		text += " (" + strings.Join(d.Narrow, ", ") + ")"
	}
	return text
}
