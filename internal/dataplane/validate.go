package dataplane

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Validate returns why a mode cannot write a port, or nil.
func Validate(p *table.ServicePort, mode string) error {
	fail := func(f *table.Frontend, format string, args ...any) error {
		return fmt.Errorf("%s, frontend %s %s: %s", p.ID, f.Kind, f.Addr, fmt.Sprintf(format, args...))
	}
	switch p.Protocol {
	case svc.TCP, svc.UDP, svc.SCTP:
	default:
		return fmt.Errorf("%s: %s is not one of TCP, UDP, SCTP", p.ID, p.Protocol)
	}
	for i := range p.Frontends {
		f := &p.Frontends[i]
		if !goodAddr(f.Addr, p.Family) {
			return fail(f, "not an address of family %s with a port", p.Family)
		}
		for _, list := range [][]table.Endpoint{f.Endpoints, f.LocalClients} {
			if len(list) > table.MaxEndpoints {
				return fail(f, "%d endpoints, %s mode has room for %d", len(list), mode, table.MaxEndpoints)
			}
			for _, e := range list {
				if !goodAddr(e.Addr, p.Family) {
					return fail(f, "endpoint %s is not an address of family %s with a port", e.Addr, p.Family)
				}
			}
		}
	}
	return nil
}

func goodAddr(a netip.AddrPort, f svc.Family) bool {
	return a.IsValid() && svc.FamilyOf(a.Addr()) == f && !a.Addr().Is4In6() && a.Addr().Zone() == "" && a.Port() != 0
}

// Unique returns a sorted list without repetitions: itself, if it has none.
func Unique(list []table.Endpoint) []table.Endpoint {
	for i := 1; i < len(list); i++ {
		if list[i].Addr == list[i-1].Addr {
			return slices.CompactFunc(slices.Clone(list), func(a, b table.Endpoint) bool { return a.Addr == b.Addr })
		}
	}
	return list
}

// Reslot gives every endpoint of want a slot from 0 to len(want)-1, the one it
// had in old if that is among them, so that as few slots as possible change.
// The result is want itself if the order is the same.
func Reslot(old, want []table.Endpoint) []table.Endpoint {
	sameAddr := func(a, b table.Endpoint) bool { return a.Addr == b.Addr }
	if len(old) == 0 || len(want) == 0 || slices.EqualFunc(old, want, sameAddr) {
		return want
	}
	wanted := make(map[netip.AddrPort]int, len(want))
	for i := range want {
		wanted[want[i].Addr] = i
	}
	out := make([]table.Endpoint, len(want))
	placed := make([]bool, len(want))
	for slot, e := range old {
		if i, ok := wanted[e.Addr]; ok && slot < len(out) && !placed[i] {
			out[slot], placed[i] = want[i], true
		}
	}
	slot := 0
	for i := range want {
		if placed[i] {
			continue
		}
		for out[slot].Addr.IsValid() {
			slot++
		}
		out[slot] = want[i]
	}
	return out
}
