package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
)

// Look is dataplane.Looker's: it reads the virtual servers of the frontends, and the sets that say
// who is let in. A set is read as a whole.
func (m *Mode) Look(ctx context.Context, fronts []dataplane.Asked, _ netip.Addr) ([]dataplane.Installed, error) {
	m.looks.mu.Lock()
	defer m.looks.mu.Unlock()
	k := m.looks.kernel
	if k == nil {
		return nil, errors.New("ipvs: nothing is programmed yet")
	}
	out := make([]dataplane.Installed, len(fronts))
	for _, t := range m.targets {
		elements := map[element]bool{}
		for i, a := range fronts {
			if a.Family != t.layout.family {
				continue
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if len(elements) == 0 {
				if err := t.lookSets(k, elements); err != nil {
					return nil, err
				}
			}
			out[i].Front = a.String()
			if err := t.look(k, &a, elements, &out[i]); err != nil {
				return nil, fmt.Errorf("ipvs %s: read %s: %w", t.layout.family, a, err)
			}
		}
	}
	return out, nil
}

// looks holds the sockets of Look. The Mode's others belong to the caller of Apply.
type looks struct {
	mu     sync.Mutex
	kernel *kernel // without a device; nil until Apply has opened it, and after Close
}

// open opens the sockets in the namespace of the calling thread.
func (l *looks) open() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	vs, err := ipvs.Dial()
	if err != nil {
		return err
	}
	sets, err := ipset.Dial()
	if err != nil {
		return errors.Join(err, vs.Close())
	}
	l.kernel = &kernel{servers: serverConn{vs}, sets: sets}
	return nil
}

func (l *looks) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.kernel
	if l.kernel = nil; k == nil {
		return nil
	}
	return errors.Join(k.servers.Close(), k.sets.Close())
}

// lookSets reads what decides about a packet before it meets a virtual server.
func (t *target) lookSets(k *kernel, to map[element]bool) error {
	for _, s := range []set{setFront, setNobody, setDrop, setRanged, setAllow, setSelf, setInside} {
		if err := k.sets.List(s.name(t.layout.family), func(e ipset.Element) { to[element{s, e}] = true }); err != nil {
			return err
		}
	}
	return nil
}

func (t *target) look(k *kernel, a *dataplane.Asked, elements map[element]bool, to *dataplane.Installed) error {
	at := netip.AddrPortFrom(a.At, a.Port)
	in := func(s set) bool {
		e := frontElement(s, a.Proto, at)
		if elements[e] {
			to.Says("set "+s.name(t.layout.family), e.Element.String())
		}
		return elements[e]
	}
	if to.Present = in(setFront); !to.Present {
		to.Says("set "+setFront.name(t.layout.family), "no element "+frontElement(setFront, a.Proto, at).Element.String())
		return nil
	}
	endpoints, err := t.dests(k, ipvs.AddressKey(a.Proto, at), to)
	if err != nil {
		return err
	}
	if in(setNobody) {
		endpoints = nil
	}
	to.Outside = dataplane.NewFate(endpoints, in(setDrop))
	if to.Limited = in(setRanged); to.Limited {
		t.allowed(at, elements, to)
	}
	for e := range elements {
		if e.set == setInside && e.IP == a.At && e.Proto == a.Proto && e.Port == a.Port {
			list, err := t.dests(k, ipvs.MarkKey(e.Mark, t.layout.family), to)
			if err != nil {
				return err
			}
			fate := dataplane.NewFate(list, false)
			to.Inside = &fate
		}
	}
	return nil
}

// dests are the endpoints of a virtual server that take new connections; none if it is not there.
func (t *target) dests(from *kernel, k ipvs.Key, to *dataplane.Installed) ([]netip.AddrPort, error) {
	weights := map[netip.AddrPort]ipvs.Dest{}
	err := from.servers.Dests(k, func(d ipvs.Dest) { weights[d.Addr] = d })
	if ipvs.IsMissing(err) {
		to.Says("virtual server "+k.String(), "not there")
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []netip.AddrPort
	for _, a := range slices.SortedFunc(maps.Keys(weights), netip.AddrPort.Compare) {
		d := weights[a]
		to.Says("virtual server "+k.String(), fmt.Sprintf("-> %s weight %d, %d open connections", a, d.Weight, d.Active))
		if d.Weight > 0 {
			out = append(out, a)
		}
	}
	return out, nil
}

func (t *target) allowed(at netip.AddrPort, elements map[element]bool, to *dataplane.Installed) {
	for e := range elements {
		if e.IP != at.Addr() || e.Port != at.Port() {
			continue
		}
		switch e.set {
		case setAllow:
			to.Allow = append(to.Allow, e.Net)
		case setSelf:
			to.Allow = append(to.Allow, netip.PrefixFrom(at.Addr(), at.Addr().BitLen()))
		default:
			continue
		}
		to.Says("set "+e.set.name(t.layout.family), e.Element.String())
	}
	to.Allow = wholes(to.Allow)
}

// wholes puts the halves that ipset.Halves makes of everything together again.
func wholes(ranges []netip.Prefix) []netip.Prefix {
	for _, all := range []string{"0.0.0.0/0", "::/0"} {
		whole := netip.MustParsePrefix(all)
		halves := ipset.Halves(whole)
		if len(halves) == 2 && slices.Contains(ranges, halves[0]) && slices.Contains(ranges, halves[1]) {
			ranges = slices.DeleteFunc(ranges, func(p netip.Prefix) bool { return p == halves[0] || p == halves[1] })
			ranges = append(ranges, whole)
		}
	}
	return ranges
}

var _ dataplane.Looker = (*Mode)(nil)
