package nft

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) { testbed.Main(m) }

// inside makes an empty network namespace and runs f there, with an Applier.
func inside(t testing.TB, cfg Config, f func(p *Mode)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		p, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.Close() }()
		f(p)
	})
}

// The mode works on this kernel, says so by itself, and leaves nothing.
func TestProbe(t *testing.T) {
	inside(t, Config{}, func(*Mode) {
		if err := Probe(); err != nil {
			t.Fatal(err)
		}
		if out := flows.Command(t, "", "nft", "list", "ruleset"); out != "" {
			t.Errorf("the probe left something:\n%s", out)
		}
	})
}

// An administrator reads names, addresses and ports, and our own dump says the
// same in the project's words.
func TestReadable(t *testing.T) {
	inside(t, Config{DropInvalid: true}, func(p *Mode) {
		flows.Apply(t, p, flows.EveryField(), nil)
		flows.Golden(t, *update, "dump.txt", flows.Dump(t, p))
		flows.Golden(t, *update, "ruleset.txt", sortElements(flows.Command(t, "", "nft", "list", "ruleset")))
	})
}

var manyElements = regexp.MustCompile(`elements = \{([^}]*)\}`)

// sortElements puts the elements of each set into an order: the kernel gives
// them by their hashes.
func sortElements(s string) string {
	return manyElements.ReplaceAllStringFunc(s, func(m string) string {
		list := strings.Split(manyElements.FindStringSubmatch(m)[1], ",")
		for i := range list {
			list[i] = "\t\t\t" + strings.TrimSpace(list[i])
		}
		slices.Sort(list)
		return "elements = {\n" + strings.Join(list, ",\n") + " }"
	})
}

// counting counts requests to the kernel, and fails some of them.
type counting struct {
	kernel
	commits, dumps, bytes int
	fail                  func() error
}

func (c *counting) Commit(b *nftables.Batch) error {
	c.commits++
	c.bytes += b.Size()
	if c.fail != nil {
		if err := c.fail(); err != nil {
			return err
		}
	}
	return c.kernel.Commit(b)
}

func (c *counting) Elems(t nftables.Table, set string, begin func(), f func(nftables.Elem)) error {
	c.dumps++
	return c.kernel.Elems(t, set, begin, f)
}

func (c *counting) Get(t nftables.Table, set string, keys [][]byte, f func(nftables.Elem)) error {
	c.dumps += min(len(keys), 1)
	return c.kernel.Get(t, set, keys, f)
}

func withKernel(t *testing.T, cfg Config, f func(*Mode, *counting)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		k, err := nftables.Dial()
		if err != nil {
			t.Fatal(err)
		}
		c := &counting{kernel: k}
		p, err := newMode(cfg, c)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.Close() }()
		f(p, c)
	})
}

// What the kernel refuses of one frontend is found among many and left out.
func TestRefusedFrontendIsIsolated(t *testing.T) {
	var ports []*table.ServicePort
	for i := range 100 {
		ports = append(ports, flows.Port(fmt.Sprintf("s%02d", i), "", svc.IPv4, svc.TCP,
			table.Frontend{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", i+1)), Endpoints: flows.Endpoints("10.0.0.1:80")}))
	}
	withKernel(t, Config{}, func(p *Mode, k *counting) {
		flows.Apply(t, p, table.New(), nil)
		k.kernel = refusing{k.kernel}
		err := p.Apply(t.Context(), table.New(ports...), nil)
		if err == nil || !strings.Contains(err.Error(), "10.96.0.43:80") {
			t.Errorf("%v, want an error that names 10.96.0.43:80", err)
		}
		d := flows.Dump(t, p)
		if n := strings.Count(d, "-> pick-1"); n != 99 || strings.Contains(d, "10.96.0.43:80") {
			t.Errorf("%d frontends are there, want the other 99", n)
		}
		k.kernel = k.kernel.(refusing).kernel
		flows.Apply(t, p, table.New(ports...), nil)
		if n := strings.Count(flows.Dump(t, p), "-> pick-1"); n != 100 {
			t.Errorf("%d frontends are there, want all", n)
		}
	})
}

// A refused port is named, the others change beside it by changes alone, and
// what was prepared for it does not stay.
func TestRefusedPortsAreNamed(t *testing.T) {
	port := func(n, endpoints int) *table.ServicePort {
		f := table.Frontend{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", n+1))}
		for i := range endpoints {
			f.Endpoints = append(f.Endpoints, flows.Endpoints(fmt.Sprintf("10.0.0.%d:80", i+1))...)
		}
		return flows.Port(fmt.Sprintf("s%02d", n), "", svc.IPv4, svc.TCP, f)
	}
	var ports []*table.ServicePort
	for i := range 60 {
		ports = append(ports, port(i, 1))
	}
	withKernel(t, Config{}, func(p *Mode, k *counting) {
		flows.Apply(t, p, table.New(ports...), nil)
		before := flows.Dump(t, p)
		k.kernel = refusing{k.kernel}
		ports[42], ports[43] = port(42, 7), port(43, 2)
		err := p.Apply(t.Context(), table.New(ports...), []table.Key{ports[42].Key(), ports[43].Key()})
		var refused *dataplane.Rejected
		if !errors.As(err, &refused) || len(refused.Ports) != 1 || refused.Ports[ports[42].Key()] == nil {
			t.Fatalf("%v, want that port s42 alone was refused", err)
		}
		k.dumps = 0
		ports[44] = port(44, 3)
		flows.Apply(t, p, table.New(ports...), []table.Key{ports[44].Key()})
		if k.dumps != 0 {
			t.Errorf("%d sets were read for a change beside a refused port", k.dumps)
		}
		d := flows.Dump(t, p)
		if strings.Contains(d, "pick-7") || !strings.Contains(d, "default/s43 -> pick-2") || !strings.Contains(d, "default/s44 -> pick-3") {
			t.Errorf("the kernel has\n%s", d)
		}
		k.kernel = k.kernel.(refusing).kernel
		ports[42], ports[43], ports[44] = port(42, 1), port(43, 1), port(44, 1)
		flows.Apply(t, p, table.New(ports...), []table.Key{ports[42].Key(), ports[43].Key(), ports[44].Key()})
		if d := cmp.Diff(before, flows.Dump(t, p)); d != "" {
			t.Errorf("(-before +after):\n%s", d)
		}
	})
}

// refusing adds to each transaction about s42 what the kernel refuses.
type refusing struct{ kernel }

func (r refusing) Commit(b *nftables.Batch) error {
	if b.Mentions("default/s42") {
		b.DelChain(nftables.Table{Family: nftables.IPv4, Name: tableName}, "there-is-none")
	}
	return r.kernel.Commit(b)
}

// The same Table twice is a no-op, and a change asks for nothing but itself.
func TestWorkFollowsChange(t *testing.T) {
	withKernel(t, Config{}, func(p *Mode, k *counting) {
		tab := flows.EveryField()
		flows.Apply(t, p, tab, nil)
		k.commits, k.dumps = 0, 0
		flows.Apply(t, p, tab, nil)
		if k.dumps != 0 {
			t.Errorf("%d sets read without a change", k.dumps)
		}
		flows.Apply(t, p, tab, []table.Key{})
		for q := range tab.All() {
			flows.Apply(t, p, tab, []table.Key{q.Key()})
		}
		if k.commits != 0 {
			t.Errorf("%d transactions for a Table that was there, want none", k.commits)
		}
		k.dumps = 0
		grown := flows.Endpoints("*10.244.1.2:9376", "10.244.2.2:9376", "10.244.2.3:9376")
		var ports []*table.ServicePort
		var key table.Key
		for q := range tab.All() {
			if q.ID.Name.Name == "signal" {
				c := *q
				c.Frontends = slices.Clone(q.Frontends)
				c.Frontends[0].Endpoints = grown
				q, key = &c, c.Key()
			}
			ports = append(ports, q)
		}
		next := table.New(ports...)
		next.NodePortAddrs, next.ServiceCIDRs = tab.NodePortAddrs, tab.ServiceCIDRs
		next.ClusterCIDRs, next.LocalCIDRs = tab.ClusterCIDRs, tab.LocalCIDRs
		k.bytes = 0
		flows.Apply(t, p, next, []table.Key{key})
		// One for the chain for three endpoints, which no Service had, one for the
		// elements.
		if k.commits != 2 || k.dumps != 0 || k.bytes > 2000 {
			t.Errorf("%d transactions, %d sets read, %d bytes for one more endpoint, want 2, 0 and few", k.commits, k.dumps, k.bytes)
		}
	})
}

// What a chain is called in map targets follows from its name, whatever was there
// before: processes with other pasts write the same.
func TestKeysOfTargets(t *testing.T) {
	var maps []string
	list := func() {
		for _, family := range []string{"ip", "ip6"} {
			for _, set := range []string{"targets", "vips", "node-ports"} {
				maps = append(maps, sortElements(flows.Command(t, "", "nft", "list", "map", family, "fairlead", set)))
			}
		}
	}
	all := flows.EveryField()
	inside(t, Config{}, func(p *Mode) {
		flows.Apply(t, p, all, nil)
		list()
	})
	inside(t, Config{}, func(p *Mode) {
		ports := slices.SortedFunc(all.All(), func(a, b *table.ServicePort) int { return b.ID.Compare(a.ID) })
		now := table.New()
		for i := range ports {
			next := table.New(ports[:i+1]...)
			flows.Apply(t, p, next, flows.Changes(now, next))
			now = next
		}
		flows.Apply(t, p, all, nil) // its other fields
		list()
	})
	if n := len(maps) / 2; !slices.Equal(maps[:n], maps[n:]) {
		t.Errorf("in one step\n%s\nin many steps\n%s", maps[:n], maps[n:])
	}
}

// Names that collide get their own keys.
func TestKeysOfTargetsCollide(t *testing.T) {
	s := newState()
	c := newChange(newLayout(svc.IPv4, &Config{}), s)
	a, b := c.newID("masq-pick-3"), c.newID("masq-pick-3")
	if a != hashID("masq-pick-3") || b != a+1 || c.newID("pick-7") != 7 {
		t.Errorf("keys %d and %d", a, b)
	}
	s.ids[idLast] = true
	if got := s.unusedID(idLast); got != idFirstFree {
		t.Errorf("the key after the last is %#x", got)
	}
	delete(s.ids, idLast)
	if c.revert(); len(s.ids) != 0 {
		t.Errorf("left after the revert: %v", s.ids)
	}
}

// A proxy that starts where nothing has changed since the last one ended writes
// nothing.
func TestRestartWritesNothing(t *testing.T) {
	inside(t, Config{}, func(p *Mode) {
		for i, tab := range flows.States(3)[8:] { // big ones, none, every field
			flows.Apply(t, p, tab, nil)
			before, err := p.kernel.Generation()
			if err != nil {
				t.Fatal(err)
			}
			next, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = next.Close() }()
			flows.Apply(t, next, tab, nil)
			if after, err := p.kernel.Generation(); err != nil || after != before {
				t.Errorf("table %d: the start has written %d transactions (%v)", i, after-before, err)
			}
		}
	})
}

// What another program removes or adds is repaired by the next full Apply,
// which names it.
func TestRepair(t *testing.T) {
	for _, c := range []struct{ name, nft, say string }{
		{"table", "delete table ip fairlead", "ip fairlead: the table was missing"},
		{"everything", "flush ruleset", "the table was missing"},
		{"frontend", "delete element ip fairlead vips { 10.96.0.10 . tcp . 80 }", "TCP 10.96.0.10:80 of default/web:http was missing"},
		{"endpoint", "delete element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 0 }", "TCP 10.96.0.10:80 of default/web:http was changed"},
		{"endpoint elsewhere", "delete element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 1 }\nadd element ip fairlead endpoints { " +
			"10.96.0.10 . tcp . 80 . 1 : 10.0.0.9 . 80 }", "TCP 10.96.0.10:80 of default/web:http was changed"},
		{"sticky endpoint", "flush set ip fairlead serving", "default/cart:http was changed"},
		{"rule", "flush chain ip fairlead pick-2", "the rules of chain pick-2 were changed"},
		{"rule of a base chain", "insert rule ip fairlead services counter", "the rules of chain services were changed"},
		{"base chain", "delete chain ip fairlead postrouting", "chain postrouting was missing"},
		{"target", "delete element ip fairlead targets { 2 }", "chain pick-2 was missing in map targets"},
		{"target of a frontend", fmt.Sprintf("delete element ip fairlead targets { %#x }", hashID("cluster-pick-2")),
			"chain cluster-pick-2 was missing in map targets"},
		{"node address", "flush set ip fairlead node-addresses", "was missing in set node-addresses"},
		{"hairpin", "flush set ip fairlead local-endpoints", "was missing in set local-endpoints"},
		{"service addresses", "flush set ip fairlead cluster-ips", "was missing in set cluster-ips"},
		{"foreign frontend", "add element ip fairlead vips { 10.96.0.99 . tcp . 80 : 1 . 2 }", "a foreign TCP 10.96.0.99:80 was there"},
		{"foreign slot", "add element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 7 : 10.0.0.9 . 80 }",
			"TCP 10.96.0.10:80 of default/web:http was changed"},
		{"foreign chain", "add chain ip fairlead spy\nadd rule ip fairlead services jump spy", "a foreign chain spy was there"},
		{"foreign set", "add set ip fairlead spies { type ipv4_addr; }", "foreign elements and sets"},
		{"refusal", "delete element ip fairlead targets { 0 }", "an element of map targets was missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inside(t, Config{}, func(p *Mode) {
				flows.Repair(t, p, flows.EveryField(), func() { flows.Command(t, c.nft, "nft", "-f", "-") }, c.say)
			})
		})
	}
}

// A change that meets foreign hands on its way does not fail: it looks at
// everything again.
func TestChangeMeetsDamage(t *testing.T) {
	inside(t, Config{}, func(p *Mode) {
		tab := flows.EveryField()
		flows.Apply(t, p, tab, nil)
		flows.Command(t, "delete element ip fairlead vips { 10.96.0.10 . tcp . 80 }", "nft", "-f", "-")
		flows.Apply(t, p, table.New(), flows.Changes(tab, table.New()))
		if d := flows.Dump(t, p); strings.Contains(d, "default/") {
			t.Errorf("left after everything is gone:\n%s", d)
		}
	})
}

const neighbour = `table ip fairlead-not {
	set s {
		type ipv4_addr
		elements = { 10.0.0.1 }
	}

	chain c {
		type nat hook prerouting priority dstnat; policy accept;
		ip daddr @s dnat to 10.0.0.2
	}
}
`

// Other programs' tables, and what is written by iptables, stay as they are.
func TestNeighboursAreLeftAlone(t *testing.T) {
	inside(t, Config{}, func(p *Mode) {
		flows.Command(t, neighbour, "nft", "-f", "-")
		flows.Apply(t, p, flows.EveryField(), nil)
		flows.Apply(t, p, table.New(), nil)
		flows.Command(t, "add element ip fairlead-not s { 10.0.0.3 }", "nft", "-f", "-")
		flows.Apply(t, p, flows.EveryField(), nil)
		if err := Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got, want := flows.Command(t, "", "nft", "list", "ruleset"), strings.Replace(neighbour, "10.0.0.1 }", "10.0.0.1, 10.0.0.3 }",
			1); got != want {
			t.Errorf("left:\n%s\nwant:\n%s", got, want)
		}
		if err := Cleanup(t.Context()); err != nil {
			t.Errorf("a second time: %v", err)
		}
	})
}

// A table of another layout is replaced in one step.
func TestOtherLayoutIsReplaced(t *testing.T) {
	for _, old := range []string{
		"table ip fairlead { comment \"fairlead, layout 0\"; map vips { type ipv4_addr : ipv4_addr; }; chain prerouting { type filter hook " +
			"input priority 5; }; }",
		"table ip fairlead { }",
		"table ip fairlead { set cluster-ips { type ipv4_addr; elements = { 10.96.0.1 }; }; }",
	} {
		withKernel(t, Config{}, func(p *Mode, k *counting) {
			flows.Command(t, old, "nft", "-f", "-")
			flows.Apply(t, p, flows.EveryField(), nil)
			// IPv6, where there was no table, takes four: what is always
			// there, chains, frontends, what is unserved.
			if k.commits != 1+4 {
				t.Errorf("%d transactions, want 1 for IPv4 and 4 for IPv6", k.commits)
			}
			after := flows.Dump(t, p)
			if want := flows.Fresh(t, empty(Config{}), []*table.Table{flows.EveryField()})[0]; after != want {
				t.Errorf("(-fresh +replaced):\n%s", cmp.Diff(want, after))
			}
		})
	}
}

func TestApplyStopsWithItsContext(t *testing.T) {
	inside(t, Config{}, func(p *Mode) { flows.StopsWithItsContext(t, p, "default/web:http") })
}

func empty(cfg Config) flows.Inside {
	return func(t testing.TB, f func(dataplane.Applier)) { inside(t, cfg, func(p *Mode) { f(p) }) }
}

// From any state to any other the kernel has what a fresh start would give.
func TestRandomWalk(t *testing.T) {
	for _, balance := range []dataplane.Balance{dataplane.Random, dataplane.RoundRobin} {
		cfg := Config{Balance: balance}
		flows.RandomWalk(t, 150, flows.States(0), empty(cfg), func() dataplane.Applier {
			next, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			return next
		})
	}
}

// One transaction in ten fails, by itself or because the kernel does not like
// something in it; a caller that keeps to the contract gets to the same end.
func TestFaultsConverge(t *testing.T) {
	tabs := flows.States(0)
	want := flows.Fresh(t, empty(Config{}), tabs)
	withKernel(t, Config{}, func(p *Mode, k *counting) {
		r := rand.New(rand.NewPCG(3, 4))
		injected := 0
		k.fail = func() error {
			if r.IntN(10) == 0 {
				injected++
				return []error{syscall.ENOBUFS, syscall.EBUSY, syscall.ENOENT, syscall.EPERM, &nftables.Refusal{}}[r.IntN(5)]
			}
			return nil
		}
		flows.Converge(t, 150, tabs, want, p)
		if injected < 5 {
			t.Errorf("only %d faults were injected", injected)
		}
	})
}

// A port that cannot be written costs none of the others.
func TestOneBadPort(t *testing.T) {
	flows.OneBadPort(t, empty(Config{}), "default/good -> pick-1", "default/bad")
}

func TestAdoptionUnderLoad(t *testing.T) { flows.AdoptionUnderLoad(t, create) }

func TestChurnUnderLoad(t *testing.T) { flows.ChurnUnderLoad(t, create) }
