// Package ipvs is the mode that lets the kernel's own load balancer, IPVS, choose
// endpoints, by one of its schedulers; see README.md.
package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/table"
)

// DefaultScheduler is kube-proxy's.
const DefaultScheduler = "rr"

// Config is what a Mode needs to know; the zero value is usable.
type Config struct {
	// Variant is the iptables that the few rules are written with.
	Variant iptables.Variant
	// Scheduler chooses endpoints where the Service does not name one; empty
	// is DefaultScheduler.
	Scheduler string
	// ServiceCIDRs are the ranges of ClusterIPs. What is sent to an address
	// there that no Service has is dropped.
	ServiceCIDRs []netip.Prefix
	// ExcludeCIDRs are ranges whose virtual servers are somebody else's. A
	// service port with an address there is refused.
	ExcludeCIDRs []netip.Prefix
	// StrictARP makes the node answer ARP only for addresses of the interface
	// that is asked, so not for virtual IPs.
	StrictARP bool
	// Timeouts of idle connections; 0 leaves the kernel's.
	Timeouts ipvs.Timeouts
	// MasqueradeBit is the bit of the packet mark for connections to
	// masquerade, 1 to 31; 0 stands for 14, kube-proxy's.
	MasqueradeBit int
}

const defaultMasqueradeBit = 14

// Check says what is wrong with c on any kernel, or nil.
func (c Config) Check() error { return c.complete() }

func (c *Config) complete() error {
	if c.MasqueradeBit == 0 {
		c.MasqueradeBit = defaultMasqueradeBit
	}
	if c.MasqueradeBit < 1 || c.MasqueradeBit > 31 {
		return fmt.Errorf("ipvs: masquerade bit %d is not within 1 and 31", c.MasqueradeBit)
	}
	if c.Scheduler == "" {
		c.Scheduler = DefaultScheduler
	}
	if !slices.Contains(Schedulers, c.Scheduler) {
		return fmt.Errorf("ipvs: scheduler %q is not one of %s", c.Scheduler, strings.Join(Schedulers, ", "))
	}
	for name, d := range map[string]time.Duration{"TCP": c.Timeouts.TCP, "TCP FIN": c.Timeouts.TCPFin, "UDP": c.Timeouts.UDP} {
		if d < 0 || d > maxTimeout {
			return fmt.Errorf("ipvs: %s timeout %s is not within 0 and %s", name, d, maxTimeout)
		}
	}
	return c.checkExcluded()
}

// maxTimeout is far below what overflows in the kernel, and more than anybody
// needs.
const maxTimeout = 30 * 24 * time.Hour

// checkExcluded refuses ranges of which nobody could say whose they are.
func (c *Config) checkExcluded() error {
	for i, p := range c.ExcludeCIDRs {
		for _, q := range c.ServiceCIDRs {
			if p.Overlaps(q) {
				return fmt.Errorf("ipvs: excluded range %s overlaps the range of ClusterIPs %s: their virtual servers cannot be both ours and not ours", p, q)
			}
		}
		for _, q := range c.ExcludeCIDRs[:i] {
			if p.Overlaps(q) {
				return fmt.Errorf("ipvs: excluded ranges %s and %s overlap: name each address once", q, p)
			}
		}
	}
	return nil
}

// tool is what the Mode needs of iptables.Tool.
type tool interface {
	Restore(ctx context.Context, input []byte) error
	SaveAll(ctx context.Context, chain func(table, name string), rule func(table, chain, line string)) error
}

// Mode is a dataplane.Applier. It works in the network namespace of the thread that
// calls its first Apply.
type Mode struct {
	cfg      Config
	families []*family
	kernel   kernel
	repaired []string
	lost     *drops.IPSets
}

// New returns a Mode. It changes nothing in the kernel yet.
func New(cfg Config) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	p := &Mode{cfg: cfg, lost: drops.NewIPSets(counted)}
	for _, f := range iptables.Families() {
		t, err := iptables.New(cfg.Variant, f)
		if err != nil {
			return nil, fmt.Errorf("ipvs mode: %w", err)
		}
		p.families = append(p.families, newFamily(f, &p.cfg, t))
	}
	return p, nil
}

// open opens what speaks to the kernel, in the namespace of this thread.
func (p *Mode) open() error {
	if p.kernel != nil {
		return nil
	}
	k, err := openKernel()
	if err != nil {
		return err
	}
	if err := p.lost.Open(iptables.Families()...); err != nil {
		return errors.Join(err, k.close())
	}
	p.kernel = k
	return nil
}

// Close releases the sockets. What was written stays and goes on working.
func (p *Mode) Close() error {
	if p.kernel == nil {
		return nil
	}
	err := errors.Join(p.kernel.close(), p.lost.Close())
	p.kernel = nil
	for _, f := range p.families {
		f.stored = nil // an Apply after this one reads the kernel again
	}
	return err
}

// Drops is dataplane.Counter's.
func (p *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return p.lost.Drops(ctx) }

// Repaired says what the last Apply with changed nil found missing or foreign
// and put right, one line each. The first Apply of a process repairs nothing:
// it only brings up to date what an earlier one left.
func (p *Mode) Repaired() []string { return p.repaired }

// NodeAddresses are the addresses of this node, in order: all that its interfaces
// have, without the virtual IPs, on which no node port is to answer. It has the
// same caller as Apply.
func (p *Mode) NodeAddresses() ([]netip.Addr, error) {
	if err := p.open(); err != nil {
		return nil, err
	}
	if err := p.kernel.catchUp(); err != nil {
		return nil, err
	}
	return p.kernel.others(), nil
}

// Apply is dataplane.Applier's.
func (p *Mode) Apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	if err := p.open(); err != nil {
		return err
	}
	full := changed == nil
	if full {
		p.repaired = nil
	}
	for _, f := range p.families {
		full = full || f.mustBeFull(t)
	}
	if full {
		if err := p.prepare(); err != nil {
			return err
		}
	}
	var errs []error
	for _, f := range p.families {
		first := f.stored == nil
		if err := f.apply(ctx, p.kernel, t, changed); err != nil {
			errs = append(errs, err)
		}
		if changed == nil && !first {
			p.repaired = append(p.repaired, f.repaired...)
		}
	}
	return dataplane.Both(errs...)
}

// kernel is what the Mode needs of the kernel besides iptables.
type kernel interface {
	close() error
	services(f func(ipvs.Service)) error
	dests(k ipvs.Key, f func(ipvs.Dest)) error
	send(b *changes) ([]ipvs.Refusal[dataplane.FrontKey], error)
	setTimeouts(t ipvs.Timeouts) error

	createSets(sets ...ipset.Set) error
	elements(set string, f func(ipset.Element)) error
	add(set string, list []ipset.Element) error
	del(set string, list []ipset.Element) error

	// addresses lists those of the device. catchUp learns what changed on all
	// other interfaces since the last call of one of the two; elsewhere looks for
	// one of theirs, others returns all.
	addresses() (map[netip.Addr]bool, error)
	catchUp() error
	elsewhere(a netip.Addr) bool
	others() []netip.Addr
	bind(addrs []netip.Addr) map[netip.Addr]error
	unbind(addrs []netip.Addr) map[netip.Addr]error
	ensureDevice() error
	sysctl(key, value string) error
}
