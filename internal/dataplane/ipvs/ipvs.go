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
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/socket"
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
	// ServiceCIDRs are the ranges of ClusterIPs as far as they are known, which
	// ExcludeCIDRs must not overlap. What is sent to an address
	// there that no Service has is dropped.
	ServiceCIDRs []netip.Prefix
	// ExcludeCIDRs are ranges whose virtual servers are another program's. A
	// service port with an address there is rejected.
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

// Check returns what is wrong with c on any kernel, or nil.
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

// checkExcluded rejects ranges whose virtual servers would be both ours and not
// ours.
func (c *Config) checkExcluded() error {
	for i, p := range c.ExcludeCIDRs {
		for _, q := range c.ServiceCIDRs {
			if p.Overlaps(q) {
				return fmt.Errorf("ipvs: excluded range %s overlaps the range of ClusterIPs %s: their virtual servers cannot be both ours and not ours",
					p, q)
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

// Mode is the dataplane.Applier of this mode. It works in the network namespace of
// the thread that calls its first Apply.
type Mode struct {
	*dataplane.Reconciler
	dataplane.Changes
	// watch finds other programs' changes of rules.
	watch   *iptables.Watch
	cfg     Config
	targets []*target
	kernel  *kernel
	drops   *drops.IPSets
	looks   looks
}

// New returns a Mode. It changes nothing in the kernel yet.
func New(cfg Config) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	m := &Mode{cfg: cfg, kernel: &kernel{}, drops: drops.NewIPSets(counted), Changes: dataplane.NewChanges()}
	m.Reconciler = dataplane.NewReconciler(mode, dataplane.Hooks{Begin: m.begin})
	for _, f := range socket.UsableFamilies() {
		tool, err := iptables.New(cfg.Variant, f)
		if err != nil {
			return nil, fmt.Errorf("ipvs mode: %w", err)
		}
		l := newLayout(f, &m.cfg)
		t := &target{layout: l, kernel: m.kernel, rules: &rules{layout: l, plain: tool, tool: tool}}
		m.targets = append(m.targets, t)
		m.Add(f, t)
	}
	return m, nil
}

// open opens what speaks to the kernel, in the namespace of this thread.
func (m *Mode) open() error {
	if m.kernel.servers != nil {
		return nil
	}
	k, err := openKernel()
	if err != nil {
		return err
	}
	if err := m.drops.Open(socket.UsableFamilies()...); err != nil {
		return errors.Join(err, k.Close())
	}
	watch, err := iptables.NewWatch(m.cfg.Variant, tables, ourChain, m.Notify)
	if err != nil {
		return errors.Join(err, m.drops.Close(), k.Close())
	}
	if err := m.looks.open(); err != nil {
		return errors.Join(err, watch.Close(), m.drops.Close(), k.Close())
	}
	for _, t := range m.targets {
		t.rules.tool = watch.Tool(t.rules.plain)
	}
	*m.kernel, m.watch = *k, watch
	return nil
}

func (m *Mode) begin(_ context.Context, all bool) error {
	if err := m.open(); err != nil || !all {
		return err
	}
	return m.prepare()
}

// Close releases the sockets. What was written stays and goes on working.
func (m *Mode) Close() error {
	looks := m.looks.close()
	if m.kernel.servers == nil {
		return looks
	}
	err := errors.Join(looks, m.kernel.Close(), m.drops.Close(), m.watch.Close())
	*m.kernel = kernel{}
	m.Forget()
	return err
}

// Drops is dataplane.Counter's.
func (m *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return m.drops.Drops(ctx) }

// NodeAddresses are the addresses of this node, in order: all that its interfaces
// have, without the virtual IPs, on which no node port is to answer. It has the
// same caller as Apply.
func (m *Mode) NodeAddresses() ([]netip.Addr, error) {
	if err := m.open(); err != nil {
		return nil, err
	}
	if err := m.kernel.device.CatchUp(); err != nil {
		return nil, err
	}
	return m.kernel.device.Others(), nil
}
