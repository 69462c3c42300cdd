package nft

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) { testbed.Main(m) }

// inside makes an empty network namespace and runs f there, with a Plane.
func inside(t *testing.T, cfg Config, f func(p *Plane)) {
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

// run runs a command in the namespace of the calling thread.
func run(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

func dump(t *testing.T, p *Plane) string {
	t.Helper()
	d, err := p.Dump(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func apply(t *testing.T, p *Plane, tab *table.Table, changed []table.Key) {
	t.Helper()
	if err := p.Apply(t.Context(), tab, changed); err != nil {
		t.Fatal(err)
	}
}

// The mode works on this kernel, says so by itself, and leaves nothing.
func TestProbe(t *testing.T) {
	inside(t, Config{}, func(*Plane) {
		if err := Probe(); err != nil {
			t.Fatal(err)
		}
		if out := run(t, "", "nft", "list", "ruleset"); out != "" {
			t.Errorf("the probe left something:\n%s", out)
		}
	})
}

// everyField is a Table that uses every field of a Frontend.
func everyField() *table.Table {
	web := eps("*10.244.1.2:9376", "10.244.2.2:9376")
	six := eps("*[fd00:10:244:1::2]:53", "[fd00:10:244:2::2]:53")
	sticky := servicePort("cart", "http", svc.IPv4, svc.TCP,
		table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.11:80"), Endpoints: web},
		table.Frontend{Kind: table.NodePort, Addr: ap("0.0.0.0:30081"), Endpoints: web[:1], LocalClients: web})
	sticky.Affinity = 3 * time.Hour
	t := table.New(
		servicePort("web", "http", svc.IPv4, svc.TCP,
			table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.10:80"), Endpoints: web},
			table.Frontend{Kind: table.ExternalIP, Addr: ap("203.0.113.1:80"), Endpoints: web, Masquerade: true},
			table.Frontend{Kind: table.LoadBalancerIP, Addr: ap("203.0.113.2:80"), Endpoints: web, Masquerade: true,
				SourceRanges: []netip.Prefix{netip.MustParsePrefix("143.231.0.0/16")}},
			table.Frontend{Kind: table.NodePort, Addr: ap("0.0.0.0:30080"), Endpoints: web, Masquerade: true}),
		servicePort("local", "", svc.IPv4, svc.TCP,
			table.Frontend{Kind: table.LoadBalancerIP, Addr: ap("203.0.113.3:443"), Drop: true, LocalClients: web}),
		servicePort("db", "", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.12:5432")}),
		servicePort("signal", "", svc.IPv4, svc.SCTP, table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.13:7777"), Endpoints: web}),
		servicePort("kube-dns", "dns", svc.IPv6, svc.UDP,
			table.Frontend{Kind: table.ClusterIP, Addr: ap("[fd00:10:96::a]:53"), Endpoints: six}),
		sticky)
	t.NodePortAddrs = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.77.11"), netip.MustParseAddr("fd00:77::b")}
	t.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	return t
}

// golden compares text with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := "testdata/" + name
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got), rewrite with -update:\n%s", file, d)
	}
}

// An administrator reads names, addresses and ports, and our own dump says the
// same in the project's words.
func TestReadable(t *testing.T) {
	inside(t, Config{ServiceCIDRs: serviceCIDRs, DropInvalid: true}, func(p *Plane) {
		apply(t, p, everyField(), nil)
		golden(t, "dump.txt", dump(t, p))
		golden(t, "ruleset.txt", sortElements(run(t, "", "nft", "list", "ruleset")))
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

// states are Tables to walk between.
func states() []*table.Table {
	all := eps("*10.244.1.2:80", "*10.244.1.3:80", "10.244.2.2:80", "10.244.2.3:80", "10.244.2.4:80")
	var out []*table.Table
	for i := range 12 {
		r := rand.New(rand.NewPCG(uint64(i), 7))
		some := func() []table.Endpoint {
			var l []table.Endpoint
			for _, e := range all {
				if r.IntN(2) == 0 {
					l = append(l, e)
				}
			}
			return l
		}
		var ports []*table.ServicePort
		for s := range 6 {
			if r.IntN(4) == 0 {
				continue
			}
			proto := []svc.Protocol{svc.TCP, svc.UDP}[r.IntN(2)]
			p := servicePort(fmt.Sprintf("s%d", s), "p", svc.IPv4, proto,
				table.Frontend{Kind: table.ClusterIP, Addr: ap(fmt.Sprintf("10.96.0.%d:80", s+1)), Endpoints: some(), Drop: r.IntN(3) == 0})
			if r.IntN(2) == 0 {
				p.Frontends = append(p.Frontends, table.Frontend{
					// Services 0 and 1 want the same one.
					Kind: table.ExternalIP, Addr: ap(fmt.Sprintf("203.0.113.%d:80", max(s, 1))), Endpoints: some(), Masquerade: r.IntN(2) == 0,
				})
			}
			if r.IntN(2) == 0 {
				f := table.Frontend{Kind: table.NodePort, Addr: ap(fmt.Sprintf("0.0.0.0:%d", 30000+s)), Endpoints: some(), Masquerade: true}
				if r.IntN(2) == 0 {
					f.LocalClients, f.Masquerade = some(), false
				}
				if r.IntN(3) == 0 {
					f.SourceRanges = []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", r.IntN(3)))}
				}
				p.Frontends = append(p.Frontends, f)
			}
			if r.IntN(3) == 0 {
				p.Affinity = time.Duration(1+r.IntN(2)) * time.Hour
			}
			ports = append(ports, p)
		}
		t := table.New(ports...)
		if i%4 == 1 {
			t.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
		}
		if i%4 == 2 {
			t.MasqueradeAll = true
		}
		for n := range r.IntN(3) {
			t.NodePortAddrs = append(t.NodePortAddrs, netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}))
		}
		out = append(out, t)
	}
	return append(out, table.New(), everyField())
}

// changes are the keys that differ between two Tables.
func changes(a, b *table.Table) []table.Key {
	keys := []table.Key{}
	for p := range a.All() {
		if b.Get(p.Key()) != p {
			keys = append(keys, p.Key())
		}
	}
	for p := range b.All() {
		if a.Get(p.Key()) == nil {
			keys = append(keys, p.Key())
		}
	}
	return keys
}

// fresh is the dump of each Table written into an empty kernel.
func fresh(t *testing.T, cfg Config, tabs []*table.Table) []string {
	var out []string
	for _, tab := range tabs {
		inside(t, cfg, func(p *Plane) {
			apply(t, p, tab, nil)
			out = append(out, dump(t, p))
		})
	}
	return out
}

// From any state to any other, by changes or by a full comparison, by this
// process or its successor: the kernel has what a fresh start would give.
func TestRandomWalk(t *testing.T) {
	for _, balance := range []Balance{Random, RoundRobin} {
		cfg := Config{Balance: balance}
		tabs := states()
		want := fresh(t, cfg, tabs)
		inside(t, cfg, func(p *Plane) {
			r := rand.New(rand.NewPCG(1, 2))
			at := table.New()
			apply(t, p, at, nil)
			for step := range 150 {
				i := r.IntN(len(tabs))
				how := changes(at, tabs[i])
				switch r.IntN(6) {
				case 0:
					how = nil
				case 1:
					next, err := New(cfg)
					if err != nil {
						t.Fatal(err)
					}
					defer func() { _ = next.Close() }()
					p = next
				}
				apply(t, p, tabs[i], how)
				at = tabs[i]
				if d := cmp.Diff(want[i], dump(t, p)); d != "" {
					t.Fatalf("step %d, to state %d with %d changes (-fresh +here):\n%s", step, i, len(how), d)
				}
			}
		})
	}
}

// counting counts what is asked of the kernel, and fails some of it.
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

func withKernel(t *testing.T, cfg Config, f func(*Plane, *counting)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		k, err := nftables.Dial()
		if err != nil {
			t.Fatal(err)
		}
		c := &counting{kernel: k}
		p, err := newPlane(cfg, c)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.Close() }()
		f(p, c)
	})
}

// One transaction in ten fails; a caller that keeps to the contract gets to
// the same end.
func TestFaultsConverge(t *testing.T) {
	tabs := states()
	want := fresh(t, Config{}, tabs)
	withKernel(t, Config{}, func(p *Plane, k *counting) {
		r := rand.New(rand.NewPCG(3, 4))
		injected := 0
		k.fail = func() error {
			if r.IntN(10) == 0 {
				injected++
				return []error{syscall.ENOBUFS, syscall.EBUSY, syscall.ENOENT, syscall.EPERM}[r.IntN(4)]
			}
			return nil
		}
		at, known := table.New(), false
		for step := range 150 {
			i := r.IntN(len(tabs))
			for try := 0; ; try++ {
				var how []table.Key
				if known {
					how = changes(at, tabs[i])
				}
				err := p.Apply(t.Context(), tabs[i], how)
				known = err == nil
				if known {
					break
				}
				if try == 20 {
					t.Fatalf("step %d: still %v", step, err)
				}
			}
			at = tabs[i]
			if d := cmp.Diff(want[i], dump(t, p)); d != "" {
				t.Fatalf("step %d, to state %d (-fresh +here):\n%s", step, i, d)
			}
		}
		if injected < 5 {
			t.Errorf("only %d faults were injected", injected)
		}
	})
}

// A port that cannot be written costs none of the others.
func TestOneBadPort(t *testing.T) {
	good := servicePort("good", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.1:80"), Endpoints: eps("10.0.0.1:80")})
	bad := servicePort("bad", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.2:80"), Endpoints: eps("[fd00::1]:80")})
	inside(t, Config{}, func(p *Plane) {
		for _, how := range [][]table.Key{nil, {good.Key(), bad.Key()}, nil} {
			err := p.Apply(t.Context(), table.New(good, bad), how)
			if err == nil || !strings.Contains(err.Error(), "default/bad") || strings.Contains(err.Error(), "default/good") {
				t.Errorf("changed %v: %v, want an error that names default/bad alone", how, err)
			}
			if d := dump(t, p); !strings.Contains(d, "default/good -> pick-1") || strings.Contains(d, "default/bad") {
				t.Errorf("the kernel has\n%s", d)
			}
		}
		apply(t, p, table.New(good), nil)
	})
}

// What the kernel refuses of one frontend is found among many and left out.
func TestRefusedFrontendIsIsolated(t *testing.T) {
	var ports []*table.ServicePort
	for i := range 100 {
		ports = append(ports, servicePort(fmt.Sprintf("s%02d", i), "", svc.IPv4, svc.TCP,
			table.Frontend{Addr: ap(fmt.Sprintf("10.96.0.%d:80", i+1)), Endpoints: eps("10.0.0.1:80")}))
	}
	withKernel(t, Config{}, func(p *Plane, k *counting) {
		apply(t, p, table.New(), nil)
		k.kernel = refusing{k.kernel}
		err := p.Apply(t.Context(), table.New(ports...), nil)
		if err == nil || !strings.Contains(err.Error(), "10.96.0.43:80") {
			t.Errorf("%v, want an error that names 10.96.0.43:80", err)
		}
		d := dump(t, p)
		if n := strings.Count(d, "-> pick-1"); n != 99 || strings.Contains(d, "10.96.0.43:80") {
			t.Errorf("%d frontends are there, want the other 99", n)
		}
		k.kernel = k.kernel.(refusing).kernel
		apply(t, p, table.New(ports...), nil)
		if n := strings.Count(dump(t, p), "-> pick-1"); n != 100 {
			t.Errorf("%d frontends are there, want all", n)
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
	withKernel(t, Config{}, func(p *Plane, k *counting) {
		tab := everyField()
		apply(t, p, tab, nil)
		k.commits, k.dumps = 0, 0
		apply(t, p, tab, nil)
		if k.dumps != 0 {
			t.Errorf("%d sets read though nobody changed anything", k.dumps)
		}
		apply(t, p, tab, []table.Key{})
		for q := range tab.All() {
			apply(t, p, tab, []table.Key{q.Key()})
		}
		if k.commits != 0 {
			t.Errorf("%d transactions for a Table that was there, want none", k.commits)
		}
		k.dumps = 0
		grown := eps("*10.244.1.2:9376", "10.244.2.2:9376", "10.244.2.3:9376")
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
		next.NodePortAddrs, next.ClusterCIDRs = tab.NodePortAddrs, tab.ClusterCIDRs
		k.bytes = 0
		apply(t, p, next, []table.Key{key})
		// One for the chain for three endpoints, which nobody had, one for the
		// elements.
		if k.commits != 2 || k.dumps != 0 || k.bytes > 2000 {
			t.Errorf("%d transactions, %d sets read, %d bytes for one more endpoint, want 2, 0 and few", k.commits, k.dumps, k.bytes)
		}
	})
}

// SEEDS 50: what was written goes on working without a process, and its
// successor takes it over without a packet lost.
func TestAdoptionUnderLoad(t *testing.T) {
	e := flows.NewEnv(t, create)
	other := servicePort("other", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.1.1:80"), Endpoints: eps("10.244.9.9:80")})
	e.Apply(t, e.Stable(other), nil)
	e.UnderLoad(t, func() {
		for i := range 15 {
			if err := e.Plane.Close(); err != nil {
				t.Error(err)
			}
			e.Node.Do(func() { e.Plane = create(t, e.Node) })
			if i%2 == 0 {
				e.Apply(t, e.Stable(), nil)
			} else {
				e.Apply(t, e.Stable(other), nil)
			}
		}
	})
}

// Endpoints of the Service under load come and go: nobody but their own
// connections notices, and no frontend leads to a missing element.
func TestChurnUnderLoad(t *testing.T) {
	e := flows.NewEnv(t, create)
	stable := e.Stable()
	e.Apply(t, stable, nil)
	e.UnderLoad(t, func() {
		start := time.Now()
		for i := 0; time.Since(start) < 1500*time.Millisecond; i++ {
			p := *e.Stable().Get(firstKey(stable))
			p.Frontends = slices.Clone(p.Frontends)
			all := p.Frontends[0].Endpoints
			n := i % len(all)
			p.Frontends[0].Endpoints = slices.Delete(slices.Clone(all), n, n+i%2)
			e.Apply(t, table.New(&p), []table.Key{p.Key()})
		}
	})
}

func firstKey(t *table.Table) table.Key {
	for p := range t.All() {
		return p.Key()
	}
	return table.Key{}
}

// What somebody else removes or adds is put right by the next full Apply,
// which names it.
func TestRepair(t *testing.T) {
	for _, c := range []struct{ name, nft, say string }{
		{"table", "delete table ip fairlead", "ip fairlead: the table was missing"},
		{"everything", "flush ruleset", "the table was missing"},
		{"frontend", "delete element ip fairlead vips { 10.96.0.10 . tcp . 80 }", "TCP 10.96.0.10:80 of default/web:http was missing"},
		{"endpoint", "delete element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 0 }", "TCP 10.96.0.10:80 of default/web:http was changed"},
		{"endpoint elsewhere", "delete element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 1 }\nadd element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 1 : 10.0.0.9 . 80 }", "TCP 10.96.0.10:80 of default/web:http was changed"},
		{"sticky endpoint", "flush set ip fairlead serving", "default/cart:http was changed"},
		{"rule", "flush chain ip fairlead pick-2", "the rules of chain pick-2 were changed"},
		{"rule of a base chain", "insert rule ip fairlead services counter", "the rules of chain services were changed"},
		{"base chain", "delete chain ip fairlead postrouting", "chain postrouting was missing"},
		{"target", "delete element ip fairlead targets { 2 }", "chain pick-2 was missing in map targets"},
		{"target of a frontend", "delete element ip fairlead targets { 0x10000 }", "chain cluster-pick-2 was missing in map targets"},
		{"node address", "flush set ip fairlead node-addresses", "was missing in set node-addresses"},
		{"hairpin", "flush set ip fairlead local-endpoints", "was missing in set local-endpoints"},
		{"service addresses", "flush set ip fairlead cluster-ips", "was missing in set cluster-ips"},
		{"foreign frontend", "add element ip fairlead vips { 10.96.0.99 . tcp . 80 : 1 . 2 }", "a foreign TCP 10.96.0.99:80 was there"},
		{"foreign slot", "add element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 7 : 10.0.0.9 . 80 }", "TCP 10.96.0.10:80 of default/web:http was changed"},
		{"foreign chain", "add chain ip fairlead spy\nadd rule ip fairlead services jump spy", "a foreign chain spy was there"},
		{"foreign set", "add set ip fairlead spies { type ipv4_addr; }", "foreign elements and sets"},
		{"refusal", "delete element ip fairlead targets { 0 }", "an element of map targets was missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inside(t, Config{}, func(p *Plane) {
				tab := everyField()
				apply(t, p, tab, nil)
				if r := p.Repaired(); len(r) != 0 {
					t.Errorf("the first Apply repaired %q", r)
				}
				before := dump(t, p)
				run(t, c.nft, "nft", "-f", "-")
				if before == dump(t, p) {
					t.Fatal("the damage does not show")
				}
				apply(t, p, tab, nil)
				if d := cmp.Diff(before, dump(t, p)); d != "" {
					t.Errorf("(-before +repaired):\n%s", d)
				}
				if r := strings.Join(p.Repaired(), "\n"); !strings.Contains(r, c.say) {
					t.Errorf("Repaired says\n%s\nwant something about %q", r, c.say)
				}
				apply(t, p, tab, nil)
				if r := p.Repaired(); len(r) != 0 {
					t.Errorf("repaired again: %q", r)
				}
			})
		})
	}
}

// A change that meets foreign hands on its way does not fail: it looks at
// everything again.
func TestChangeMeetsDamage(t *testing.T) {
	inside(t, Config{}, func(p *Plane) {
		tab := everyField()
		apply(t, p, tab, nil)
		run(t, "delete element ip fairlead vips { 10.96.0.10 . tcp . 80 }", "nft", "-f", "-")
		apply(t, p, table.New(), changes(tab, table.New()))
		if d := dump(t, p); strings.Contains(d, "default/") {
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
	inside(t, Config{}, func(p *Plane) {
		run(t, neighbour, "nft", "-f", "-")
		apply(t, p, everyField(), nil)
		apply(t, p, table.New(), nil)
		run(t, "add element ip fairlead-not s { 10.0.0.3 }", "nft", "-f", "-")
		apply(t, p, everyField(), nil)
		if err := Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got, want := run(t, "", "nft", "list", "ruleset"), strings.Replace(neighbour, "10.0.0.1 }", "10.0.0.1, 10.0.0.3 }", 1); got != want {
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
		"table ip fairlead { comment \"fairlead, layout 0\"; map vips { type ipv4_addr : ipv4_addr; }; chain prerouting { type filter hook input priority 5; }; }",
		"table ip fairlead { }",
	} {
		withKernel(t, Config{}, func(p *Plane, k *counting) {
			run(t, old, "nft", "-f", "-")
			apply(t, p, everyField(), nil)
			// IPv6, where there was no table, takes three: what is always
			// there, chains, frontends.
			if k.commits != 1+3 {
				t.Errorf("%d transactions, want 1 for IPv4 and 3 for IPv6", k.commits)
			}
			after := dump(t, p)
			if want := fresh(t, Config{}, []*table.Table{everyField()})[0]; after != want {
				t.Errorf("(-fresh +replaced):\n%s", cmp.Diff(want, after))
			}
		})
	}
}

func TestApplyStopsWithItsContext(t *testing.T) {
	inside(t, Config{}, func(p *Plane) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := p.Apply(ctx, everyField(), nil); !errors.Is(err, context.Canceled) {
			t.Errorf("Apply = %v, want that it was cancelled", err)
		}
		apply(t, p, everyField(), []table.Key{})
		if d := dump(t, p); !strings.Contains(d, "default/web:http") {
			t.Errorf("an Apply after one that failed did not do all of it:\n%s", d)
		}
	})
}
