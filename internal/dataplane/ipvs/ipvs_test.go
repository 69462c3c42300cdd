package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// The text of everything the mode writes.
func TestDump(t *testing.T) {
	inside(t, func(p dataplane.Applier) {
		flows.Apply(t, p, flows.EveryField(), nil)
		flows.Golden(t, *update, "dump.txt", flows.Dump(t, p))
	})
}

// Whatever way leads to a Table, and however many processes, the kernel has
// what a fresh start gives.
func TestRandomWalk(t *testing.T) {
	flows.RandomWalk(t, 25, flows.States(1)[7:], inside, func() dataplane.Applier { return create("")(t, nil) })
}

func TestOneBadPort(t *testing.T) {
	flows.OneBadPort(t, inside, "tcp 10.96.0.1:80", "10.96.0.2")
}

// What another program removes or adds is repaired by the next full Apply, which
// names it.
func TestRepair(t *testing.T) {
	inside(t, func(p dataplane.Applier) {
		tab := flows.EveryField()
		flows.Apply(t, p, tab, nil)
		before := flows.Dump(t, p)
		k := p.(*Mode).kernel
		web := ipvs.Service{Key: ipvs.AddressKey(svc.TCP, flows.AP("10.96.0.10:80")), Scheduler: DefaultScheduler}
		send := func(v verb, d ipvs.Dest) {
			if refused, err := k.servers.Send(&changes{[]change{{verb: v, service: web, dest: d}}}); err != nil || len(refused) > 0 {
				t.Fatal(refused, err)
			}
		}
		check := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range []struct {
			name   string
			damage func()
			say    string
		}{
			{"virtual server", func() { send(delServer, ipvs.Dest{}) }, "virtual server tcp 10.96.0.10:80 was missing"},
			{"scheduler", func() { web.Scheduler = "lc"; send(setServer, ipvs.Dest{}) }, "virtual server tcp 10.96.0.10:80 was changed"},
			{"real server", func() { send(delDest, ipvs.Dest{Addr: flows.AP("10.244.1.2:9376")}) },
				"real server 10.244.1.2:9376 of tcp 10.96.0.10:80 was missing"},
			{"weight", func() { send(setDest, ipvs.Dest{Addr: flows.AP("10.244.1.2:9376")}) },
				"the weight of real server 10.244.1.2:9376 of tcp 10.96.0.10:80 was changed"},
			{"foreign real server", func() { send(addDest, ipvs.Dest{Addr: flows.AP("10.244.9.9:80"), Weight: 1}) },
				"a foreign real server 10.244.9.9:80"},
			{"element", func() {
				check(k.sets.Del("fairlead-masq-4", []ipset.Element{{IP: netip.MustParseAddr("203.0.113.1"), Proto: svc.TCP, Port: 80}}))
			}, "203.0.113.1,tcp:80 of fairlead-masq-4 was missing"},
			{"foreign element", func() {
				check(k.sets.Add("fairlead-drop-4", []ipset.Element{{IP: netip.MustParseAddr("10.96.0.10"), Proto: svc.TCP, Port: 80}}))
			}, "10.96.0.10,tcp:80 of fairlead-drop-4 was foreign"},
			{"address", func() { flows.Command(t, "", "ip", "address", "del", "10.96.0.10/32", "dev", deviceName) },
				"10.96.0.10 of device fairlead-ipvs was missing"},
			{"foreign address", func() { flows.Command(t, "", "ip", "address", "add", "10.96.9.9/32", "dev", deviceName) },
				"10.96.9.9 of device fairlead-ipvs was foreign"},
			{"device", func() { flows.Command(t, "", "ip", "link", "del", deviceName) }, "10.96.0.10 of device fairlead-ipvs was missing"},
			{"rules", func() { flows.Command(t, "", "iptables-legacy", "-t", "mangle", "-F", "FAIRLEADVS-MARK") },
				"our IPv4 rules in table mangle were changed"},
			{"jump", func() { flows.Command(t, "", "ip6tables-legacy", "-F", "INPUT") }, "our IPv6 rules in table filter were changed"},
		} {
			c.damage()
			web.Scheduler = DefaultScheduler
			if flows.Dump(t, p) == before {
				t.Fatalf("%s: the damage does not show", c.name)
			}
			flows.Apply(t, p, tab, nil)
			if d := cmp.Diff(before, flows.Dump(t, p)); d != "" {
				t.Fatalf("%s: (-before +repaired):\n%s", c.name, d)
			}
			if r := strings.Join(p.(*Mode).Repaired(), "\n"); !strings.Contains(r, c.say) {
				t.Errorf("%s: Repaired says\n%s\nwant %q", c.name, r, c.say)
			}
			flows.Apply(t, p, tab, nil)
			if r := p.(*Mode).Repaired(); len(r) > 0 {
				t.Errorf("%s: repaired again: %q", c.name, r)
			}
		}
	})
}

// meddling is iptables beside which another program removes rules as soon as they are
// written.
type meddling struct {
	tool
	damage func()
}

func (m *meddling) Restore(ctx context.Context, input []byte) error {
	err := m.tool.Restore(ctx, input)
	if m.damage != nil {
		m.damage()
		m.damage = nil
	}
	return err
}

// Rules that another program removes while they are written are not taken for what was
// written, but put back.
func TestRulesRemovedWhileWritten(t *testing.T) {
	inside(t, func(p dataplane.Applier) {
		tab := flows.EveryField()
		want := flows.Fresh(t, inside, []*table.Table{tab})[0]
		for _, damage := range [][]string{
			{"iptables-legacy", "-t", "nat", "-F", "FAIRLEADVS-POSTROUTING"}, {"iptables-legacy", "-F", "INPUT"},
		} {
			if err := p.(*Mode).open(); err != nil {
				t.Fatal(err)
			}
			f := p.(*Mode).targets[0]
			real := f.rules.tool
			f.rules.tool = &meddling{real, func() { flows.Command(t, "", damage...) }}
			f.rules.printed = nil
			if err := p.Apply(t.Context(), tab, nil); err == nil || !strings.Contains(err.Error(), "changed while they were written") {
				t.Errorf("%q: Apply = %v", damage, err)
			}
			f.rules.tool = real
			flows.Apply(t, p, tab, nil)
			if d := cmp.Diff(want, flows.Dump(t, p)); d != "" {
				t.Errorf("%q: (-fresh +here):\n%s", damage, d)
			}
		}
	})
}

// everything is what the kernel has of all that this mode could write.
func everything(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	k, err := openKernel()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close() }()
	if err := k.servers.Services(func(s ipvs.Service) { out.WriteString(s.Key.String() + " " + s.Scheduler + "\n") }); err != nil {
		t.Fatal(err)
	}
	names, err := k.sets.(*ipset.Conn).Names()
	if err != nil {
		t.Fatal(err)
	}
	out.WriteString(strings.Join(names, "\n"))
	out.WriteString(flows.Command(t, "", "ip", "-brief", "address"))
	for _, program := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		for line := range strings.Lines(flows.Command(t, "", program)) {
			if strings.HasPrefix(line, "-A") {
				out.WriteString(line)
			}
		}
	}
	return out.String()
}

// Other people's virtual servers, sets and rules stay, and Cleanup takes away no
// more than was written.
func TestNeighboursAreLeftAlone(t *testing.T) {
	inside(t, func(p dataplane.Applier) {
		k, err := openKernel()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = k.Close() }()
		theirs := ipvs.Service{Key: ipvs.AddressKey(svc.TCP, flows.AP("192.0.2.7:80")), Scheduler: "lc"}
		marked := ipvs.Service{Key: ipvs.MarkKey(7, svc.IPv4), Scheduler: "wrr"}
		if refused, err := k.servers.Send(
			&changes{[]change{{verb: addServer, service: theirs}, {verb: addServer, service: marked}}}); err != nil || len(refused) > 0 {
			t.Fatal(refused, err)
		}
		if err := k.sets.Create(ipset.Set{Name: "theirs", Type: ipset.HashIP, Family: svc.IPv4}); err != nil {
			t.Fatal(err)
		}
		for _, table := range tables {
			flows.Command(t, "", "iptables-legacy", "-t", table, "-A", "OUTPUT", "-d", "192.0.2.9", "-j", "ACCEPT")
			flows.Command(t, "", "ip6tables-legacy", "-t", table, "-S")
		}
		before := everything(t)
		for range 2 {
			flows.Apply(t, p, flows.EveryField(), nil)
			flows.Apply(t, p, table.New(), nil)
		}
		flows.Apply(t, p, flows.EveryField(), nil)
		for range 2 {
			if err := Cleanup(t.Context()); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(before, everything(t)); d != "" {
				t.Errorf("(-before +after Cleanup):\n%s", d)
			}
		}
	})
}

// An address that an interface has is the node's own: it is not taken over, and
// its other ports go on answering. One in an excluded range is refused.
func TestWhoseAddress(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		p, err := New(Config{Variant: legacy, ExcludeCIDRs: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.Close() }()
		flows.Command(t, "", "ip", "address", "add", "203.0.113.5/32", "dev", "eth0")
		one := func(name, at string) *table.ServicePort {
			return flows.Port(name, "", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ExternalIP, Addr: flows.AP(at),
				Endpoints: flows.Endpoints("10.244.1.2:80"), Masquerade: true})
		}
		own, others := one("own", "203.0.113.5:80"), one("others", "198.51.100.1:80")
		err = p.Apply(t.Context(), table.New(own, others), nil)
		var refused *dataplane.Rejected
		if !errors.As(err, &refused) || len(refused.Ports) != 1 || !strings.Contains(err.Error(), "default/others") ||
			!strings.Contains(err.Error(), "--ipvs-exclude-cidrs") {
			t.Errorf("Apply = %v, want default/others refused", err)
		}
		d := flows.Dump(t, p)
		if !strings.Contains(d, "tcp 203.0.113.5:80 rr") || strings.Contains(d, "outer-4: 203") ||
			strings.Contains(d, "device fairlead-ipvs: 203") {
			t.Errorf("an address of eth0 was taken over:\n%s", d)
		}
	})
}

// Two frontends can be one virtual server: an external IP that is the node's
// address, and a node port. Whichever comes and goes, the one that is there is
// served, and the first of two.
func TestOneServerOfTwoFrontends(t *testing.T) {
	port := func(name, endpoint string, f table.Frontend) *table.ServicePort {
		f.Endpoints = flows.Endpoints(endpoint)
		return flows.Port(name, "", svc.IPv4, svc.TCP, f)
	}
	node := port("node", "10.244.1.2:80", table.Frontend{Kind: table.NodePort, Addr: flows.AP("0.0.0.0:30080")})
	external := port("external", "10.244.1.3:80", table.Frontend{Kind: table.ExternalIP, Addr: flows.AP("192.168.77.11:30080")})
	tab := func(ports ...*table.ServicePort) *table.Table {
		t := table.New(ports...)
		t.NodePortAddrs = []netip.Addr{netip.MustParseAddr("192.168.77.11")}
		return t
	}
	tabs := []*table.Table{tab(), tab(node), tab(external), tab(node, external)}
	want := flows.Fresh(t, inside, tabs)
	if !strings.Contains(want[3], "10.244.1.3:80 weight 1") || strings.Contains(want[3], "10.244.1.2:80 weight") {
		t.Fatalf("the external IP should be first:\n%s", want[3])
	}
	inside(t, func(p dataplane.Applier) {
		flows.Apply(t, p, tabs[0], nil)
		for at, step := 0, 0; step < 8; step++ {
			next := []int{1, 3, 2, 3, 1, 0, 2, 0}[step]
			flows.Apply(t, p, tabs[next], flows.Changes(tabs[at], tabs[next]))
			if d := cmp.Diff(want[next], flows.Dump(t, p)); d != "" {
				t.Errorf("from state %d to %d (-fresh +here):\n%s", at, next, d)
			}
			at = next
		}
	})
}

func TestConfigIsChecked(t *testing.T) {
	cidr := func(s ...string) (out []netip.Prefix) {
		for _, p := range s {
			out = append(out, netip.MustParsePrefix(p))
		}
		return out
	}
	for say, cfg := range map[string]Config{
		`scheduler "nosuch" is not one of rr`:     {Scheduler: "nosuch"},
		"masquerade bit 32":                       {MasqueradeBit: 32},
		"UDP timeout -1s":                         {Timeouts: ipvs.Timeouts{UDP: -time.Second}},
		"10.1.0.0/16 overlaps the range of Clust": {ExcludeCIDRs: cidr("10.1.0.0/16"), ServiceCIDRs: cidr("10.0.0.0/8")},
		"10.0.0.0/8 and 10.1.0.0/16 overlap":      {ExcludeCIDRs: cidr("10.0.0.0/8", "10.1.0.0/16")},
	} {
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%+v: %v, want %q", cfg, err, say)
		}
	}
}

func TestApplyStopsWithItsContext(t *testing.T) {
	inside(t, func(p dataplane.Applier) { flows.StopsWithItsContext(t, p, "tcp 10.96.0.10:80") })
}

// The mode works on this kernel, has all schedulers, and the probe leaves
// nothing behind.
func TestProbe(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		before := everything(t)
		if err := Probe(t.Context(), Config{Variant: legacy}); err != nil {
			t.Error(err)
		}
		has, err := Available(append([]string{"nosuch"}, Schedulers...)...)
		if d := cmp.Diff(Schedulers, has); d != "" || err != nil {
			t.Errorf("Available: %v (-want +got):\n%s", err, d)
		}
		if d := cmp.Diff(before, everything(t)); d != "" {
			t.Errorf("the probe left something:\n%s", d)
		}
	})
}

// The virtual IPs are addresses of this machine, but not of the node: node ports
// that answered on each of them would be as many again as there are Services.
func TestNodeAddresses(t *testing.T) {
	inside(t, func(p dataplane.Applier) {
		addresses := func() []netip.Addr {
			t.Helper()
			list, err := p.(*Mode).NodeAddresses()
			if err != nil {
				t.Fatal(err)
			}
			return slices.DeleteFunc(list, netip.Addr.IsLinkLocalUnicast)
		}
		before := addresses()
		want := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.77.11"), netip.MustParseAddr("::1"),
			netip.MustParseAddr("fd00:77::b")}
		if !slices.Equal(before, want) {
			t.Errorf("before: %v, want %v", before, want)
		}
		flows.Apply(t, p, flows.EveryField(), nil)
		if d := flows.Dump(t, p); !strings.Contains(d, "device fairlead-ipvs: 10.96.0.10") {
			t.Fatalf("there are no virtual IPs:\n%s", d)
		}
		if got := addresses(); !slices.Equal(got, want) {
			t.Errorf("with virtual IPs: %v, want %v", got, want)
		}
		flows.Command(t, "", "ip", "address", "add", "203.0.113.5/32", "dev", "eth0")
		if got := addresses(); !slices.Contains(got, netip.MustParseAddr("203.0.113.5")) {
			t.Errorf("%v lacks the address that eth0 got", got)
		}
	})
}
