package zone

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// entry is a name and the records it shall have.
type entry struct {
	key  string // wire form below the cluster domain, without root label
	recs *records
}

// Hold delays answers until Release, which makes each once: for the first lists,
// where a Service is in one and its slices are in another.
func (z *Zone) Hold() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.held = true
}

// Release makes the answers of all that has changed since Hold, each once.
func (z *Zone) Release() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.held = false
	names := 0
	for _, s := range z.services {
		names += 2
		for _, sl := range s.slices {
			names += len(sl.ports) + 2*len(sl.endpoints)
		}
	}
	z.names.reserve(names)
	for name, s := range z.services {
		if s.stale {
			s.stale = false
			z.publish(name, s)
		}
	}
}

// publish updates the index from the Service and its slices, unless the zone is
// held. Names whose records do not change are not touched. The
// caller holds mu.
func (z *Zone) publish(name svc.Name, s *service) {
	if z.held {
		s.stale = true
		return
	}
	entries, ptrs := z.wanted(name, s)
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.key, b.key) })
	slices.SortFunc(ptrs, comparePtr)
	ptrs = slices.Compact(ptrs)
	changed := z.putNames(s, entries)
	changed = z.putPointers(s, ptrs) || changed
	if name == z.nameServer {
		z.names.set(mustWire("ns.dns"), z.nameServerRecords(s))
	}
	if changed {
		z.serial.Add(1)
	}
	if s.spec == nil && len(s.slices) == 0 {
		delete(z.services, name)
	}
}

// putNames enters the wanted names and removes the others that the Service
// had.
func (z *Zone) putNames(s *service, wanted []entry) (changed bool) {
	old := s.names
	for _, e := range wanted {
		for len(old) > 0 && old[0] < e.key {
			z.names.remove(old[0])
			old, changed = old[1:], true
		}
		if len(old) > 0 && old[0] == e.key {
			old = old[1:]
		}
		changed = z.names.set(e.key, e.recs) || changed
	}
	for _, k := range old {
		z.names.remove(k)
		changed = true
	}
	if !changed {
		return false
	}
	if len(wanted) == 0 {
		s.names = nil
		return true
	}
	s.names = make([]string, len(wanted))
	for i, e := range wanted {
		s.names[i] = e.key
	}
	return true
}

// putPointers does for PTR records what putNames does for names.
func (z *Zone) putPointers(s *service, wanted []ptr) (changed bool) {
	old, rest := s.ptrs, wanted
	for len(old) > 0 || len(rest) > 0 {
		var a netip.Addr
		if len(old) == 0 || len(rest) > 0 && rest[0].addr.Less(old[0].addr) {
			a = rest[0].addr
		} else {
			a = old[0].addr
		}
		o, w := pointersOf(a, old), pointersOf(a, rest)
		old, rest = old[len(o):], rest[len(w):]
		if !slices.Equal(o, w) {
			z.repoint(a, o, w)
			changed = true
		}
	}
	if changed {
		s.ptrs = slices.Clip(wanted)
	}
	return changed
}

// pointersOf are the first records, which are sorted, as long as they are those
// of an address.
func pointersOf(a netip.Addr, sorted []ptr) []ptr {
	n := 0
	for n < len(sorted) && sorted[n].addr == a {
		n++
	}
	return sorted[:n]
}

// wanted is what the Service shall have in the index. A Service owns its name
// and all names below it.
func (z *Zone) wanted(name svc.Name, s *service) ([]entry, []ptr) {
	base, ok := serviceKey(name)
	if !ok || s.spec == nil {
		return nil, nil
	}
	if s.spec.external != "" {
		var n Name
		if n.ParseText(s.spec.external) != nil || n.labels == 0 {
			return nil, nil
		}
		target := slices.Clone(n.Wire())
		return []entry{{base, &records{more: &moreRecords{cname: target}}}}, nil
	}
	b := builder{z: z, base: base, hosts: s.hosts()}
	b.addHosts()
	if s.spec.headless {
		b.addHeadless(s)
	} else if len(s.spec.addrs) > 0 {
		b.addVIP(s.spec)
	} else {
		return nil, nil // no address yet
	}
	return b.entries, b.ptrs
}

// serviceKey is the key of a Service's own name.
func serviceKey(name svc.Name) (string, bool) {
	w, ok1 := appendLabel(make([]byte, 0, len(name.Name)+len(name.Namespace)+6), name.Name)
	w, ok2 := appendLabel(w, name.Namespace)
	w, ok3 := appendLabel(w, "svc")
	return string(w), ok1 && ok2 && ok3
}

// host is the endpoints of a Service that share a name.
type host struct {
	key   string
	addrs []netip.Addr // sorted, distinct
}

// hosts groups the endpoints of all slices by their names, sorted.
func (s *service) hosts() []host {
	n := 0
	for _, sl := range s.slices {
		n += len(sl.endpoints)
	}
	all := make([]endpoint, 0, n)
	for _, sl := range s.slices {
		for _, e := range sl.endpoints {
			if e.key != "" {
				all = append(all, e)
			}
		}
	}
	slices.SortFunc(all, func(a, b endpoint) int {
		return cmp.Or(strings.Compare(a.key, b.key), a.addr.Compare(b.addr))
	})
	all = slices.Compact(all)
	addrs := make([]netip.Addr, len(all))
	out := make([]host, 0, len(all))
	for i, from := 0, 0; i < len(all); i++ {
		addrs[i] = all[i].addr
		if i+1 == len(all) || all[i+1].key != all[i].key {
			out = append(out, host{all[i].key, addrs[from : i+1 : i+1]})
			from = i + 1
		}
	}
	return out
}

// below is the key of a label below another key; false if the name would be too long
// in one of the cluster domains, the longest of which takes longestDomain bytes.
func below(label, base string, longestDomain int) (string, bool) {
	w, ok := appendLabel(make([]byte, 0, 1+len(label)+len(base)), label)
	if !ok || len(w)+len(base)+longestDomain > maxName {
		return "", false
	}
	return string(append(w, base...)), true
}

// builder collects the entries of one Service.
type builder struct {
	z       *Zone
	base    string
	hosts   []host
	entries []entry
	ptrs    []ptr
}

func (b *builder) add(key string, r *records) { b.entries = append(b.entries, entry{key, r}) }

// addHosts enters the endpoints' own names and where their addresses lead.
func (b *builder) addHosts() {
	b.entries = make([]entry, 0, len(b.hosts)+4)
	b.ptrs = make([]ptr, 0, len(b.hosts)+2)
	for _, h := range b.hosts {
		b.add(h.key, newRecords(h.addrs, b.z.ttl))
		for _, a := range h.addrs {
			b.ptrs = append(b.ptrs, ptr{addr: a, name: h.key})
		}
	}
}

// addVIP enters a Service with cluster IPs.
func (b *builder) addVIP(spec *serviceSpec) {
	own := newRecords(sortedAddrs(slices.Clone(spec.addrs)), b.z.ttl)
	for _, a := range spec.addrs {
		b.ptrs = append(b.ptrs, ptr{addr: a, name: b.base, vip: true})
	}
	targets := func(ports []port) ([]srvTarget, int) {
		out := make([]srvTarget, 0, len(ports))
		for _, p := range ports {
			t := srvTarget{b.base, p.number, spec.addrs}
			if !slices.ContainsFunc(out, func(o srvTarget) bool { return o.port == t.port }) {
				out = append(out, t)
			}
		}
		return out, len(ports) * len(spec.addrs)
	}
	b.addPorts(own, spec.ports, targets)
}

// addHeadless enters a Service whose name has its endpoints' addresses.
func (b *builder) addHeadless(s *service) {
	if len(b.hosts) == 0 {
		return
	}
	var all []netip.Addr
	for _, h := range b.hosts {
		all = append(all, h.addrs...)
	}
	own := newRecords(sortedAddrs(all), b.z.ttl)
	var ports []port
	for _, sl := range s.slices {
		if len(sl.endpoints) > 0 {
			ports = append(ports, sl.ports...)
		}
	}
	slices.SortFunc(ports, func(a, b port) int {
		return cmp.Or(strings.Compare(a.name, b.name), strings.Compare(a.protocol, b.protocol), cmp.Compare(a.number, b.number))
	})
	ports = slices.Compact(ports)
	b.addPorts(own, ports, func(wanted []port) ([]srvTarget, int) { return b.endpointTargets(s, wanted) })
}

// endpointTargets are the hosts of a headless Service that have one of the
// ports, and the number of pairs of address and port.
func (b *builder) endpointTargets(s *service, wanted []port) ([]srvTarget, int) {
	type item struct {
		key  string
		port uint16
		addr netip.Addr
	}
	var items []item
	for _, sl := range s.slices {
		for _, p := range sl.ports {
			if !slices.Contains(wanted, p) {
				continue
			}
			for _, e := range sl.endpoints {
				if e.key != "" {
					items = append(items, item{e.key, p.number, e.addr})
				}
			}
		}
	}
	slices.SortFunc(items, func(x, y item) int {
		return cmp.Or(strings.Compare(x.key, y.key), cmp.Compare(x.port, y.port), x.addr.Compare(y.addr))
	})
	items = slices.Compact(items)
	var out []srvTarget
	for _, it := range items {
		last := len(out) - 1
		if last < 0 || out[last].host != it.key || out[last].port != it.port {
			out = append(out, srvTarget{host: it.key, port: it.port})
			last++
		}
		out[last].addrs = append(out[last].addrs, it.addr)
	}
	return out, len(items)
}

// addPorts enters the Service's own name with SRV records for all ports, one
// name for each named port, and the names in between.
func (b *builder) addPorts(own *records, ports []port, targets func([]port) ([]srvTarget, int)) {
	b.add(b.base, own)
	if len(ports) == 0 {
		return
	}
	all := b.srv(targets(ports))
	own.more = &moreRecords{srv: all}
	seen := map[string]bool{}
	for _, p := range ports {
		if p.name == "" || seen[p.protocol+" "+p.name] {
			continue
		}
		between, ok1 := below("_"+p.protocol, b.base, b.z.longestDomain)
		key, ok2 := below("_"+p.name, between, b.z.longestDomain)
		if !ok1 || !ok2 {
			continue
		}
		same := slices.DeleteFunc(slices.Clone(ports), func(q port) bool { return q.name != p.name || q.protocol != p.protocol })
		sets := all
		if len(same) != len(ports) {
			sets = b.srv(targets(same))
		}
		b.add(key, &records{more: &moreRecords{srv: sets}})
		if !seen[p.protocol] {
			b.add(between, &records{})
		}
		seen[p.protocol], seen[p.protocol+" "+p.name] = true, true
	}
}

// srv packs the targets for each cluster domain.
func (b *builder) srv(targets []srvTarget, pairs int) []srvSet {
	weight := uint16(max(1, 100/max(1, pairs)))
	out := make([]srvSet, len(b.z.domains))
	for i, d := range b.z.domains {
		out[i] = newSRV(targets, weight, d.wire, b.z.ttl)
	}
	return out
}

// nameServerRecords are the records of ns.dns: the cluster IPs of the DNS
// Service.
func (z *Zone) nameServerRecords(s *service) *records {
	if s.spec == nil {
		return &records{}
	}
	return newRecords(sortedAddrs(slices.Clone(s.spec.addrs)), z.ttl)
}
