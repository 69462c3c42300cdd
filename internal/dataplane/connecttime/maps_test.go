package connecttime

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

type slot struct{ list, slot uint32 }

type member struct {
	list uint32
	at   netip.AddrPort
}

type own struct {
	list uint32
	addr netip.Addr
}

// kernelMaps are the kernel's, which refuse what would let a connection meet half of a frontend.
type kernelMaps struct {
	fronts map[connect.Front]connect.Route
	slots  map[slot]netip.AddrPort
	own    map[own]bool
	member map[member]bool
	nodes  map[netip.Addr]bool
	// connected is a socket of UDP for each frontend, swept how often they were looked at.
	connected map[netip.AddrPort]netip.AddrPort
	swept     int
	// attempts are connections of TCP without an answer, led where they are led to, and again how often they began again.
	attempts []connect.Attempt
	led      *detours
	again    int
	lost     error    // of each commit, nil for none
	endless  error    // of each end of attempts, nil for none
	part     error    // of each list of attempts, which then has none of them, nil for none
	sweeper  *sweeper // of the last reconciler
	reads    int      // of the frontends
	room     int      // for slots
	places   int      // for addresses of the node
	unable   error    // of each removal of a slot, nil for none
	found    []connect.Class
	broken   error        // the first write that let a connection meet half of a frontend
	fail     func() error // of each write, nil for none
	writes   int
}

func newMaps() *kernelMaps {
	return &kernelMaps{
		fronts: map[connect.Front]connect.Route{}, slots: map[slot]netip.AddrPort{}, own: map[own]bool{},
		member: map[member]bool{},
		nodes:  map[netip.Addr]bool{}, room: 1 << 20, places: 1 << 10,
		led: noDetours(),
	}
}

func (m *kernelMaps) breaks(err error) error {
	if m.broken == nil {
		m.broken = err
	}
	return err
}

func (m *kernelMaps) write() error {
	m.writes++
	if m.fail != nil {
		return m.fail()
	}
	return nil
}

func (m *kernelMaps) Fronts(f func(connect.Front, connect.Route)) error {
	m.reads++
	for k, r := range m.fronts {
		f(k, r)
	}
	return nil
}

func (m *kernelMaps) PutFront(f connect.Front, r connect.Route) error {
	for i, list := range r.List {
		for n := range r.Count[i] {
			if !m.slots[slot{list, n}].IsValid() {
				return m.breaks(fmt.Errorf("%v leads to slot %d of list %d, which is not there", f, n, list))
			}
		}
	}
	if err := m.write(); err != nil {
		return err
	}
	m.fronts[f] = r
	return nil
}

func (m *kernelMaps) DelFront(f connect.Front) error {
	if err := m.write(); err != nil {
		return err
	}
	delete(m.fronts, f)
	return nil
}

// used returns an error if a frontend leads to a list.
func (m *kernelMaps) used(list uint32) error {
	for f, r := range m.fronts {
		if r.List[0] == list || r.List[1] == list {
			return m.breaks(fmt.Errorf("list %d is changed while %v leads to it", list, f))
		}
	}
	return m.write()
}

func (m *kernelMaps) Slots(f func(list, slot uint32, at netip.AddrPort)) error {
	for k, at := range m.slots {
		f(k.list, k.slot, at)
	}
	return nil
}

func (m *kernelMaps) PutSlots(list uint32, endpoints []netip.AddrPort) error {
	if err := m.used(list); err != nil {
		return err
	}
	for i, at := range endpoints {
		if len(m.slots) >= m.room {
			return connect.ErrFull
		}
		m.slots[slot{list, uint32(i)}] = at
	}
	return nil
}

func (m *kernelMaps) DelSlots(list uint32, endpoints []netip.AddrPort) error {
	for i := range endpoints {
		if err := m.used(list); err != nil {
			return err
		}
		if m.unable != nil {
			return m.unable
		}
		delete(m.slots, slot{list, uint32(i)})
	}
	return nil
}

func (m *kernelMaps) Own(f func(list uint32, a netip.Addr)) error {
	for k := range m.own {
		f(k.list, k.addr)
	}
	return nil
}

func (m *kernelMaps) PutOwn(list uint32, a netip.Addr) error {
	if err := m.used(list); err != nil {
		return err
	}
	m.own[own{list, a}] = true
	return nil
}

func (m *kernelMaps) DelOwn(list uint32, a netip.Addr) error {
	if err := m.used(list); err != nil {
		return err
	}
	delete(m.own, own{list, a})
	return nil
}

func (m *kernelMaps) Members(f func(list uint32, at netip.AddrPort)) error {
	for k := range m.member {
		f(k.list, k.at)
	}
	return nil
}

func (m *kernelMaps) PutMembers(list uint32, endpoints []netip.AddrPort) error {
	if len(endpoints) == 0 {
		return nil
	}
	if err := m.used(list); err != nil {
		return err
	}
	for _, at := range endpoints {
		m.member[member{list, at}] = true
	}
	return nil
}

func (m *kernelMaps) DelMember(list uint32, at netip.AddrPort) error {
	if err := m.used(list); err != nil {
		return err
	}
	delete(m.member, member{list, at})
	return nil
}

func (m *kernelMaps) EndSockets(stay func(front, endpoint netip.AddrPort) bool) (int, error) {
	before := len(m.connected)
	for front, at := range m.connected {
		if !stay(front, at) {
			delete(m.connected, front)
		}
	}
	m.swept++
	return before - len(m.connected), nil
}

func (m *kernelMaps) Nodes() (out []netip.Addr, err error) {
	for a := range m.nodes {
		out = append(out, a)
	}
	return out, nil
}

func (m *kernelMaps) PutNode(a netip.Addr) error {
	if len(m.nodes) >= m.places && !m.nodes[a] {
		return connect.ErrFull
	}
	m.nodes[a] = true
	return m.write()
}

func (m *kernelMaps) DelNode(a netip.Addr) error {
	delete(m.nodes, a)
	return m.write()
}

// Attempts is sockets'. The client 192.0.2.9 is not known.
func (m *kernelMaps) Attempts(stay func(front, at netip.AddrPort) bool) ([]connect.Attempt, error) {
	if m.part != nil {
		return nil, m.part
	}
	return slices.DeleteFunc(slices.Clone(m.attempts), func(a connect.Attempt) bool { return stay(a.Front, a.To) }), nil
}

func (m *kernelMaps) Choose(a *connect.Attempt) (to netip.AddrPort, err error) {
	r, ok := m.fronts[connect.Front{Addr: a.Front, Protocol: uint8(svc.TCP)}]
	if a.From.Addr() == flows.AP("192.0.2.9:0").Addr() || !ok {
		return to, nil
	}
	return m.slots[slot{r.List[0], 0}], nil
}

func (m *kernelMaps) EndAttempts(all []connect.Attempt) (ended int, err error) {
	if m.endless != nil {
		return 0, m.endless
	}
	before := len(m.attempts)
	m.attempts = slices.DeleteFunc(m.attempts, func(one connect.Attempt) bool {
		return slices.ContainsFunc(all, func(a connect.Attempt) bool { return a.From == one.From })
	})
	return before - len(m.attempts), nil
}

// Classify is classifier's. There is one Pod, of both families.
func (m *kernelMaps) Classify(f func(*connect.Namespace) connect.Class) error {
	m.found = append(m.found, f(&connect.Namespace{Addrs: []netip.Addr{flows.AP("10.244.1.7:0").Addr(), flows.AP("[fd00::7]:0").Addr()}}))
	return nil
}

// reconciler is a Reconciler that writes into m, as New makes it.
func (m *kernelMaps) reconciler() *dataplane.Reconciler {
	return m.reconcilerThatLogs(slog.DiscardHandler)
}

func (m *kernelMaps) reconcilerThatLogs(to slog.Handler) *dataplane.Reconciler {
	r := dataplane.NewReconciler("nft", dataplane.Hooks{Unchanged: func() bool { return true }}) // as nft on a quiet node
	families := []svc.Family{svc.IPv4, svc.IPv6}
	s := newShared(m, noKernel{m.led, m}, m, slog.New(to), families, func() error { return nil })
	m.sweeper = s.sweeper
	for _, f := range families {
		r.Add(f, &target{shared: s, family: f})
	}
	return r
}

func (m *kernelMaps) text(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	if err := dump(&b, m); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// noKernel are detours that are only remembered.
type noKernel struct {
	*detours
	m *kernelMaps
}

func (n noKernel) commit() error {
	if n.m.lost != nil {
		return n.m.lost
	}
	n.m.again += len(n.begun)
	clear(n.begun)
	return nil
}
