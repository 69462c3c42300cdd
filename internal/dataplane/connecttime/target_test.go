package connecttime

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

type slot struct{ list, slot uint32 }

type own struct {
	list uint32
	addr netip.Addr
}

// kernelMaps are the kernel's, which refuse what would let a connection meet half of a frontend.
type kernelMaps struct {
	fronts map[connect.Front]connect.Route
	slots  map[slot]netip.AddrPort
	own    map[own]bool
	nodes  map[netip.Addr]bool
	room   int   // for slots
	places int   // for addresses of the node
	unable error // of each removal of a slot, nil for none
	found  []connect.Class
	broken error        // the first write that let a connection meet half of a frontend
	fail   func() error // of each write, nil for none
	writes int
}

func newMaps() *kernelMaps {
	return &kernelMaps{
		fronts: map[connect.Front]connect.Route{}, slots: map[slot]netip.AddrPort{}, own: map[own]bool{},
		nodes: map[netip.Addr]bool{}, room: 1 << 20, places: 1 << 10,
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

func (m *kernelMaps) DelSlot(list, n uint32) error {
	if err := m.used(list); err != nil {
		return err
	}
	if m.unable == nil {
		delete(m.slots, slot{list, n})
	}
	return m.unable
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
	r := dataplane.NewReconciler("nft", dataplane.Hooks{})
	families := []svc.Family{svc.IPv4, svc.IPv6}
	s := newShared(m, m, slog.New(to), families, func() error { return nil })
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

// randomPort is one of few ports, in one of many forms.
func randomPort(r *rand.Rand, n int) *table.ServicePort {
	f := table.Frontend{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", n+1)), Masquerade: r.IntN(2) == 0}
	list := func() (out []table.Endpoint) {
		for i := range r.IntN(5) {
			out = append(out, table.Endpoint{Addr: flows.AP(fmt.Sprintf("10.244.%d.%d:80", r.IntN(2), i+1)), Local: r.IntN(2) == 0})
		}
		return out
	}
	f.Endpoints = list()
	if r.IntN(2) == 0 {
		f.LocalClients = append([]table.Endpoint{}, list()...)
	}
	p := flows.Port(fmt.Sprintf("web%d", n), "", svc.IPv4, svc.TCP, f)
	if r.IntN(4) == 0 {
		p.Affinity = time.Hour
	}
	return p
}

// However the kernel fails on the way, the maps end as those that saw only the last Table, and nothing is left over.
func TestRandomChangesWithFaults(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 35))
		m := newMaps()
		faults := r.IntN(2) == 0
		m.fail = func() error {
			if faults && r.IntN(10) == 0 {
				return errors.New("a fault")
			}
			return nil
		}
		rec := m.reconciler()
		ports := make([]*table.ServicePort, 6)
		var tab *table.Table
		failed := true
		for range 60 {
			n := r.IntN(len(ports))
			key := randomPort(r, n).Key()
			ports[n] = nil
			if r.IntN(5) > 0 {
				ports[n] = randomPort(r, n)
			}
			var some []*table.ServicePort
			for _, p := range ports {
				if p != nil {
					some = append(some, p)
				}
			}
			tab = table.New(some...)
			changed := []table.Key{key}
			if failed || r.IntN(8) == 0 {
				changed = nil
			}
			if r.IntN(12) == 0 { // the process starts again
				rec, changed = m.reconciler(), nil
			}
			failed = rec.Apply(t.Context(), tab, changed) != nil
		}
		m.fail = nil
		if err := rec.Apply(t.Context(), tab, nil); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if m.broken != nil {
			t.Fatalf("seed %d: %v", seed, m.broken)
		}
		writes := m.writes
		rec.Forget()
		if err := rec.Apply(t.Context(), tab, nil); err != nil || m.writes != writes {
			t.Fatalf("seed %d: %d writes to maps that are as wanted, %v", seed, m.writes-writes, err)
		}
		other := newMaps()
		if err := other.reconciler().Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
		if has, want := m.text(t), other.text(t); has != want {
			t.Fatalf("seed %d: the maps have\n%swant\n%s", seed, has, want)
		}
		if len(m.slots) != len(other.slots) || len(m.own) != len(other.own) {
			t.Fatalf("seed %d: %d slots and %d own endpoints, want %d and %d", seed, len(m.slots), len(m.own), len(other.slots), len(other.own))
		}
	}
}

// A change costs what it changes, whatever else there is.
func TestCostFollowsChange(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	var ports []*table.ServicePort
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}, {Addr: flows.AP("10.244.0.2:80")}}
	for i := range 500 {
		addr := flows.AP(fmt.Sprintf("10.96.%d.%d:80", i/250, i%250+1))
		ports = append(ports, flows.Port(fmt.Sprintf("web%d", i), "", svc.IPv4, svc.TCP, table.Frontend{Addr: addr, Endpoints: at}))
	}
	if err := rec.Apply(t.Context(), table.New(ports...), nil); err != nil {
		t.Fatal(err)
	}
	before := m.writes
	ports[7] = flows.Port("web7", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ports[7].Frontends[0].Addr, Endpoints: at[:1]})
	if err := rec.Apply(t.Context(), table.New(ports...), []table.Key{ports[7].Key()}); err != nil {
		t.Fatal(err)
	}
	if n := m.writes - before; n != 4 { // one list, one frontend, two old slots
		t.Errorf("one endpoint less took %d writes, want 4", n)
	}
}

// What has no room is nft's, and comes back when there is room.
func TestNoRoom(t *testing.T) {
	m := newMaps()
	m.room = 3
	rec := m.reconciler()
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80"), Local: true}, {Addr: flows.AP("10.244.0.2:80")}}
	port := func(n int) *table.ServicePort {
		addr := flows.AP(fmt.Sprintf("10.96.0.%d:80", n))
		return flows.Port(fmt.Sprintf("web%d", n), "", svc.IPv4, svc.TCP, table.Frontend{Addr: addr, Endpoints: at})
	}
	if err := rec.Apply(t.Context(), table.New(port(1), port(2)), nil); err != nil {
		t.Fatalf("no room is an error: %v", err)
	}
	if len(m.fronts) != 1 || len(m.slots) != 2 || len(m.own) != 1 {
		t.Errorf("%d frontends, %d slots, %d own endpoints; want one whole frontend", len(m.fronts), len(m.slots), len(m.own))
	}
	m.room = 10
	if err := rec.Apply(t.Context(), table.New(port(1), port(2)), []table.Key{port(1).Key(), port(2).Key()}); err != nil {
		t.Fatal(err)
	}
	if len(m.fronts) != 2 || len(m.slots) != 4 {
		t.Errorf("%d frontends, %d slots; want two whole frontends", len(m.fronts), len(m.slots))
	}
}

func TestPlanned(t *testing.T) {
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}}
	for name, c := range map[string]struct {
		protocol svc.Protocol
		affinity time.Duration
		front    table.Frontend
		want     bool
	}{
		"plain":              {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, true},
		"inside only":        {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Drop: true, LocalClients: at}, true},
		"UDP":                {svc.UDP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, false},
		"SCTP":               {svc.SCTP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, false},
		"affinity":           {svc.TCP, time.Second, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, false},
		"source ranges":      {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at, SourceRanges: []netip.Prefix{}}, false},
		"DNS":                {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:53"), Endpoints: at}, false},
		"no endpoints":       {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80")}, false},
		"no endpoints, drop": {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Drop: true, LocalClients: []table.Endpoint{}}, false},
	} {
		p := flows.Port("web", "", svc.IPv4, c.protocol, c.front)
		p.Affinity = c.affinity
		if got := planned(&dataplane.Settings{}, p, &p.Frontends[0]) != nil; got != c.want {
			t.Errorf("%s: translated %v, want %v", name, got, c.want)
		}
	}
}

func TestClassify(t *testing.T) {
	sets := [2]dataplane.Settings{
		{Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, LocalPods: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}},
		{PodInterfaces: []table.Interface{{Name: "cali", Prefix: true}}},
	}
	for _, c := range []struct {
		addr, from string
		want       connect.Class
	}{
		{"10.244.1.7", "pods", connect.Class{InPods: [2]bool{true}, Local: [2]bool{true}}},
		{"10.244.2.7", "pods", connect.Class{InPods: [2]bool{true}}},
		{"172.17.0.2", "docker0", connect.Class{}},
		{"fd00::1", "cali0", connect.Class{InPods: [2]bool{false, true}, Local: [2]bool{false, true}}},
	} {
		if got := classify(&sets, &connect.Namespace{Addrs: []netip.Addr{netip.MustParseAddr(c.addr)}, From: c.from}); got != c.want {
			t.Errorf("%s from %s: %+v, want %+v", c.addr, c.from, got, c.want)
		}
	}
}

// A list that an earlier process left behind keeps its number until it is removed.
func TestStrayListsKeepTheirNumbers(t *testing.T) {
	m := newMaps()
	for list := range uint32(4) {
		for n := range uint32(3) {
			m.slots[slot{list + 1, n}] = flows.AP("10.244.0.9:80")
		}
		m.own[own{list + 1, flows.AP("10.244.0.9:80").Addr()}] = true
	}
	rec := m.reconciler()
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}, {Addr: flows.AP("10.244.0.2:80")}}
	web := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: at})
	if err := rec.Apply(t.Context(), table.New(web), nil); err != nil {
		t.Fatal(err)
	}
	if len(m.fronts) != 1 || len(m.slots) != 2 || len(m.own) != 0 {
		t.Errorf("%d frontends, %d slots, %d own endpoints; want 1, 2 and none", len(m.fronts), len(m.slots), len(m.own))
	}
}

// What the Table changed is no repair, what another program changed is one.
func TestRepairs(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	port := func(n int, endpoints ...string) *table.ServicePort {
		f := table.Frontend{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", n))}
		for _, at := range endpoints {
			f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: flows.AP(at)})
		}
		return flows.Port(fmt.Sprintf("web%d", n), "", svc.IPv4, svc.TCP, f)
	}
	apply := func(want string, tab *table.Table) {
		t.Helper()
		tab.NodePortAddrs = []netip.Addr{flows.AP("192.0.2.1:0").Addr()}
		if err := rec.Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(rec.Repaired(), "; "); got != want {
			t.Errorf("repaired: %q, want %q", got, want)
		}
	}
	apply("", table.New(port(1, "10.244.0.1:80"), port(2, "10.244.0.1:80")))
	apply("", table.New(port(1, "10.244.0.2:80"), port(3, "10.244.0.1:80")))

	at := func(n int) connect.Front {
		return connect.Front{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", n)), Protocol: uint8(svc.TCP)}
	}
	delete(m.fronts, at(1))
	m.slots[slot{m.fronts[at(3)].List[0], 0}] = flows.AP("10.244.0.66:80")
	m.fronts[at(66)] = connect.Route{}
	clear(m.nodes)
	m.nodes[flows.AP("192.0.2.66:0").Addr()] = true
	apply("connect-time: TCP 10.96.0.1:80 was missing; connect-time: TCP 10.96.0.3:80 was altered; "+
		"connect-time: a foreign TCP 10.96.0.66:80 was there; connect-time: a foreign address 192.0.2.66 of the node was there; "+
		"connect-time: the node's address 192.0.2.1 was missing", table.New(port(1, "10.244.0.5:80"), port(3, "10.244.0.5:80")))
	apply("", table.New(port(1, "10.244.0.5:80"), port(3, "10.244.0.5:80")))
}

// Addresses of the node that have no room are nft's, and nothing else fails for their sake.
func TestNoRoomForNodeAddresses(t *testing.T) {
	m := newMaps()
	m.places = 2
	var log strings.Builder
	rec := m.reconcilerThatLogs(slog.NewTextHandler(&log, nil))
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}}
	tab := table.New(flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: at}))
	for _, a := range []string{"192.0.2.1:0", "192.0.2.2:0", "192.0.2.3:0", "192.0.2.4:0"} {
		tab.NodePortAddrs = append(tab.NodePortAddrs, flows.AP(a).Addr())
	}
	for range 2 {
		rec.Forget()
		if err := rec.Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
	}
	if len(m.nodes) != 2 || len(m.fronts) != 1 {
		t.Errorf("%d addresses and %d frontends, want 2 and 1", len(m.nodes), len(m.fronts))
	}
	if n := strings.Count(log.String(), "no room for all addresses"); n != 1 {
		t.Errorf("%d warnings, want 1: %s", n, log.String())
	}
	tab.NodePortAddrs = tab.NodePortAddrs[2:]
	if err := rec.Apply(t.Context(), tab, nil); err != nil {
		t.Fatal(err)
	}
	for _, a := range tab.NodePortAddrs {
		if !m.nodes[a] || len(m.nodes) != 2 {
			t.Errorf("after others went: %v, want all of %v", m.nodes, tab.NodePortAddrs)
		}
	}
}

// Where there is no room and what was begun cannot be removed, that is an error, whatever error the removal has.
func TestNoRoomAndNoRemoval(t *testing.T) {
	for _, unable := range []error{errors.New("a fault"), connect.ErrFull} {
		m := newMaps()
		m.room, m.unable = 1, unable
		rec := m.reconciler()
		at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}, {Addr: flows.AP("10.244.0.2:80")}}
		web := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: at})
		if err := rec.Apply(t.Context(), table.New(), nil); err != nil {
			t.Fatal(err)
		}
		tab := table.New(web)
		if err := rec.Apply(t.Context(), tab, []table.Key{web.Key()}); !errors.Is(err, unable) {
			t.Errorf("%v, want %v", err, unable)
		}
		m.unable = nil
		if err := rec.Apply(t.Context(), tab, nil); err != nil || len(m.slots) > 0 {
			t.Errorf("the removal works again: %d slots, %v", len(m.slots), err)
		}
	}
}

// A Pod is classified by the ranges of both families, never by one alone.
func TestClassifiedByBothFamilies(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	tab := table.New()
	tab.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00::/64")}
	if err := rec.Apply(t.Context(), tab, nil); err != nil {
		t.Fatal(err)
	}
	if len(m.found) == 0 {
		t.Error("no Pod was classified")
	}
	for _, c := range m.found {
		if c.InPods != [2]bool{true, true} {
			t.Errorf("a Pod of both families was classified as %+v", c)
		}
	}
	tab.ClusterCIDRs = tab.ClusterCIDRs[1:]
	if err := rec.Apply(t.Context(), tab, nil); err != nil {
		t.Fatal(err)
	}
	if c := m.found[len(m.found)-1]; c.InPods != [2]bool{false, true} {
		t.Errorf("after a change of IPv4's ranges: %+v", c)
	}
}
