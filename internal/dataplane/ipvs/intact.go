package ipvs

import (
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
)

// Intact is dataplane.Checker's: of nothing that the mode writes does the kernel
// report changes, but of rules of variant nft. It looks at the sizes of tables and
// sets, the addresses of the device, and all virtual servers.
func (m *Mode) Intact() (bool, error) {
	if m.kernel.servers == nil || !m.Known() {
		return true, nil
	}
	if ok, err := m.watch.Intact(); !ok || err != nil {
		return false, err
	}
	if err := m.kernel.device.CatchUp(); err != nil {
		return false, err
	}
	found := map[ipvs.Key]ipvs.Service{}
	if err := m.kernel.servers.Services(func(s ipvs.Service) { found[s.Key] = s }); err != nil {
		return false, err
	}
	for _, t := range m.targets {
		if ok, err := t.intact(found); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// perCheck is of how many virtual servers of a family one Intact reads the endpoints.
const perCheck = 100

// intact is Mode's; found are all virtual servers.
func (t *target) intact(found map[ipvs.Key]ipvs.Service) (bool, error) {
	var sizes [setCount]int
	for e := range t.stored.elements {
		sizes[e.set]++
		if e.set == setDevice && !t.kernel.device.Has(e.IP) {
			return false, nil
		}
	}
	for s := range setDevice {
		if n, err := t.kernel.sets.Len(s.name(t.layout.family)); err != nil || n != sizes[s] {
			return false, err
		}
	}
	for key, v := range t.stored.servers {
		if found[key] != v.Service {
			return false, nil
		}
	}
	if len(t.unchecked) == 0 {
		for key := range t.stored.servers {
			t.unchecked = append(t.unchecked, key)
		}
	}
	for range min(perCheck, len(t.unchecked)) {
		last := len(t.unchecked) - 1
		key := t.unchecked[last]
		t.unchecked = t.unchecked[:last]
		v := t.stored.servers[key]
		if v == nil {
			continue // deleted in between
		}
		dests := map[netip.AddrPort]uint32{}
		if err := t.kernel.servers.Dests(key, func(d ipvs.Dest) { dests[d.Addr] = d.Weight }); err != nil {
			return false, err
		}
		same := true
		v.compareDests(dests, func(string, ...any) { same = false })
		if !same {
			return false, nil
		}
	}
	return true, nil
}

// compareDests reports how the endpoints found differ from the endpoints of v. One that was
// leaving may be gone.
func (v *virtual) compareDests(found map[netip.AddrPort]uint32, report func(format string, args ...any)) {
	for a, w := range v.dests {
		switch n, there := found[a]; {
		case !there && w != 0:
			report("real server %s of %s was missing", a, v.Key)
		case there && n != w:
			report("the weight of real server %s of %s was changed", a, v.Key)
		}
	}
	for a := range found {
		if _, known := v.dests[a]; !known {
			report("a foreign real server %s was at %s", a, v.Key)
		}
	}
}

var _ dataplane.Checker = (*Mode)(nil)
