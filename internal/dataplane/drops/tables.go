package drops

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nflog"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// The names of the sets in a table of nf_tables, by fate.
var setNames = [...]string{Rejected: "refused", Dropped: "discarded"}

// LogGroup is the group of nfnetlink_log that gets packets which reach no endpoint, at most logRate a second of each family and fate.
// It is the number of Hubble's port, which no other program is known to use.
const (
	LogGroup = 4244
	logRate  = 100
)

// Sets are the sets that a table needs for packets with header h.
func Sets(h *nftables.Header) []nftables.Set {
	to := []nftables.Type{h.Addr, nftables.TypeProto, nftables.TypePort}
	return []nftables.Set{
		{Name: setNames[Rejected], Key: to, Dynamic: true, Size: size, Comment: "destination of what was refused : packets"},
		{Name: setNames[Dropped], Key: to, Dynamic: true, Size: size, Comment: "destination of what was dropped : packets"},
	}
}

// Rules are the rules that count a packet and let it meet its fate. ICMP has a
// checksum in the place of a port: one ping a second would fill the set. With logged
// set they hand some of the packets to LogGroup.
func Rules(h *nftables.Header, how Fate, logged bool) []nftables.Rule {
	set := setNames[how]
	count := nftables.NewRule(h.Frontend().NotEqual(h.Regs(), []byte{h.ICMP}).Count(set, 0, uint64(lifetime.Milliseconds())),
		"meta l4proto != %d update @%s { %s timeout 1d counter }", h.ICMP, set, h.FrontendText())
	rules := []nftables.Rule{count}
	if logged {
		rules = append(rules, Log(new(nftables.Program), "", how))
	}
	if how == Rejected {
		return append(rules, h.Refusal()...)
	}
	return append(rules, nftables.NewRule(new(nftables.Program).Drop(), "drop"))
}

// Log is a rule that hands some of the packets that p, in words text, matches to LogGroup.
func Log(p *nftables.Program, text string, how Fate) nftables.Rule {
	return nftables.NewRule(nftables.Log(nftables.Limit(p, logRate, logRate), LogGroup, setNames[how], nflog.HeadBytes),
		"%slimit rate %d/second burst %[2]d packets log group %d prefix %q snaplen %d", text, logRate, LogGroup, setNames[how], nflog.HeadBytes)
}

// Tables reads the counts in tables of nf_tables. It has a connection of its
// own, since others than the user of an Applier ask for them; nil has no counts.
type Tables struct {
	mu   sync.Mutex
	conn *nftables.Conn // nil after Close
	name string
}

// OpenTables opens a reader of the tables of a name, of both families, in the
// network namespace of the calling thread. They need not be there yet.
func OpenTables(name string) (*Tables, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	return &Tables{conn: c, name: name}, nil
}

// Close releases the connection.
func (t *Tables) Close() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn == nil {
		return nil
	}
	err := t.conn.Close()
	t.conn = nil
	return err
}

// Drops is dataplane.Counter's.
func (t *Tables) Drops(ctx context.Context) ([]dataplane.DropCount, error) {
	if t == nil {
		return nil, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn == nil {
		return nil, nil
	}
	counts := newTally()
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		table := nftables.Table{Family: nftables.FamilyOf(f), Name: t.name}
		for how, set := range setNames {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			err := t.conn.Elems(table, set, func() {}, func(e nftables.Elem) {
				if k, _, ok := tables.ParseKey(e.Key, f, false); ok {
					counts.set(k.Proto, netip.AddrPortFrom(k.Addr, k.Port), Fate(how), e.Packets)
				}
			})
			if err != nil {
				return nil, fmt.Errorf("read the counts of table %s: %w", table, err)
			}
		}
	}
	return counts.out, nil
}
