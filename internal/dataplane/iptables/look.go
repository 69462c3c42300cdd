package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
)

// Look is dataplane.Looker's: it reads table nat once, and walks the rules as a packet to each
// frontend does. Reading the table takes as long as iptables-save does.
func (m *Mode) Look(ctx context.Context, fronts []dataplane.Asked, client netip.Addr) ([]dataplane.Installed, error) {
	out := make([]dataplane.Installed, len(fronts))
	for _, t := range m.targets {
		chains := map[string][]string{}
		for i, a := range fronts {
			if a.Family != t.layout.family {
				continue
			}
			if len(chains) == 0 {
				if err := t.saveNAT(ctx, chains); err != nil {
					return nil, err
				}
			}
			w := packetWalk{Asked: a, chains: chains, to: &out[i]}
			w.front()
		}
	}
	return out, nil
}

func (t *target) saveNAT(ctx context.Context, chains map[string][]string) error {
	reader := t.tool
	if w, ok := reader.(interface{ Unwatched() *iptables.Tool }); ok {
		reader = w.Unwatched()
	}
	err := reader.Save(ctx, tableNAT, func(string) {}, func(name, line string) {
		if ours(name) {
			chains[name] = append(chains[name], strings.TrimPrefix(line, "-A "+name+" "))
		}
	})
	if err != nil {
		return fmt.Errorf("iptables %s: read table %s: %w", t.layout.family, tableNAT, err)
	}
	return nil
}

// packetWalk follows a packet to one frontend.
type packetWalk struct {
	dataplane.Asked
	chains map[string][]string
	to     *dataplane.Installed
}

// maxWalk bounds how many chains a walk meets: other programs may have made a loop.
const maxWalk = 64

func (w *packetWalk) front() {
	w.to.Front = w.String()
	root := chainVIPs
	if w.Node {
		root = chainNodePorts
	}
	outside := way{packetWalk: w}
	outside.chain(root, 0)
	if w.to.Present = outside.ended; !w.to.Present {
		w.to.Says("table nat chain "+root, "no rule for "+w.String())
		return
	}
	w.to.Outside = dataplane.NewFate(outside.endpoints, outside.drop)
	if !outside.split {
		return
	}
	inside := way{packetWalk: w, inside: true}
	inside.chain(root, 0)
	fate := dataplane.NewFate(inside.endpoints, inside.drop)
	w.to.Inside = &fate
}

// way is the walk for clients on this node, or elsewhere.
type way struct {
	*packetWalk
	inside    bool
	endpoints []netip.AddrPort
	drop      bool
	ended     bool // the packet's end is known
	split     bool // there are rules for clients on this node
}

// chain walks through a chain, and reports whether the packet ends there.
func (w *way) chain(name string, depth int) bool {
	if depth == maxWalk {
		return true
	}
	for _, line := range w.chains[name] {
		r := parseRule(line)
		if !r.matches(&w.Asked) {
			continue
		}
		if r.fromInside() && strings.HasPrefix(r.target, prefix+"I-") {
			if w.split = true; !w.inside {
				continue
			}
		}
		if w.take(name, line, &r, depth) {
			return true
		}
	}
	return false
}

// take does what a matching rule says, and reports whether the packet's way ends with it.
func (w *way) take(chain, line string, r *rule, depth int) bool {
	says := func() {
		if !w.inside || strings.HasPrefix(chain, prefix+"I-") {
			w.to.Says("table nat chain "+chain, line)
		}
	}
	switch {
	case r.target == "DNAT":
		says()
		w.endpoints, w.ended = append(w.endpoints, r.endpoint), true
		return !r.maybe
	case r.target == chainRefuse && !ownChain(chain) && (r.last == 0 || r.notPort):
		says() // another port of the address
		return true
	case r.target == chainRefuse, r.target == chainDrop && !strings.HasPrefix(chain, prefix+"A-"):
		says()
		w.drop, w.ended = r.target == chainDrop, true
		return true
	case strings.HasPrefix(chain, prefix+"A-"):
		says()
		return w.allowed(r, depth)
	case r.target == "RETURN":
		return false
	case strings.HasPrefix(r.target, prefix) && r.target != chainMarkMasq && r.target != chainMarkOutside:
		if strings.HasPrefix(r.target, prefix+"A-") || strings.HasPrefix(r.target, prefix+"F-") {
			says()
		}
		return w.chain(r.target, depth+1) || r.gone
	}
	return false
}

// ownChain reports whether a chain is that of one frontend.
func ownChain(name string) bool {
	return strings.HasPrefix(name, prefix+"F-") || strings.HasPrefix(name, prefix+"I-")
}

// allowed takes a rule of the chain that lets some clients in; the last one drops the others.
func (w *way) allowed(r *rule, depth int) bool {
	w.to.Limited = true
	if r.target == chainDrop {
		w.ended = true
		return true
	}
	if !w.inside {
		from := r.source
		if !from.IsValid() {
			from = netip.PrefixFrom(unspecified(w.At), 0)
		}
		w.to.Allow = append(w.to.Allow, from)
	}
	if !w.ended {
		w.chain(r.target, depth+1)
		w.ended = true
	}
	return false
}

func unspecified(like netip.Addr) netip.Addr {
	if like.Is6() {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// rule is what counts of a line of iptables-save.
type rule struct {
	dst, source netip.Prefix
	proto       string
	first, last uint16
	notPort     bool
	// maybe reports that the rule takes only some of the packets, or clients known to it.
	maybe    bool
	local    bool // clients of this node only
	target   string
	gone     bool // the packet does not come back from the target (-g)
	endpoint netip.AddrPort
}

func (r *rule) fromInside() bool { return r.local || r.source.IsValid() }

func (r *rule) matches(a *dataplane.Asked) bool {
	switch {
	case r.dst.IsValid() && (!a.Addr.IsValid() || !r.dst.Contains(a.Addr)):
		return false
	case r.proto != "" && r.proto != protoName(a.Proto):
		return false
	case r.last != 0:
		return (r.first <= a.Port && a.Port <= r.last) != r.notPort
	}
	return true
}

// parseRule reads the words of a rule that this mode writes; it passes over others.
func parseRule(line string) rule {
	var r rule
	words := strings.Fields(line)
	for i := 0; i+1 < len(words); i++ {
		arg := words[i+1]
		switch words[i] {
		case "-d":
			r.dst, _ = netip.ParsePrefix(arg)
		case "-s":
			r.source, _ = netip.ParsePrefix(arg)
		case "-p":
			r.proto = arg
		case "--dport":
			first, last, isRange := strings.Cut(arg, ":")
			r.first, r.last = portNumber(first), portNumber(first)
			if isRange {
				r.last = portNumber(last)
			}
			r.notPort = i > 0 && words[i-1] == "!"
		case "-m":
			r.maybe = r.maybe || arg == "statistic" || arg == "recent" && strings.Contains(line, "--update")
		case "--src-type":
			r.local = arg == "LOCAL"
		case "-j", "-g":
			r.target, r.gone = arg, words[i] == "-g"
		case "--to-destination":
			r.endpoint, _ = netip.ParseAddrPort(arg)
		}
	}
	return r
}

func portNumber(text string) uint16 {
	n, _ := strconv.ParseUint(text, 10, 16)
	return uint16(n)
}

var _ dataplane.Looker = (*Mode)(nil)
