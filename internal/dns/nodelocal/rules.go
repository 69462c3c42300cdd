package nodelocal

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// alive is the set that has an element for each family whose server has sent
	// a packet within AliveFor.
	alive = "alive"
	// priorityFirst is just before the translation of the proxy.
	priorityFirst = nftables.PriorityDstNAT - 10

	prerouting, output             = "prerouting", "output"
	othersPrerouting, othersOutput = "elsewhere", "elsewhere-output"
)

// leading is how packets from outside of this node are led to the local server.
type leading int

const (
	none     leading = iota // they are not, nor are this node's own
	bySocket                // while the kernel knows a socket for them
	byTime                  // while the set has their family, as this node's own are
)

// write replaces the table.
func write(c Config, led leading) error {
	return transaction(func(b *nftables.Batch) nftables.Table {
		b.Tag(nftables.InetTables)
		b.ReplaceTable(table, "node-local DNS")
		c.add(b, table, led)
		return table
	})
}

// transaction commits what fill adds, which recreates the table that it returns.
func transaction(fill func(*nftables.Batch) nftables.Table) error {
	conn, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	b := nftables.NewBatch()
	return conn.CommitTable(fill(b), b)
}

// rules adds rules to a table.
type rules struct {
	*nftables.Batch
	table nftables.Table
}

// add adds a rule, by whose text a rejection names it.
func (r rules) add(chain string, p *nftables.Program, format string, args ...any) {
	rule := nftables.NewRule(p, format, args...)
	r.Tag("rule " + rule.Text)
	r.AddRule(r.table, chain, rule)
}

// add adds what table t has.
func (c *Config) add(b *nftables.Batch, t nftables.Table, led leading) {
	b.Tag("a set that packets add to")
	b.AddSet(t, nftables.Set{Name: alive, Key: []nftables.Type{nftables.TypeNFProto}, Dynamic: true, Size: 16})
	for _, ch := range []struct {
		name, typ string
		hook      uint32
		priority  int32
	}{
		{prerouting, "filter", nftables.Prerouting, nftables.PriorityRaw},
		{output, "filter", nftables.Output, nftables.PriorityRaw},
		{othersPrerouting, "nat", nftables.Prerouting, priorityFirst},
		{othersOutput, "nat", nftables.Output, priorityFirst},
	} {
		b.Tag("a chain of type " + ch.typ)
		b.AddChain(t, nftables.Chain{Name: ch.name, Hook: &nftables.Hook{Type: ch.typ, Number: ch.hook, Priority: ch.priority}})
	}
	families := map[svc.Family]bool{}
	for _, a := range c.Addrs {
		// The set begins with its families: else what the node asks between this
		// transaction and the server's next packet would go to the others.
		if f := svc.FamilyOf(a); !families[f] {
			families[f] = true
			b.AddElem(t, alive, &nftables.Elem{Key: []byte{byte(nftables.FamilyOf(f))}, Timeout: uint64(AliveFor.Milliseconds())})
		}
		for _, p := range []svc.Protocol{svc.UDP, svc.TCP} {
			m, r := match{nftables.HeaderOf(svc.FamilyOf(a)), a, p, c.Port}, rules{b, t}
			m.answers(r)
			if led != none {
				m.questions(r, led)
				m.toOthers(r, c.Others)
			}
		}
	}
}

// match is a protocol, an address and a port of the Service.
type match struct {
	nftables.Header
	addr  netip.Addr
	proto svc.Protocol
	port  uint16
}

// destination begins a rule for packets that are sent there, source for those
// sent from there.
func (m *match) destination() (*nftables.Program, string) {
	return m.at(m.Destination).Port(0, nftables.Destination).Equal(0, bigEndian(m.port)), m.text("d")
}

func (m *match) source() (*nftables.Program, string) {
	return m.at(m.Source).Port(0, nftables.Source).Equal(0, bigEndian(m.port)), m.text("s")
}

func (m *match) at(offset uint32) *nftables.Program {
	return m.InetPrefix(offset, netip.PrefixFrom(m.addr, m.addr.BitLen())).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{byte(m.proto)})
}

func (m *match) text(end string) string {
	return fmt.Sprintf("%s %saddr %s meta l4proto %d th %sport %d", m.Word, end, m.addr, m.proto, end, m.port)
}

func bigEndian(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }

// answers adds the rule for what the local server sends.
func (m *match) answers(r rules) {
	p, text := m.source()
	p.Meta(0, nftables.MetaNFProto).Refresh(alive, 0, uint64(AliveFor.Milliseconds())).Untracked()
	r.add(output, p, "%s update @alive { meta nfproto } notrack", text)
}

// questions adds the rules that keep connection tracking from what the local server is
// sent.
func (m *match) questions(r rules, led leading) {
	own := func(chain string) {
		p, text := m.destination()
		r.add(chain, p.Meta(0, nftables.MetaNFProto).InSet(alive, 0).Untracked(), "%s meta nfproto @alive notrack", text)
	}
	if led == bySocket {
		// The question is whether there is a socket at all, in any state; ours are
		// not transparent.
		p, text := m.destination()
		r.add(prerouting, p.Transparent(0).Equal(0, []byte{0}).Untracked(), "%s socket transparent 0 notrack", text)
	} else {
		own(prerouting)
	}
	own(output) // on its way out a packet has the socket of its sender
}

// toOthers adds the rules that send packets to one of the others of the family,
// each with the same chance.
func (m *match) toOthers(r rules, others []netip.AddrPort) {
	var same []netip.AddrPort
	for _, o := range others {
		if o.Addr().Is4() == m.addr.Is4() && len(same) < MaxOthers {
			same = append(same, o)
		}
	}
	for i, o := range same {
		p, text := m.destination()
		if left := len(same) - i; left > 1 {
			p.Number(0, nftables.NumberRandom, uint32(left), 0).Equal(0, nftables.Uint32(0))
			text += fmt.Sprintf(" numgen random mod %d 0", left)
		}
		port := m.Regs()
		p.Value(0, o.Addr().AsSlice()).Value(port, bigEndian(o.Port())).DNAT(nftables.FamilyOf(svc.FamilyOf(o.Addr())), 0, port)
		for _, chain := range []string{othersPrerouting, othersOutput} {
			r.add(chain, p, "%s dnat to %s", text, o)
		}
	}
}
