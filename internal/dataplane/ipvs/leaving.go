package ipvs

import (
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
)

// A virtual server that no frontend wants any more stays while connections through it
// are open, since the kernel would end them with it. New ones meet what they
// would without it: at an address that other frontends have they are refused, or
// dropped where others route it to this node; at one without a frontend dropped. The
// next full comparison without an open connection removes it, that of another
// process, too: nothing but the kernel reports that it is leaving.

// keepOpen keeps those virtual servers of e that are to go and have open
// connections.
func (t *target) keepOpen(e *edit) error {
	for key := range e.gone {
		v := t.stored.servers[key]
		if v == nil || !drains(v.Scheduler, v.proto) {
			continue
		}
		open := false
		if err := t.kernel.servers.Dests(key, func(d ipvs.Dest) { open = open || d.Active > 0 }); err != nil {
			return err
		}
		if open {
			t.state.leave(v, t.stored.elements, e)
		}
	}
	return nil
}

// leave wants v without endpoints, and with it what its packets need to come
// here; stored are the elements that are in the kernel.
func (s *state) leave(v *virtual, stored map[element]bool, e *edit) {
	var kept []element
	if v.Mark == 0 {
		for _, set := range []set{setFront, setNobody, setLeaving} {
			kept = append(kept, frontElement(set, v.Proto, v.Addr))
		}
		at := ipset.Element{IP: v.Addr.Addr()}
		if el := (element{setDevice, at}); stored[el] {
			kept = append(kept, el, element{setOuter, at})
		}
	}
	for _, el := range kept {
		s.counts[el]++
		e.elements[el] = true
	}
	s.leaving[v.Key] = kept
	delete(e.gone, v.Key)
	e.wanted[v.Key] = &server{Service: v.Service, proto: v.proto}
}

// stay undoes leave, since a frontend wants the server of this key.
func (s *state) stay(key ipvs.Key, e *edit) {
	for _, el := range s.leaving[key] {
		s.uncount(el, e)
	}
	delete(s.leaving, key)
}
