package ipvs

import (
	"errors"
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/link"
)

// kernel is what the mode needs of the kernel of one network namespace, besides
// iptables. Before it is opened it has nothing.
type kernel struct {
	servers servers
	sets    sets
	device  device
}

// servers are the virtual servers of IPVS: an ipvs.Conn.
type servers interface {
	Services(f func(ipvs.Service)) error
	Dests(k ipvs.Key, f func(ipvs.Dest)) error
	// Send makes changes and returns the changes that the kernel rejected.
	Send(b *changes) ([]ipvs.Refusal[dataplane.FrontKey], error)
	SetTimeouts(t ipvs.Timeouts) error
	Close() error
}

// sets are the sets of ipset: an ipset.Conn.
type sets interface {
	Create(sets ...ipset.Set) error
	List(set string, f func(ipset.Element)) error
	Len(set string) (int, error)
	Add(set string, list []ipset.Element) error
	Del(set string, list []ipset.Element) error
	Close() error
}

// device is the interface that has the virtual IPs: a link.Addresses.
type device interface {
	// Ensure makes the device if it is not there.
	Ensure() error
	// List returns the addresses of the device. CatchUp learns what changed since the
	// last call of one of the two. Has reports whether the device has an address,
	// Elsewhere whether one of the other interfaces does, Others returns all their addresses.
	List() (map[netip.Addr]bool, error)
	CatchUp() error
	Has(a netip.Addr) bool
	Elsewhere(a netip.Addr) bool
	Others() []netip.Addr
	// Add and Del return the addresses that they failed for.
	Add(addrs []netip.Addr) map[netip.Addr]error
	Del(addrs []netip.Addr) map[netip.Addr]error
	Close() error
}

func openKernel() (*kernel, error) {
	vs, err := ipvs.Dial()
	if err != nil {
		return nil, err
	}
	sets, err := ipset.Dial()
	if err != nil {
		return nil, errors.Join(err, vs.Close())
	}
	addrs, err := link.DialAddresses(deviceName)
	if err != nil {
		return nil, errors.Join(err, vs.Close(), sets.Close())
	}
	return &kernel{serverConn{vs}, sets, deviceConn{addrs}}, nil
}

func (k *kernel) Close() error {
	return errors.Join(k.servers.Close(), k.sets.Close(), k.device.Close())
}

type serverConn struct{ *ipvs.Conn }

func (c serverConn) Send(b *changes) ([]ipvs.Refusal[dataplane.FrontKey], error) {
	batch := ipvs.NewBatch[dataplane.FrontKey](c.Conn)
	for i := range b.list {
		b.list[i].encode(batch)
	}
	return ipvs.Send(c.Conn, batch)
}

type deviceConn struct{ *link.Addresses }

func (deviceConn) Ensure() error { return link.EnsureDummy(deviceName, alias) }
