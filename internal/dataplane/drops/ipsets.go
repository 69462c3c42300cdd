package drops

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/svc"
)

// Prefix begins the names of the sets of ipset that a mode counts in. It has at
// most 22 letters.
type Prefix string

func (p Prefix) name(f svc.Family, how Fate) string {
	word := "refused-"
	if how == Dropped {
		word = "dropped-"
	}
	return string(p) + word + strconv.Itoa(int(f))
}

// Sets are the sets for packets of a family.
func (p Prefix) Sets(f svc.Family) []ipset.Set {
	var out []ipset.Set
	for _, how := range Fates {
		out = append(out, ipset.Set{Name: p.name(f, how), Type: ipset.HashIPPort, Family: f, Counters: true, Timeout: lifetime, Size: size})
	}
	return out
}

// Names are the names of the sets of both families.
func (p Prefix) Names() []string {
	var out []string
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		for _, s := range p.Sets(f) {
			out = append(out, s.Name)
		}
	}
	return out
}

// Rule is the rule of iptables that counts a packet, as iptables-save prints it
// behind the chain. The match counts where the destination is in the set. Where
// it is not it is added, with its first packet. (To add it in any case would
// restart its count: the kernel's --exist overwrites the counter.)
func (p Prefix) Rule(f svc.Family, how Fate) string {
	n := p.name(f, how)
	return "-m set ! --match-set " + n + " dst,dst -j SET --add-set " + n + " dst,dst"
}

// IPSets reads the counts in sets of ipset. It has its own connection,
// since others than the user of an Applier ask for them.
type IPSets struct {
	prefix   Prefix
	lifetime time.Duration

	mu       sync.Mutex
	conn     *ipset.Conn // nil before Open and after Close
	families []svc.Family
	// settled are the counts of destinations when their time last began.
	settled map[string]map[ipset.Element]uint64
}

// NewIPSets returns a reader of the sets with a prefix, which has none before
// Open.
func NewIPSets(p Prefix) *IPSets {
	return &IPSets{prefix: p, lifetime: lifetime, settled: map[string]map[ipset.Element]uint64{}}
}

// Open makes the sets of the families that are not there yet. The first time it
// also opens the connection, in the network namespace of the calling thread.
func (s *IPSets) Open(families ...svc.Family) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		c, err := ipset.Dial()
		if err != nil {
			return err
		}
		s.conn = c
	}
	for _, f := range families {
		sets := s.prefix.Sets(f)
		for i := range sets {
			sets[i].Timeout = s.lifetime
		}
		if err := s.conn.Create(sets...); err != nil {
			return err
		}
	}
	s.families = families
	return nil
}

// Close releases the connection. The sets stay.
func (s *IPSets) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return nil
	}
	err := s.conn.Close()
	s.conn = nil
	return err
}

// Drops is dataplane.Counter's. Packets do not renew the time of what they are
// counted by; that is done here, for destinations that have got some since their
// time began.
func (s *IPSets) Drops(ctx context.Context) ([]dataplane.DropCount, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return nil, nil
	}
	counts := newTally()
	for _, f := range s.families {
		for _, how := range Fates {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if err := s.read(counts, s.prefix.name(f, how), how); err != nil {
				return nil, fmt.Errorf("read the counts of lost packets: %w", err)
			}
		}
	}
	return counts.out, nil
}

func (s *IPSets) read(counts *tally, set string, how Fate) error {
	before, now := s.settled[set], map[ipset.Element]uint64{}
	var renew []ipset.Element
	err := s.conn.Counts(set, func(c ipset.Count) {
		counts.set(c.Proto, netip.AddrPortFrom(c.IP, c.Port), how, c.Packets)
		at, known := before[c.Element]
		if !known {
			at = c.Packets
		}
		if c.Left < s.lifetime/2 && c.Packets != at {
			renew = append(renew, c.Element)
			at = c.Packets
		}
		now[c.Element] = at
	})
	if err != nil {
		return err
	}
	s.settled[set] = now
	return s.conn.Add(set, renew)
}
