package announce

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/packet"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// device is an interface at which addresses are answered for.
type device struct {
	name     string
	link     link.Interface // guarded by Announcer.mu
	arp, ndp *packet.Conn
	// groups counts the addresses for each multicast group. all is true once the
	// interface receives all of them.
	groups  map[netip.Addr]int
	all     bool
	readers sync.WaitGroup
	failed  atomic.Bool
}

// open makes the kernel leave ARP for our addresses to us, and starts to read.
func (a *Announcer) open(l link.Interface) (*device, error) {
	a.quieten(l.Name)
	arp, err := packet.Listen(l.Index, packet.ARP)
	if err != nil {
		return nil, err
	}
	ndp, err := packet.Listen(l.Index, packet.IPv6)
	if err != nil {
		return nil, errors.Join(err, arp.Close())
	}
	d := &device{name: l.Name, link: l, arp: arp, ndp: ndp, groups: map[netip.Addr]int{}}
	d.readers.Go(func() { a.read(d, arp) })
	d.readers.Go(func() { a.read(d, ndp) })
	return d, nil
}

// quietenNew quietens interfaces that were not known before, at which addresses may be
// announced: also of a node that takes none, since its kernel would answer beside the owner.
func (a *Announcer) quietenNew(found []link.Interface) {
	for _, l := range found {
		if len(l.Networks) == 0 && len(a.opts.Interfaces) == 0 {
			continue // of a pod, whose gateway the kernel may have to answer for
		}
		if !slices.ContainsFunc(a.Links(), func(k link.Interface) bool { return sameLink(k, l) }) {
			a.quieten(l.Name)
		}
	}
}

// quieten keeps the kernel from answering ARP for addresses that it has on other
// interfaces (mode ipvs has virtual IPs on a dummy, on every node), and from using
// them as senders of requests, from which neighbours would learn the wrong owner.
func (a *Announcer) quieten(name string) {
	for key, want := range map[string]string{"arp_ignore": "1", "arp_announce": "2"} {
		key = "net/ipv4/conf/" + name + "/" + key
		if b, err := os.ReadFile("/proc/sys/" + key); err == nil && strings.TrimSpace(string(b)) != "0" {
			continue // an administrator's choice
		}
		if err := sysctl.Set(key, want); err != nil {
			a.log.Warn("the kernel may answer ARP for addresses of load balancers that another node owns", "interface", name, "err", err)
		}
	}
}

// read passes on what an interface receives, until the connection is closed or the
// interface is gone.
func (a *Announcer) read(d *device, c *packet.Conn) {
	buf := make([]byte, 2048)
	for {
		n, err := c.Receive(buf)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				d.failed.Store(true)
				if !gone(err) {
					a.log.Error("cannot read from an interface; opening it again", "interface", d.name, "err", err)
				}
				a.reopen.Set()
			}
			return
		}
		if q, ok := parse(buf[:n]); ok {
			a.receive(d, q)
		}
	}
}

func (d *device) dead() bool { return d.failed.Load() }

// send sends a frame. One that is lost is sent again: an answer when it is asked for
// again, an announcement by its repetition.
func (d *device) send(frame []byte) {
	c := d.arp
	if binary.BigEndian.Uint16(frame[12:]) == etherIPv6 {
		c = d.ndp
	}
	_ = c.Send(frame)
}

// join makes solicitations for an address arrive.
func (d *device) join(a netip.Addr) {
	if a.Is4() {
		return
	}
	group := solicitedNode(a)
	if d.groups[group]++; d.groups[group] > 1 || d.all {
		return
	}
	// A socket may join some hundreds of groups (net.core.optmem_max).
	if d.ndp.Join(group) != nil {
		d.all = d.ndp.AllMulticast() == nil
	}
}

func (d *device) leave(a netip.Addr) {
	if a.Is4() {
		return
	}
	group := solicitedNode(a)
	if d.groups[group]--; d.groups[group] > 0 {
		return
	}
	delete(d.groups, group)
	_ = d.ndp.Leave(group) // with all multicast it may not have been joined
}

func (d *device) close() {
	_ = d.arp.Close()
	_ = d.ndp.Close()
}
