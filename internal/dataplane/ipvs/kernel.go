package ipvs

import (
	"errors"
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// realKernel is the kernel, of one network namespace.
type realKernel struct {
	vs    *ipvs.Conn
	sets  *ipset.Conn
	addrs *link.Addresses
}

func openKernel() (kernel, error) {
	vs, err := ipvs.Dial()
	if err != nil {
		return nil, err
	}
	sets, err := ipset.Dial()
	if err != nil {
		return nil, errors.Join(err, vs.Close())
	}
	addrs, err := link.DialAddresses(device)
	if err != nil {
		return nil, errors.Join(err, vs.Close(), sets.Close())
	}
	return &realKernel{vs, sets, addrs}, nil
}

func (k *realKernel) close() error {
	return errors.Join(k.vs.Close(), k.sets.Close(), k.addrs.Close())
}
func (k *realKernel) services(f func(ipvs.Service)) error { return k.vs.Services(f) }
func (k *realKernel) dests(key ipvs.Key, f func(ipvs.Dest)) error {
	return k.vs.Dests(key, f)
}
func (k *realKernel) setTimeouts(t ipvs.Timeouts) error  { return k.vs.SetTimeouts(t) }
func (k *realKernel) createSets(sets ...ipset.Set) error { return k.sets.Create(sets...) }
func (k *realKernel) elements(set string, f func(ipset.Element)) error {
	return k.sets.List(set, f)
}
func (k *realKernel) add(set string, list []ipset.Element) error { return k.sets.Add(set, list) }
func (k *realKernel) del(set string, list []ipset.Element) error { return k.sets.Del(set, list) }

func (k *realKernel) send(b *changes) ([]ipvs.Refusal[dataplane.FrontKey], error) {
	batch := ipvs.NewBatch[dataplane.FrontKey](k.vs)
	for i := range b.list {
		b.list[i].encode(batch)
	}
	return ipvs.Send(k.vs, batch)
}

func (k *realKernel) addresses() (map[netip.Addr]bool, error)        { return k.addrs.List() }
func (k *realKernel) catchUp() error                                 { return k.addrs.CatchUp() }
func (k *realKernel) elsewhere(a netip.Addr) bool                    { return k.addrs.Elsewhere(a) }
func (k *realKernel) others() []netip.Addr                           { return k.addrs.Others() }
func (k *realKernel) bind(addrs []netip.Addr) map[netip.Addr]error   { return k.addrs.Add(addrs) }
func (k *realKernel) unbind(addrs []netip.Addr) map[netip.Addr]error { return k.addrs.Del(addrs) }
func (k *realKernel) ensureDevice() error                            { return link.EnsureDummy(device, alias) }
func (k *realKernel) sysctl(key, value string) error                 { return sysctl.Set(key, value) }
