package iptables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// plan keeps the chains that a state says changed.
type plan map[chainKey]string

func (p plan) take(s *state) {
	for _, c := range s.dirty() {
		if c.gone {
			delete(p, c.chainKey)
		} else {
			p[c.chainKey] = string(c.lines)
		}
	}
}

// Whatever comes and goes in whatever order, the chains are those of a state
// built at once, and none that changed is missed.
func TestTreeDependsOnContentAlone(t *testing.T) {
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { checkTree(t, f) })
		})
	}
}

func checkTree(t *rapid.T, f svc.Family) {
	cfg := Config{DropInvalid: true}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	l := newLayout(f, &cfg)
	set := dataplane.Settings{Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
	planned := dataplane.NewPlan(mode, f)
	planned.Settings = set
	s := newState(l, planned)
	got, have := plan{}, map[dataplane.FrontKey]*front{}
	addr := func() netip.Addr {
		b := [4]byte{10, byte(rapid.IntRange(0, 1).Draw(t, "b")), byte(rapid.IntRange(0, 3).Draw(t, "c")),
			byte(rapid.IntRange(0, 40).Draw(t, "d"))}
		if f == svc.IPv4 {
			return netip.AddrFrom4(b)
		}
		return netip.AddrFrom16([16]byte{0xfd, 4: b[1], 14: b[2], 15: b[3]})
	}
	for range rapid.IntRange(1, 60).Draw(t, "steps") {
		k := dataplane.FrontKey{Addr: addr(), Port: uint16(rapid.IntRange(1, 300).Draw(t, "port")),
			Proto: rapid.SampledFrom(protocols).Draw(t, "proto")}
		if len(have) > 0 && rapid.IntRange(0, 2).Draw(t, "old") == 0 {
			k = rapid.SampledFrom(slices.SortedFunc(maps.Keys(have),
				func(a, b dataplane.FrontKey) int { return strings.Compare(a.String(), b.String()) })).Draw(t, "which")
		}
		fr := table.Frontend{Addr: netip.AddrPortFrom(k.Addr, k.Port),
			Kind: rapid.SampledFrom([]table.FrontendKind{table.ClusterIP, table.ExternalIP, table.NodePort}).Draw(t, "kind")}
		switch {
		case k.Node:
			fr.Kind, fr.Addr = table.NodePort, netip.AddrPortFrom(addr(), k.Port)
		case fr.Kind == table.NodePort:
			k.Addr, k.Node = netip.Addr{}, true
		}
		if rapid.IntRange(0, 3).Draw(t, "gone") == 0 {
			s.set(k, nil)
			delete(have, k)
		} else {
			for i := range rapid.IntRange(0, 40).Draw(t, "endpoints") {
				fr.Endpoints = append(fr.Endpoints, table.Endpoint{Addr: netip.AddrPortFrom(fr.Addr.Addr(), uint16(i+1)), Local: i%5 == 0})
			}
			have[k] = l.frontFor(&set, &table.ServicePort{Family: f, Protocol: k.Proto}, &fr)
			s.set(k, have[k])
		}
		if rapid.Bool().Draw(t, "write") {
			got.take(s)
		}
	}
	s.leave()
	got.take(s)
	want, once := plan{}, newState(l, planned)
	for k, fr := range have {
		once.set(k, fr)
	}
	want.take(once)
	if d := cmp.Diff(map[chainKey]string(want), map[chainKey]string(got), cmp.AllowUnexported(chainKey{})); d != "" {
		t.Fatalf("(-at once +step by step):\n%s", d)
	}
	checkWalks(t, l, want, have)
}

// checkWalks follows a packet to each frontend through the text of the chains:
// its own rules and no others are met.
func checkWalks(t *rapid.T, l *layout, chains plan, have map[dataplane.FrontKey]*front) {
	for name := range chains {
		if len(name.name) > 28 {
			t.Fatalf("%s is longer than iptables allows", name.name)
		}
	}
	for k, fr := range have {
		root := chainVIPs
		if k.Node {
			root = chainNodePorts
		}
		w := writer{chain: "X"}
		l.leaf(&w, fr, false)
		rule := strings.SplitN(string(w.b), "\n", 2)[0]
		then := rule[max(strings.LastIndex(rule, "-j "), strings.LastIndex(rule, "-g ")):]
		met, found := walk(chains, root, k, then)
		if !found {
			t.Fatalf("%s does not find its rule %q", k, rule)
		}
		if met > 300 {
			t.Fatalf("%s meets %d rules", k, met)
		}
	}
}

// walk counts the rules that a packet meets until one leads it where then says.
func walk(chains plan, at string, k dataplane.FrontKey, then string) (int, bool) {
	met := 0
	for depth := 0; depth < 60; depth++ {
		next := ""
		for line := range strings.Lines(chains[chainKey{tableNAT, at}]) {
			met++
			rule := strings.TrimSuffix(strings.TrimPrefix(line, "-A "+at+" "), "\n")
			if !matches(rule, k) {
				continue
			}
			if strings.HasSuffix(rule, " "+then) {
				return met, true
			}
			next = rule[strings.LastIndexByte(rule, ' ')+1:]
			break
		}
		if next == "" || !strings.HasPrefix(next, prefix) {
			return met, false
		}
		at = next
	}
	return met, false
}

// matches interprets the matches of rules.
func matches(rule string, k dataplane.FrontKey) bool {
	words := strings.Fields(rule)
	for i := 0; i+1 < len(words); i += 2 {
		not := words[i] == "!"
		if not {
			i++
		}
		ok := true
		switch arg := words[i+1]; words[i] {
		case "-d":
			ok = netip.MustParsePrefix(arg).Contains(k.Addr)
		case "-p":
			ok = arg == protoName(k.Proto)
		case "--dport":
			lo, hi, ranged := strings.Cut(arg, ":")
			if !ranged {
				hi = lo
			}
			a, _ := strconv.Atoi(lo)
			b, _ := strconv.Atoi(hi)
			ok = a <= int(k.Port) && int(k.Port) <= b
		}
		if ok == not {
			return false
		}
	}
	return true
}

// A packet to the last of 10,000 Services with 10 endpoints meets fewer than
// 100 rules: the kernel's own count. kube-proxy's meets about 10,000.
func TestFewRulesForAPacket(t *testing.T) {
	const n = 10000
	variants(t, func(t *testing.T, v Variant) {
		net := testbed.NewNetwork(t)
		host := net.Outside("host")
		host.Do(func() {
			p, err := New(Config{Variant: v})
			if err != nil {
				t.Fatal(err)
			}
			flows.Apply(t, p, table.New(flows.Large(n, 10)...), nil)
			most := 0
			for _, i := range []int{n / 2, n - 1} {
				flows.Command(t, "", "iptables-"+string(v), "-w", "-t", "nat", "-Z")
				to := flows.LargePort(i, 1).Frontends[0].Addr
				// No host of the network answers.
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				if _, err := host.Dial(ctx, svc.TCP, to); err == nil {
					t.Errorf("an answer on %s", to)
				}
				cancel()
				met := countRules(flows.Command(t, "", saveProgram(v), "-c", "-t", "nat"))
				most = max(most, met)
			}
			t.Logf("%s: at most %d rules met", v, most)
			if most == 0 || most >= 100 {
				t.Errorf("a packet met %d rules, want some and fewer than 100", most)
			}
		})
	})
}

// countRules is how many rules a packet met, from the packets that each rule
// matched: in every chain that it entered, the rules up to the last one that
// matched.
func countRules(text string) int {
	met, inChain, chain := 0, 0, ""
	last := 0
	flush := func() { met += last; inChain, last = 0, 0 }
	for line := range strings.Lines(text) {
		var packets, bytes int
		var rest string
		if n, _ := fmt.Sscanf(line, "[%d:%d]", &packets, &bytes); n != 2 {
			continue
		}
		_, rest, _ = strings.Cut(line, "] -A ")
		name, _, _ := strings.Cut(rest, " ")
		if name != chain {
			flush()
			chain = name
		}
		inChain++
		if packets > 0 {
			last = inChain
		}
	}
	flush()
	return met
}
