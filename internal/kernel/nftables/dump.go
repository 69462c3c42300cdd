package nftables

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// dump asks until the answer is undisturbed by other changes, a limited number
// of times: on a machine where rules change all the time, what is
// read last is as good as any. begin is called before each try.
func (c *Conn) dump(typ uint16, t Table, begin func(), attrs func(e *netlink.Encoder), f func(body []byte)) error {
	for try := 1; ; try++ {
		var e netlink.Encoder
		e.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|typ, unix.NLM_F_DUMP, uint8(t.Family), 0)
		attrs(&e)
		e.End()
		begin()
		err := c.nl.Dump(e.Buf, f)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.ENOENT):
			begin()
			return nil // the table or set is not there: nothing to read
		case errors.Is(err, netlink.ErrInterrupted) && try >= attempts:
			return nil
		case !errors.Is(err, netlink.ErrInterrupted) && !transient(err):
			return err
		}
	}
}

// Generation is a number that every transaction in this network namespace
// raises by one, whoever makes it; only packets change sets without it.
func (c *Conn) Generation() (uint32, error) {
	for try := 1; ; try++ {
		var e netlink.Encoder
		e.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, unix.NLM_F_ACK, unix.AF_UNSPEC, 0)
		e.End()
		var gen uint32
		errs := c.nl.Ask(e.Buf, func(body []byte) { gen = uint32At(netlink.Attr(body, 1)) }) // NFTA_GEN_ID
		if len(errs) == 0 {
			return gen, nil
		}
		if !transient(errs[0]) || try == attempts {
			return 0, errs[0]
		}
	}
}

// Table returns the comment of table t and whether there is such a table.
func (c *Conn) Table(t Table) (comment string, found bool, err error) {
	err = c.dump(unix.NFT_MSG_GETTABLE, t, func() { found = false }, func(*netlink.Encoder) {}, func(body []byte) {
		if netlink.CString(netlink.Attr(body, unix.NFTA_TABLE_NAME)) == t.Name {
			found = true
			comment = netlink.CString(udataFind(netlink.Attr(body, tableUserdata), udComment))
		}
	})
	return comment, found, err
}

// Chains returns the chains of table t.
func (c *Conn) Chains(t Table) ([]Chain, error) {
	var out []Chain
	err := c.dump(unix.NFT_MSG_GETCHAIN, t, func() { out = nil }, func(*netlink.Encoder) {}, func(body []byte) {
		if netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_TABLE)) != t.Name {
			return
		}
		ch := Chain{Name: netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_NAME))}
		if h := netlink.Attr(body, unix.NFTA_CHAIN_HOOK); h != nil {
			ch.Drops = uint32At(netlink.Attr(body, unix.NFTA_CHAIN_POLICY)) == 0 // NF_DROP
			ch.Hook = &Hook{
				Type:     netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_TYPE)),
				Number:   uint32At(netlink.Attr(h, unix.NFTA_HOOK_HOOKNUM)),
				Priority: int32(uint32At(netlink.Attr(h, unix.NFTA_HOOK_PRIORITY))),
			}
		}
		out = append(out, ch)
	})
	return out, err
}

// BaseChain is a base chain of any program.
type BaseChain struct {
	Table Table
	Name  string
}

// String is such as "chain FORWARD of table ip filter".
func (b BaseChain) String() string {
	family := map[Family]string{IPv4: "ip", IPv6: "ip6", Inet: "inet"}[b.Table.Family]
	return "chain " + b.Name + " of table " + family + " " + b.Table.Name
}

// Dropping returns the base chains at a hook whose policy is to drop, of all tables of the families IPv4, IPv6 and Inet. A
// packet that none of their rules accepts is lost, whatever other tables accept.
func (c *Conn) Dropping(hook uint32) ([]BaseChain, error) {
	var out []BaseChain
	for _, f := range []Family{IPv4, IPv6, Inet} {
		before := len(out)
		err := c.dump(unix.NFT_MSG_GETCHAIN, Table{Family: f}, func() { out = out[:before] }, func(*netlink.Encoder) {}, func(body []byte) {
			h, policy := netlink.Attr(body, unix.NFTA_CHAIN_HOOK), netlink.Attr(body, unix.NFTA_CHAIN_POLICY)
			if h == nil || policy == nil || uint32At(policy) != 0 || uint32At(netlink.Attr(h, unix.NFTA_HOOK_HOOKNUM)) != hook {
				return
			}
			table := Table{Family: f, Name: netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_TABLE))}
			out = append(out, BaseChain{table, netlink.CString(netlink.Attr(body, unix.NFTA_CHAIN_NAME))})
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// StoredRule is what a dump contains of a rule.
type StoredRule struct {
	Text string
	// Hash is Rule.Hash of the rule that was written, 0 for another program's.
	Hash uint64
}

// Rules returns the rules of every chain of table t, in order.
func (c *Conn) Rules(t Table) (map[string][]StoredRule, error) {
	var out map[string][]StoredRule
	err := c.dump(unix.NFT_MSG_GETRULE, t, func() { out = map[string][]StoredRule{} }, func(e *netlink.Encoder) {
		e.String(unix.NFTA_RULE_TABLE, t.Name)
	}, func(body []byte) {
		if netlink.CString(netlink.Attr(body, unix.NFTA_RULE_TABLE)) != t.Name {
			return
		}
		chain := netlink.CString(netlink.Attr(body, unix.NFTA_RULE_CHAIN))
		ud := netlink.Attr(body, unix.NFTA_RULE_USERDATA)
		r := StoredRule{Text: netlink.CString(udataFind(ud, udText))}
		if r.Text == "" {
			r.Text = netlink.CString(udataFind(ud, udComment))
		}
		if h := udataFind(ud, udHash); len(h) == 8 {
			r.Hash = binary.BigEndian.Uint64(h)
		}
		out[chain] = append(out[chain], r)
	})
	return out, err
}

// StoredSet is what a dump contains of a set.
type StoredSet struct {
	Name              string
	KeyType, DataType uint32
	Flags             uint32
	Size              uint32
}

// Is reports whether the stored set is what AddSet makes of s.
func (st StoredSet) Is(s Set) bool {
	want := StoredSet{Name: s.Name, KeyType: number(s.Key), Size: s.Size}
	if s.Data != nil {
		want.Flags |= setFlagMap
		want.DataType = number(s.Data)
		if s.Data[0] == TypeVerdict {
			want.DataType = 0xffffff00
		}
	}
	if s.Dynamic {
		want.Flags |= setFlagDynamic
	}
	if s.Interval {
		want.Flags |= setFlagInterval
	}
	return st == want
}

// Sets returns the sets and maps of table t.
func (c *Conn) Sets(t Table) ([]StoredSet, error) {
	var out []StoredSet
	err := c.dump(unix.NFT_MSG_GETSET, t, func() { out = nil }, func(e *netlink.Encoder) {
		e.String(unix.NFTA_SET_TABLE, t.Name)
	}, func(body []byte) {
		if netlink.CString(netlink.Attr(body, unix.NFTA_SET_TABLE)) != t.Name {
			return
		}
		out = append(out, StoredSet{
			Name:     netlink.CString(netlink.Attr(body, unix.NFTA_SET_NAME)),
			KeyType:  uint32At(netlink.Attr(body, unix.NFTA_SET_KEY_TYPE)),
			DataType: uint32At(netlink.Attr(body, unix.NFTA_SET_DATA_TYPE)),
			Flags:    uint32At(netlink.Attr(body, unix.NFTA_SET_FLAGS)),
			Size:     uint32At(netlink.Attr(netlink.Attr(body, unix.NFTA_SET_DESC), unix.NFTA_SET_DESC_SIZE)),
		})
	})
	return out, err
}

// Dumper reads tables; Conn is one.
type Dumper interface {
	Table(Table) (comment string, found bool, err error)
	Chains(Table) ([]Chain, error)
	Rules(Table) (map[string][]StoredRule, error)
	Sets(Table) ([]StoredSet, error)
}

// StoredTable is what dumps contain of a table, but for the elements of its sets.
type StoredTable struct {
	Comment string
	Chains  []Chain
	Rules   map[string][]StoredRule
	Sets    []StoredSet
}

// ReadTable returns what there is of table t, nil if it is not there.
func ReadTable(d Dumper, t Table) (*StoredTable, error) {
	comment, there, err := d.Table(t)
	if err != nil || !there {
		return nil, err
	}
	out := &StoredTable{Comment: comment}
	if out.Chains, err = d.Chains(t); err != nil {
		return nil, err
	}
	if out.Rules, err = d.Rules(t); err != nil {
		return nil, err
	}
	out.Sets, err = d.Sets(t)
	return out, err
}

// Elems calls begin, then f for each element of a set; both again if the set
// changed during the read. What f gets is valid until it returns.
func (c *Conn) Elems(t Table, set string, begin func(), f func(e Elem)) error {
	return c.dump(unix.NFT_MSG_GETSETELEM, t, begin, func(e *netlink.Encoder) {
		e.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
		e.String(unix.NFTA_SET_ELEM_LIST_SET, set)
	}, func(body []byte) { elems(body, f) })
}

func elems(body []byte, f func(e Elem)) {
	netlink.Attrs(netlink.Attr(body, unix.NFTA_SET_ELEM_LIST_ELEMENTS), func(_ uint16, v []byte) {
		var e Elem
		netlink.Attrs(v, func(typ uint16, v []byte) {
			switch typ {
			case unix.NFTA_SET_ELEM_KEY:
				e.Key = netlink.Attr(v, unix.NFTA_DATA_VALUE)
			case unix.NFTA_SET_ELEM_DATA:
				e.Data = netlink.Attr(v, unix.NFTA_DATA_VALUE)
				if vd := netlink.Attr(v, unix.NFTA_DATA_VERDICT); vd != nil {
					e.Goto = netlink.CString(netlink.Attr(vd, unix.NFTA_VERDICT_CHAIN))
				}
			case unix.NFTA_SET_ELEM_USERDATA:
				e.Comment = netlink.CString(udataFind(v, udComment))
			case unix.NFTA_SET_ELEM_EXPR:
				e.Packets = packets(v)
			}
		})
		f(e)
	})
}

// packets reads the packets of a counter expression, 0 if it is another one.
func packets(expr []byte) uint64 {
	if netlink.CString(netlink.Attr(expr, unix.NFTA_EXPR_NAME)) != "counter" {
		return 0
	}
	v := netlink.Attr(netlink.Attr(expr, unix.NFTA_EXPR_DATA), unix.NFTA_COUNTER_PACKETS)
	if len(v) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

// Get calls f for each element of a set that has one of the keys; what f gets
// is valid until it returns. It is the way to read much of a large set: a dump
// begins from the start of the set again for every 32 KiB of it, which takes
// 22 s for half a million elements, and misses elements while the kernel grows
// the set's hash table.
func (c *Conn) Get(t Table, set string, keys [][]byte, f func(e Elem)) error {
	burst := min(c.nl.Burst(), 500)
	for len(keys) > 0 {
		var e netlink.Encoder
		e.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, unix.NLM_F_ACK, uint8(t.Family), 0)
		e.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
		e.String(unix.NFTA_SET_ELEM_LIST_SET, set)
		list := e.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		n := min(burst, len(keys))
		for _, key := range keys[:n] {
			at := e.Nest(unix.NFTA_LIST_ELEM)
			k := e.Nest(unix.NFTA_SET_ELEM_KEY)
			e.Bytes(unix.NFTA_DATA_VALUE, key)
			e.Close(k)
			e.Close(at)
		}
		e.Close(list)
		e.End()
		got := 0
		errs := c.nl.Ask(e.Buf, func(body []byte) {
			elems(body, f)
			got++
		})
		switch {
		case len(errs) == 0:
			keys = keys[n:]
		case errors.Is(errs[0], unix.ENOENT) && got < n:
			// The kernel answers in order, and ends with the first that is not
			// there.
			keys = keys[got+1:]
		case transient(errs[0]):
			// f is called again for some, with the same.
		default:
			return errs[0]
		}
	}
	return nil
}

func uint32At(v []byte) uint32 {
	if len(v) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}
