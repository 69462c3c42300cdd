package userspace

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// Changes by steps arrive at what one Apply of the last Table makes, and leave
// no listener behind.
func TestStepsAndWholeAgree(t *testing.T) {
	e := flows.NewEnv(t, create)
	r := rand.New(rand.NewPCG(6, 0))
	now := map[table.Key]*table.ServicePort{}
	addrs := []netip.Addr{e.Node.Addr4(), e.Node.Addr6()}
	tableOf := func() *table.Table {
		var ports []*table.ServicePort
		for _, p := range now {
			ports = append(ports, p)
		}
		tab := table.New(ports...)
		tab.NodePortAddrs, tab.ServiceCIDRs = addrs, flows.ServiceCIDRs
		tab.LocalCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}
		return tab
	}
	e.Apply(t, tableOf(), nil)
	for step := range 120 {
		var changed []table.Key
		for range 1 + r.IntN(3) {
			p := randomPort(r, r.IntN(8))
			if now[p.Key()] = p; r.IntN(4) == 0 {
				delete(now, p.Key())
			}
			changed = append(changed, p.Key())
		}
		e.Apply(t, tableOf(), changed)
		if step%10 != 9 {
			continue
		}
		steps := dump(t, e)
		e.Apply(t, tableOf(), nil)
		if got := e.Dataplane.(*Mode).Repaired(); len(got) != 0 {
			t.Fatalf("step %d: the audit found %q", step, got)
		}
		if whole := dump(t, e); whole != steps {
			t.Fatalf("step %d:\n%s\nafter an audit:\n%s", step, steps, whole)
		}
		var fresh dataplane.Applier
		e.Node.Do(func() { fresh = create(t, e.Node) })
		if got, want := stepsContent(fresh.(*Mode), tableOf(), t), stepsContent(e.Dataplane.(*Mode), nil, t); got != want {
			t.Fatalf("step %d: from nothing\n%s\nby steps\n%s", step, got, want)
		}
		_ = fresh.Close()
	}
	now = map[table.Key]*table.ServicePort{}
	e.Apply(t, tableOf(), nil)
	for _, f := range e.Dataplane.(*Mode).targets {
		if len(f.listeners)+len(f.fronts)+len(f.clusterIPs)+len(f.retired) != 0 {
			t.Errorf("left behind: %d listeners, %d fronts, %d cluster IPs, %d retired", len(f.listeners), len(f.fronts), len(f.clusterIPs),
				len(f.retired))
		}
	}
}

var portNumber = regexp.MustCompile(`(port|:)\s?[3-6]\d{4}`)

// stepsContent is what an Applier would have the kernel hold, as text without the
// numbers of the proxy's ports. With a table it plans that first, over a kernel
// that holds nothing.
func stepsContent(p *Mode, tab *table.Table, t *testing.T) string {
	t.Helper()
	if tab != nil {
		p.kernel = empty{}
		for _, f := range p.targets {
			f.kernel = empty{}
		}
		if err := p.Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
	}
	var lines []string
	for _, f := range p.targets {
		c := f.content()
		for s, e := range c.elems {
			lines = append(lines, portNumber.ReplaceAllString(f.layout.elemText(s, &e), "port"))
		}
		for name, ch := range c.chains {
			for i, r := range ch.rules {
				lines = append(lines, fmt.Sprintf("%s %s %d %s", f.layout.Word, name, i, portNumber.ReplaceAllString(r.Text, "port")))
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, setProxyPorts+" ") }), "\n")
}

// empty is a kernel that holds nothing and takes everything.
type empty struct{}

func (empty) Commit(*nftables.Batch) error                    { return nil }
func (empty) Table(nftables.Table) (string, bool, error)      { return "", false, nil }
func (empty) Chains(nftables.Table) ([]nftables.Chain, error) { return nil, nil }
func (empty) Rules(nftables.Table) (map[string][]nftables.StoredRule, error) {
	return nil, nil
}
func (empty) Sets(nftables.Table) ([]nftables.StoredSet, error) { return nil, nil }
func (empty) Elems(nftables.Table, string, func(), func(nftables.Elem)) error {
	return nil
}
func (empty) Close() error { return nil }

// randomPort is one of few service ports, in one of many shapes.
func randomPort(r *rand.Rand, n int) *table.ServicePort {
	p := servicePort(fmt.Sprintf("s%d", n), []svc.Protocol{svc.TCP, svc.UDP}[n%2])
	word, all := "10.244.1.%d:80", "0.0.0.0"
	cluster, lb := ap(fmt.Sprintf("10.96.0.%d:80", n/2)), ap(fmt.Sprintf("203.0.113.%d:80", n))
	if n%3 == 0 {
		p.Family, word, all = svc.IPv6, "[fd00:10:244:1::%d]:80", "::"
		cluster, lb = ap(fmt.Sprintf("[fd00:10:96::%d]:80", n/2)), ap(fmt.Sprintf("[2001:db8:113::%d]:80", n))
	}
	list := func() []table.Endpoint {
		out := []table.Endpoint{}
		for i := range r.IntN(3) {
			out = append(out, table.Endpoint{Addr: ap(fmt.Sprintf(word, 2+i))})
		}
		return out
	}
	eps := list()
	p.Frontends = []table.Frontend{{Kind: table.ClusterIP, Addr: cluster, Endpoints: eps, Drop: r.IntN(2) == 0}}
	if r.IntN(2) == 0 {
		f := table.Frontend{Kind: table.LoadBalancerIP, Addr: lb, Endpoints: list(), LocalClients: eps}
		if r.IntN(2) == 0 {
			f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
		}
		p.Frontends = append(p.Frontends, f)
	}
	if r.IntN(2) == 0 {
		p.Frontends = append(p.Frontends,
			table.Frontend{Kind: table.NodePort, Addr: netip.AddrPortFrom(netip.MustParseAddr(all), uint16(30080+n)), Endpoints: eps})
	}
	return p
}

// A fault of the kernel is told, and the next Apply makes up for it.
func TestFaults(t *testing.T) {
	e := flows.NewEnv(t, create)
	p := e.Dataplane.(*Mode)
	tab := web(svc.TCP, at(e.Host("a"), 9376))
	for n := range 8 {
		e.Apply(t, table.New(), nil)
		broken := &faulty{kernel: p.kernel, at: n}
		for _, f := range p.targets {
			f.kernel = broken
		}
		var err error
		e.Node.Do(func() { err = p.Apply(t.Context(), tab, nil) })
		if broken.met && !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("call %d of the kernel fails, and Apply returns %v", n, err)
		}
		for _, f := range p.targets {
			f.kernel = p.kernel
		}
		e.Apply(t, tab, nil)
		if got, err := e.Host("c").Ask(t.Context(), svc.TCP, vip); err != nil || got.Name != "a" {
			t.Errorf("after a fault in call %d: %+v, %v", n, got, err)
		}
	}
}

// faulty fails one call.
type faulty struct {
	kernel
	at  int
	met bool
}

func (f *faulty) fail() bool {
	f.at--
	f.met = f.met || f.at == -1
	return f.at == -1
}

func (f *faulty) Commit(b *nftables.Batch) error {
	if f.fail() {
		return syscall.ENOMEM
	}
	return f.kernel.Commit(b)
}

func (f *faulty) Table(t nftables.Table) (string, bool, error) {
	if f.fail() {
		return "", false, syscall.ENOMEM
	}
	return f.kernel.Table(t)
}

func (f *faulty) Rules(t nftables.Table) (map[string][]nftables.StoredRule, error) {
	if f.fail() {
		return nil, syscall.ENOMEM
	}
	return f.kernel.Rules(t)
}
