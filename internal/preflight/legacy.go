package preflight

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// legacyMark is behind the names of tables of iptables-legacy, which are beside the ones of nf_tables.
const legacyMark = " of iptables-legacy"

// legacyTimeout bounds one run of iptables-legacy-save, which waits for a lock.
const legacyTimeout = 20 * time.Second

var legacyHooks = map[string]uint32{
	"PREROUTING": nftables.Prerouting, "INPUT": nftables.Input, "FORWARD": nftables.Forward, "OUTPUT": nftables.Output,
	"POSTROUTING": nftables.Postrouting,
}

// addLegacy adds the rules of iptables-legacy to all, which is Partial if some are missing. Reading a table there makes the kernel
// have it, so only tables are read that it has. Their names are for the machine's root: who may not read them, as a node without
// root, may not use these tables either. The error wraps exec.ErrNotFound if there are some and no program to read them.
func addLegacy(ctx context.Context, all *nftables.Ruleset) error {
	var errs, lacking []error
	for _, f := range []struct {
		family  svc.Family
		nf      nftables.Family
		present string
	}{{svc.IPv4, nftables.IPv4, "ip_tables_names"}, {svc.IPv6, nftables.IPv6, "ip6_tables_names"}} {
		present, err := os.ReadFile("/proc/thread-self/net/" + f.present)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
			errs = append(errs, err)
			continue
		}
		// The table nat drops nothing, and has the rules of all Services.
		tables := slices.DeleteFunc(strings.Fields(string(present)), func(table string) bool { return table == "nat" })
		if len(tables) == 0 {
			continue
		}
		tool, err := iptables.New(iptables.Legacy, f.family)
		if err != nil {
			lacking = append(lacking, err)
			continue
		}
		if err := readLegacy(ctx, tool, f.nf, tables, all); err != nil {
			all.Partial = true
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 { // more than that a program is missing
		return errors.Join(errs...)
	}
	return errors.Join(lacking...)
}

func readLegacy(ctx context.Context, tool *iptables.Tool, f nftables.Family, tables []string, all *nftables.Ruleset) error {
	ctx, cancel := context.WithTimeout(ctx, legacyTimeout)
	defer cancel()
	left := maxRules
	for _, table := range tables {
		if err := readLegacyTable(ctx, tool, nftables.Table{Family: f, Name: table + legacyMark}, table, &left, all); err != nil {
			return err
		}
	}
	return nil
}

// readLegacyTable adds the rules of one table, left at most, which it counts down.
func readLegacyTable(ctx context.Context, tool *iptables.Tool, as nftables.Table, table string, left *int, all *nftables.Ruleset) error {
	chains := map[string]uint64{}
	return tool.SavePolicies(ctx, table, func(name, policy string) {
		chains[name] = 0
		if hook, ok := legacyHooks[name]; ok && policy != "-" {
			chain := nftables.BaseChain{Table: as, Name: name}
			all.Base[hook] = append(all.Base[hook], chain)
			all.Dropping[chain] = policy == "DROP"
		}
	}, func(name, line string) {
		chains[name]++
		if known(name) {
			return
		}
		if *left--; *left < 0 {
			all.Partial = true
			return
		}
		chain := nftables.BaseChain{Table: as, Name: name}
		r := parseRule(line, func(target string) bool { _, ok := chains[target]; return ok })
		r.Chain, r.Handle = chain, chains[name]
		all.Rules[chain] = append(all.Rules[chain], r)
	})
}

// parseRule reads a rule as iptables-save prints it, "-A CHAIN ...". isChain reports whether a target is a chain.
func parseRule(line string, isChain func(string) bool) (r nftables.Decoded) {
	words := quotedFields(line)
	next := func() (word string) {
		if len(words) > 0 {
			word, words = words[0], words[1:]
		}
		return word
	}
	for len(words) > 0 {
		switch option := next(); option {
		case "-A", "--comment":
			next()
		case "-s", "-d":
			p, err := netip.ParsePrefix(next())
			switch {
			case err != nil: // a mask with holes
				r.Opaque = true
			case option == "-s":
				r.Source = p
			default:
				r.Destination = p
			}
		case "-m":
			switch next() {
			case "tcp", "udp", "sctp", "comment", "conntrack", "state", "multiport":
			default:
				r.Opaque = true
			}
		case "-j", "-g":
			target := next()
			r.Verdict, r.Target, r.Goto = targets[target], "", option == "-g"
			if isChain(target) {
				r.Verdict, r.Target = nftables.Jumps, target
			}
			return r // what follows are options of the target
		case "!":
			r.Opaque = true
			next()
		default:
			value := ""
			if len(words) > 0 && !strings.HasPrefix(words[0], "-") {
				value = next()
			}
			if c, ok := legacyCondition(option, value); ok {
				r.Conditions = append(r.Conditions, c)
			} else {
				r.Opaque = true
			}
		}
	}
	return r
}

// targets have a verdict; others, such as LOG and MARK, let the packet go on.
var targets = map[string]nftables.Verdict{
	"ACCEPT": nftables.Accepts, "DROP": nftables.Drops, "REJECT": nftables.Rejects, "RETURN": nftables.Returns,
	"NFQUEUE": nftables.Other, "QUEUE": nftables.Other,
}

// legacyCondition returns the condition of an option; false for one that is not understood, also for each negated one.
func legacyCondition(option, value string) (c nftables.Condition, ok bool) {
	c.Text = strings.TrimLeft(option, "-") + " " + value
	switch option {
	case "-i", "-o":
		c.Field = map[string]nftables.Field{"-i": nftables.InDevice, "-o": nftables.OutDevice}[option]
		if prefix, any := strings.CutSuffix(value, "+"); any {
			value = prefix + "*"
		}
		c.Devices, c.Text = []string{value}, string(c.Field)+" "+value
	case "-p":
		c.Field, c.Text = nftables.Protocol, value
		c.Protocol = nftables.Protocols()[value]
		return c, c.Protocol != 0
	case "--sport", "--dport", "--sports", "--dports":
		c.Field = map[byte]nftables.Field{'s': nftables.SourcePort, 'd': nftables.Port}[option[2]]
		for text := range strings.SplitSeq(value, ",") {
			first, last, isRange := strings.Cut(text, ":")
			if !isRange {
				last = first
			}
			a, err := strconv.ParseUint(first, 10, 16)
			b, err2 := strconv.ParseUint(last, 10, 16)
			if err != nil || err2 != nil {
				return c, false
			}
			c.Ports = append(c.Ports, [2]uint16{uint16(a), uint16(b)})
		}
	case "--ctstate", "--state":
		c.Field, c.Text = nftables.State, string(nftables.State)
		for state := range strings.SplitSeq(value, ",") {
			bit := map[string]uint32{
				"INVALID": nftables.CtStateInvalid, "ESTABLISHED": nftables.CtStateEstablished, "RELATED": nftables.CtStateRelated,
				"NEW": nftables.CtStateNew, "UNTRACKED": 64,
			}[state]
			if bit == 0 { // SNAT and DNAT are no states
				return c, false
			}
			c.Mask |= bit
		}
	default:
		return c, false
	}
	return c, true
}

// quotedFields splits a line at blanks outside of double quotes.
func quotedFields(line string) (out []string) {
	var word strings.Builder
	quoted, escaped, any := false, false, false
	for _, c := range line {
		switch {
		case escaped:
			word.WriteRune(c)
			escaped = false
		case c == '\\' && quoted:
			escaped = true
		case c == '"':
			quoted, any = !quoted, true
		case c == ' ' && !quoted:
			if any {
				out = append(out, word.String())
			}
			word.Reset()
			any = false
		default:
			word.WriteRune(c)
			any = true
		}
	}
	if any {
		out = append(out, word.String())
	}
	return out
}
