package ipvs

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// failing makes one call of the kernel in ten fail, at random, unless off is set.
type failing struct {
	r   *rand.Rand
	off *bool
}

var errInjected = errors.New("injected")

func (f failing) fails() bool { return !*f.off && f.r.IntN(10) == 0 }

// of is k, with calls that fail.
func (f failing) of(k *kernel) kernel {
	return kernel{failingServers{k.servers, f}, failingSets{k.sets, f}, failingDevice{k.device, f}}
}

type failingServers struct {
	servers
	failing
}

func (f failingServers) Send(c *changes) ([]ipvs.Refusal[dataplane.FrontKey], error) {
	if f.fails() {
		return nil, errInjected
	}
	// Some changes are rejected, and all behind them in the list are made.
	made, rejected := &changes{}, []ipvs.Refusal[dataplane.FrontKey]{}
	for _, x := range c.list {
		if f.r.IntN(30) == 0 {
			rejected = append(rejected, ipvs.Refusal[dataplane.FrontKey]{Owner: x.owner, Err: errInjected})
		} else {
			made.list = append(made.list, x)
		}
	}
	more, err := f.servers.Send(made)
	return append(rejected, more...), err
}

// Dests fails less often, since a full comparison reads those of every server.
func (f failingServers) Dests(k ipvs.Key, do func(ipvs.Dest)) error {
	if f.r.IntN(20) == 0 && f.fails() {
		return errInjected
	}
	return f.servers.Dests(k, do)
}

type failingSets struct {
	sets
	failing
}

func (f failingSets) Add(set string, list []ipset.Element) error {
	if f.fails() {
		return errInjected
	}
	return f.sets.Add(set, list)
}

func (f failingSets) Del(set string, list []ipset.Element) error {
	if f.fails() {
		return errInjected
	}
	return f.sets.Del(set, list)
}

func (f failingSets) Create(sets ...ipset.Set) error {
	if f.fails() {
		return errInjected
	}
	return f.sets.Create(sets...)
}

type failingDevice struct {
	device
	failing
}

func (f failingDevice) Add(addrs []netip.Addr) map[netip.Addr]error {
	return f.some(addrs, f.device.Add)
}

func (f failingDevice) Del(addrs []netip.Addr) map[netip.Addr]error {
	return f.some(addrs, f.device.Del)
}

// some does it to those that do not fail.
func (f failingDevice) some(addrs []netip.Addr, do func([]netip.Addr) map[netip.Addr]error) map[netip.Addr]error {
	failed := map[netip.Addr]error{}
	var rest []netip.Addr
	for _, a := range addrs {
		if f.fails() {
			failed[a] = errInjected
		} else {
			rest = append(rest, a)
		}
	}
	maps.Copy(failed, do(rest))
	return failed
}

func (f failingDevice) Ensure() error {
	if f.fails() {
		return errInjected
	}
	return f.device.Ensure()
}

// failingTool is iptables that fails as often as the kernel.
type failingTool struct {
	tool
	failing
}

func (f failingTool) Restore(ctx context.Context, input []byte) error {
	if f.fails() {
		return errInjected
	}
	return f.tool.Restore(ctx, input)
}

// faulty is an Applier that fails but in its Dump, which the test looks at.
type faulty struct {
	*Mode
	off *bool
}

func (f faulty) Dump(ctx context.Context) (string, error) {
	*f.off = true
	defer func() { *f.off = false }()
	return f.Mode.Dump(ctx)
}

func TestFaults(t *testing.T) {
	tabs := flows.States(1)[10:]
	want := flows.Fresh(t, inside, tabs)
	inside(t, func(p dataplane.Applier) {
		one := p.(*Mode)
		if err := one.open(); err != nil {
			t.Fatal(err)
		}
		faults, real := failing{rand.New(rand.NewPCG(5, 6)), new(bool)}, *one.kernel
		*one.kernel = faults.of(&real)
		for _, f := range one.targets {
			f.rules.tool = failingTool{f.rules.tool, faults}
		}
		flows.Converge(t, 8, tabs, want, faulty{one, faults.off})
	})
}
