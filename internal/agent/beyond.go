package agent

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/peers"
	"github.com/fairlead/fairlead/internal/svc"
)

// beyond are the nodes of a large cluster that a node does not ask every second. It asks each once in surveyPeriod, so that it knows
// which of them answer. One that does is a suspect, and asked like the others, while a TCP connection to it has no answer.
// The lock of Peers guards it.
type beyond struct {
	names    []string // in the order of the survey
	at       int      // the next one
	again    bool     // each was asked once
	answered map[string]bool
	owners   map[netip.Addr]string // of nodes' addresses, and of the first addresses of their Pods' ranges
	lengths  []int                 // of these ranges, in bits
	suspects []string
	cleared  map[string]time.Duration // when suspects answered
}

// surveyPeriod is the time in which each node beyond is asked once, and firstSurvey that after a start.
const (
	surveyPeriod = time.Minute
	firstSurvey  = 5 * time.Second
	// clearedFor is how long a suspect that has answered is not one again, so that connections to its dead Pods, or to addresses that
	// nobody has, take no place from others.
	clearedFor = 5 * time.Second
)

// set takes the nodes that are up, of which asked are asked every second.
func (b *beyond) set(self string, asked, up []string, nodes map[string]peer) {
	every := map[string]bool{self: true}
	for _, name := range asked {
		every[name] = true
	}
	before := b.answered
	b.names, b.answered, b.owners, b.lengths = nil, map[string]bool{}, map[netip.Addr]string{}, nil // others may still read the old ones
	for _, name := range up {
		if every[name] {
			continue
		}
		b.names = append(b.names, name)
		if before[name] {
			b.answered[name] = true
		}
		n := nodes[name]
		for _, a := range n.addrs {
			owner := name
			if _, two := b.owners[a]; two { // a Node may claim any address
				owner = ""
			}
			b.owners[a] = owner
		}
		for _, c := range n.pods {
			b.owners[c.Addr()] = name
			if !slices.Contains(b.lengths, c.Bits()) {
				b.lengths = append(b.lengths, c.Bits())
			}
		}
	}
	slices.Sort(b.names)
	b.suspects = slices.DeleteFunc(b.suspects, func(name string) bool { return !slices.Contains(b.names, name) })
}

// next returns whom to ask in a step of the survey.
func (b *beyond) next() (out []peers.Question) {
	steps := int(firstSurvey / peers.Step)
	if b.again {
		steps = int(surveyPeriod / peers.Step)
	}
	for range (len(b.names) + steps - 1) / steps {
		if b.at >= len(b.names) {
			b.at, b.again = 0, true
		}
		name := b.names[b.at]
		b.at++
		if !slices.Contains(b.suspects, name) { // which is asked already
			out = append(out, peers.Question{Name: name, Again: !b.answered[name]})
		}
	}
	return out
}

// heard takes in an answer.
func (b *beyond) heard(now time.Duration, name string) {
	if _, found := slices.BinarySearch(b.names, name); !found {
		return
	}
	b.answered[name] = true
	if slices.Contains(b.suspects, name) {
		if b.cleared == nil {
			b.cleared = map[string]time.Duration{}
		}
		b.cleared[name] = now
	}
}

// suspect makes nodes to which connections have no answer the suspects. Earlier suspects come first.
func (b *beyond) suspect(now time.Duration, names map[string]bool) {
	maps.DeleteFunc(b.cleared, func(_ string, at time.Duration) bool { return now-at >= clearedFor })
	var next []string
	for _, name := range slices.Concat(b.suspects, slices.Sorted(maps.Keys(names))) {
		_, cleared := b.cleared[name]
		if names[name] && b.answered[name] && !cleared && !slices.Contains(next, name) && len(next) < peers.MaxAsked {
			next = append(next, name)
		}
	}
	b.suspects = next
}

// ownersOf returns a function that returns the node beyond that has an address, or whose Pods have it, "" if there is none. It does
// not follow later changes.
func (b *beyond) ownersOf() func(netip.Addr) string {
	owners, lengths := b.owners, b.lengths
	return func(a netip.Addr) string {
		if name := owners[a]; name != "" {
			return name
		}
		for _, bits := range lengths {
			if c, err := a.Prefix(bits); err == nil && owners[c.Addr()] != "" {
				return owners[c.Addr()]
			}
		}
		return ""
	}
}

// lookBeyond finds suspects every peers.Period, until ctx ends. It reads the kernel's table of connections only in clusters with nodes
// beyond.
func (p *Peers) lookBeyond(ctx context.Context) {
	var kernel *conntrack.Conn
	defer func() {
		if kernel != nil {
			_ = kernel.Close()
		}
	}()
	failed := false
	tick := time.NewTicker(peers.Period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		p.mu.Lock()
		none := len(p.beyond.names) == 0
		p.mu.Unlock()
		if none {
			continue
		}
		var err error
		if kernel == nil {
			kernel, err = conntrack.Dial()
		}
		if err == nil {
			err = p.findSuspects(kernel)
		}
		if err != nil && kernel != nil {
			_ = kernel.Close()
			kernel = nil
		}
		if err != nil && !failed {
			p.log.Warn("cannot read connections without an answer; only nodes that are asked every second can be unreached", "err", err)
		}
		failed = err != nil
	}
}

// findSuspects makes the nodes beyond to which connections have no answer the suspects.
func (p *Peers) findSuspects(kernel *conntrack.Conn) error {
	p.mu.Lock()
	owner := p.beyond.ownersOf()
	p.mu.Unlock()
	names := map[string]bool{}
	err := kernel.EachUnanswered(svc.TCP, func(e conntrack.Entry) {
		if name := owner(e.ReplySrc.Addr()); name != "" {
			names[name] = true
		}
	})
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.beyond.suspect(p.now(), names)
	return nil
}
