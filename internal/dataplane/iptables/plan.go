package iptables

import (
	"net/netip"
	"strconv"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// front is one frontend as it is written: an item of a tree.
type front struct {
	fk    dataplane.FrontKey
	order treeKey
	port  *table.ServicePort
	f     *table.Frontend
	masq  dataplane.Masquerading
	// own reports that the rules are in chains of the frontend's own.
	own   bool
	rules int
}

func (f *front) key() *treeKey { return &f.order }
func (f *front) weight() int   { return f.rules }
func (f *front) guarded() bool { return f.f.Kind == table.ClusterIP && !f.fk.Node }

// manyRules reports that a frontend has so many rules that one more, which sends
// other ports away first, costs less than to match the port in each: a match is
// a third of what such a rule costs iptables-legacy-restore and the kernel.
func (f *front) manyRules() bool { return !f.fk.Node && len(f.f.Endpoints) > 2 }

// inlineRules is how many rules a frontend may have in a leaf among the rules of
// others.
const inlineRules = 32

func (l *layout) frontFor(set *dataplane.Settings, p *table.ServicePort, f *table.Frontend) *front {
	k := dataplane.KeyOf(p.Protocol, f)
	fr := &front{fk: k, order: l.orderOf(k), port: p, f: f, rules: max(1, len(f.Endpoints))}
	if len(f.Endpoints) > 0 {
		fr.masq = dataplane.MasqueradingOf(set, f)
	}
	if fr.masq != dataplane.MasqueradeNone {
		fr.rules++
	}
	if fr.manyRules() {
		fr.rules++
	}
	fr.own = f.SourceRanges != nil || f.LocalClients != nil || p.Affinity > 0 || fr.rules > inlineRules
	if fr.own {
		fr.rules = 1
	}
	if fr.guarded() {
		fr.rules++
	}
	return fr
}

// chains writes the chains of the frontend's own, as lines, if it has any.
func (l *layout) chains(set *dataplane.Settings, fr *front, emit func(name string, lines []byte)) {
	if !fr.own {
		return
	}
	main := l.ownName('F', fr.fk)
	if fr.f.SourceRanges != nil {
		name := l.ownName('A', fr.fk)
		emit(name, l.allow(name, main, fr))
	}
	w := writer{chain: main}
	if fr.f.LocalClients != nil {
		name := l.ownName('I', fr.fk)
		in := writer{chain: name}
		l.endpoints(&in, fr, "", fr.f.LocalClients, false)
		emit(name, in.b)
		for _, i := range set.PodInterfaces {
			w.rule(input(i), "-g "+name)
		}
		for _, p := range set.LocalPods {
			w.rule(source(p), "-g "+name)
		}
		// This node's own connections are masqueraded: their source may be the
		// very address they were sent to, if an interface has it.
		w.rule("-m addrtype --src-type LOCAL ", "-j "+chainMarkMasq)
		w.rule("-m addrtype --src-type LOCAL ", "-g "+name)
	}
	l.masquerade(&w, fr, "")
	l.endpoints(&w, fr, "", fr.f.Endpoints, fr.f.Drop)
	emit(main, w.b)
}

// allow lets only some clients in. The frontend's own address is only that of a
// client if an interface of this node has it: others forge it.
func (l *layout) allow(name, to string, fr *front) []byte {
	w := writer{chain: name}
	for _, p := range fr.f.SourceRanges {
		switch {
		case svc.FamilyOf(p.Addr()) != l.family:
		case dataplane.IsOwn(p, fr.fk.Addr):
			w.rule(source(p)+"-m addrtype --src-type LOCAL ", "-g "+to)
		default:
			w.rule(source(p.Masked()), "-g "+to)
		}
	}
	w.rule("", "-g "+chainDrop)
	return w.b
}

// leaf writes the rules of a frontend into a leaf of the tree. only reports whether
// it is the only one there with the same address and protocol.
func (l *layout) leaf(w *writer, fr *front, only bool) {
	m := matchFront(fr.fk)
	switch {
	case !fr.own:
		if only && fr.manyRules() {
			m = destination(fr.fk.Addr) + "-p " + protoName(fr.fk.Proto) + " "
			w.rule(m+"-m "+protoName(fr.fk.Proto)+" ! --dport "+strconv.Itoa(int(fr.fk.Port))+" ", l.otherPorts(fr))
		}
		l.masquerade(w, fr, m)
		l.endpoints(w, fr, m, fr.f.Endpoints, fr.f.Drop)
	case fr.f.SourceRanges != nil:
		w.rule(m, "-g "+l.ownName('A', fr.fk))
	default:
		w.rule(m, "-g "+l.ownName('F', fr.fk))
	}
}

// otherPorts is what the other ports of a frontend's address get.
func (l *layout) otherPorts(fr *front) string {
	if fr.guarded() {
		return "-g " + chainRefuse
	}
	return "-j RETURN"
}

func (l *layout) masquerade(w *writer, fr *front, match string) {
	switch fr.masq {
	case dataplane.MasqueradeAlways:
		w.rule(match, "-j "+chainMarkMasq)
	case dataplane.MasqueradeOutside:
		w.rule(match, "-j "+chainMarkOutside)
	}
}

// endpoints writes the choice among a list.
func (l *layout) endpoints(w *writer, fr *front, match string, list []table.Endpoint, drop bool) {
	list = dataplane.Unique(list)
	if len(list) == 0 {
		to := chainRefuse
		if drop {
			to = chainDrop
		}
		w.rule(match, "-g "+to)
		return
	}
	if match == "" {
		match = "-p " + protoName(fr.fk.Proto) + " "
	}
	var sticky func(table.Endpoint) string
	if fr.port.Affinity > 0 {
		seconds := int64(dataplane.AffinitySeconds(fr.port))
		sticky = func(e table.Endpoint) string {
			return "--name " + memory(fr.fk, e) + " --mask " + l.fullMask + " --rsource "
		}
		// Clients reads it.
		name := `-m comment --comment "` + fr.port.ID.String() + `" `
		for i, e := range list {
			if i > 0 {
				name = ""
			}
			w.rule(match+name+"-m recent --update --seconds "+strconv.FormatInt(seconds, 10)+" --reap "+sticky(e), l.dnat(e))
		}
	}
	for i, e := range list {
		m := match + l.choose(len(list)-i)
		if sticky != nil {
			m += "-m recent --set " + sticky(e)
		}
		w.rule(m, l.dnat(e))
	}
}

// choose matches one connection in n.
func (l *layout) choose(n int) string {
	switch {
	case n == 1:
		return ""
	case l.cfg.Balance == dataplane.RoundRobin:
		return "-m statistic --mode nth --every " + strconv.Itoa(n) + " --packet 0 "
	}
	return "-m statistic --mode random --probability " + probability(n) + " "
}

// probability is 1/n as iptables-save prints it: the kernel counts in units of
// 2^-31.
func probability(n int) string {
	const one = 1 << 31
	units := (one + n/2) / n
	return strconv.FormatFloat(float64(units)/one, 'f', 11, 64)
}

func (l *layout) dnat(e table.Endpoint) string { return "-j DNAT --to-destination " + e.Addr.String() }

// listPrefix begins the names of this mode's lists of clients.
const listPrefix = "fairlead-"

// memory names the list of clients that stick to an endpoint of a frontend. It
// goes when the last rule that names it does.
func memory(k dataplane.FrontKey, e table.Endpoint) string {
	return listPrefix + protoName(k.Proto) + "-" + where(k) + "-" + strconv.Itoa(int(k.Port)) + "-" + endpointOf(e.Addr)
}

// endpointOf ends such a name.
func endpointOf(at netip.AddrPort) string {
	return at.Addr().String() + "-" + strconv.Itoa(int(at.Port()))
}

func where(k dataplane.FrontKey) string {
	if k.Node {
		return "node"
	}
	return k.Addr.String()
}

func protoName(p svc.Protocol) string {
	switch p {
	case svc.UDP:
		return "udp"
	case svc.SCTP:
		return "sctp"
	}
	return "tcp"
}

// matchFront matches packets to a frontend.
func matchFront(k dataplane.FrontKey) string {
	p := protoName(k.Proto)
	return destination(k.Addr) + "-p " + p + " -m " + p + " --dport " + strconv.Itoa(int(k.Port)) + " "
}

func destination(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return "-d " + a.String() + "/" + strconv.Itoa(a.BitLen()) + " "
}

func source(p netip.Prefix) string {
	if p.Bits() == 0 {
		return "" // all there are
	}
	return "-s " + p.String() + " "
}

// input matches what came by an interface.
func input(i table.Interface) string {
	if i.Prefix {
		return "-i " + i.Name + "+ "
	}
	return "-i " + i.Name + " "
}

// writer collects the lines of a chain as iptables-save prints them.
type writer struct {
	chain string
	b     []byte
}

// rule adds a line. match is empty or ends with a blank.
func (w *writer) rule(match, then string) {
	w.b = append(w.b, "-A "...)
	w.b = append(w.b, w.chain...)
	w.b = append(w.b, ' ')
	w.b = append(w.b, match...)
	w.b = append(w.b, then...)
	w.b = append(w.b, '\n')
}
