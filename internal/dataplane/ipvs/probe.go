package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// tryName names what Probe makes and removes again.
	tryName  = "fairlead-try"
	chainTry = chainPrefix + "TRY"
	// tryMark is of no packet.
	tryMark = markPrefix | 0xffff
)

// Probe returns why this mode cannot work here, or nil. It makes and removes again
// one of everything that the mode uses.
func Probe(ctx context.Context, cfg Config) error {
	if err := cfg.complete(); err != nil {
		return err
	}
	has, err := Available(cfg.Scheduler)
	if err == nil && len(has) == 0 {
		err = fmt.Errorf("the kernel lacks scheduler %s (module ip_vs_%s)", cfg.Scheduler, cfg.Scheduler)
	}
	if err == nil {
		err = probeDevice()
	}
	for _, f := range socket.UsableFamilies() {
		if err == nil {
			err = probeRules(ctx, f, &cfg)
		}
	}
	if err != nil {
		return fmt.Errorf("ipvs mode does not work here: %w", err)
	}
	return nil
}

// Available returns the schedulers that the kernel has, or can load. An
// error means that it has no IPVS, or does not let this process use it.
func Available(schedulers ...string) ([]string, error) {
	c, err := ipvs.Dial()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	var has []string
	for _, name := range schedulers {
		b := ipvs.NewBatch[struct{}](c)
		key := ipvs.MarkKey(tryMark, svc.IPv4)
		b.AddService(struct{}{}, ipvs.Service{Key: key, Scheduler: name})
		refused, err := ipvs.Send(c, b)
		if err != nil {
			return nil, err
		}
		if len(refused) > 0 {
			if ipvs.IsMissing(refused[0].Err) {
				continue
			}
			return nil, refused[0].Err
		}
		has = append(has, name)
		b = ipvs.NewBatch[struct{}](c)
		b.DelService(struct{}{}, key)
		if refused, err = ipvs.Send(c, b); len(refused) > 0 {
			err = refused[0].Err
		}
		if err != nil {
			return nil, err
		}
	}
	return has, nil
}

func probeDevice() error {
	return errors.Join(link.EnsureDummy(tryName, alias), link.RemoveDevice(tryName, alias))
}

// probeRules tries the rules on separate sets, in chains to which nothing
// leads.
func probeRules(ctx context.Context, f svc.Family, cfg *Config) error {
	t, err := iptables.New(cfg.Variant, f)
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w; or choose another --mode", err)
	}
	if err != nil {
		return err
	}
	c, err := ipset.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	var names []string
	var rename []string
	try := setsOf(f)
	for i := range try {
		old := try[i].Name
		try[i].Name = strings.Replace(old, setPrefix, "fairtry-", 1)
		names, rename = append(names, try[i].Name), append(rename, old+" ", try[i].Name+" ")
	}
	err = c.Create(try...)
	if err == nil {
		err = probeTables(ctx, t, newLayout(f, cfg), strings.NewReplacer(rename...))
	}
	if d := c.Destroy(names...); err == nil {
		err = d
	}
	return err
}

func probeTables(ctx context.Context, t tool, l *layout, rename *strings.Replacer) error {
	for _, table := range tables {
		var rules []string
		for _, c := range l.chains(table) {
			for _, rule := range c.rules {
				if !iptables.Leads(rule, ourChain) {
					rules = append(rules, rename.Replace(rule+" "))
				}
			}
		}
		if err := iptables.Try(ctx, t, table, chainTry, rules...); err != nil {
			return fmt.Errorf("table %s, %s: %w; the kernel may lack a module (xt_set, xt_ipvs, xt_addrtype)", table, l.family, err)
		}
	}
	return nil
}

// Present reports whether this mode has its device, by this process or another one.
func Present(context.Context) (bool, error) { return link.HasDevice(deviceName) }

// Cleanup removes all that this mode wrote: the rules of both variants of
// iptables, its virtual servers, its device and its sets. Where there are none it
// does nothing.
func Cleanup(ctx context.Context) error {
	err := errors.Join(
		iptables.RemoveChains(ctx, ourChain), removeServers(), link.RemoveDevice(deviceName, alias), ipset.Remove(ctx, ourSets()...))
	if err != nil {
		return fmt.Errorf("ipvs cleanup: %w", err)
	}
	return nil
}

// removeServers removes the virtual servers that our sets name.
func removeServers() error {
	names, err := ipset.Present(ourSets()...)
	if err != nil || len(names) == 0 {
		return err
	}
	k, err := openKernel()
	if err != nil {
		return err
	}
	defer func() { _ = k.Close() }()
	elements := map[element]bool{}
	for _, f := range socket.Families() {
		// A set that is not there names none.
		_ = k.sets.List(setFront.name(f), func(e ipset.Element) { elements[element{setFront, e}] = true })
	}
	c := &changes{}
	err = k.servers.Services(func(s ipvs.Service) {
		if ours(s.Key, elements) {
			c.list = append(c.list, change{verb: delServer, service: s})
		}
	})
	if err != nil {
		return err
	}
	refused, err := k.servers.Send(c)
	for _, r := range refused {
		err = errors.Join(err, r.Err)
	}
	return err
}

// ourSets are the names of our sets.
func ourSets() []string {
	var out []string
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		for _, s := range setsOf(f) {
			out = append(out, s.Name)
		}
	}
	return out
}
