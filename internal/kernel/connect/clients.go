package connect

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// Namespace is a network namespace whose only way out is the node.
type Namespace struct {
	// Addrs are its addresses, at most one of each family.
	Addrs []netip.Addr
	// From is the interface of the node that its packets come from.
	From string
}

// Class is what the packet filter finds of a client's source address, by family: IPv4, IPv6.
type Class struct {
	// InPods reports that it counts as a Pod's, Local as one of this node's Pods.
	InPods, Local [2]bool
}

// The values of enum in connect.c.
const (
	stateAsked = iota
	statePod
	stateOther
)

const (
	flagInPods = 1 << iota
	flagLocal
)

// maxClients bounds the namespaces that are remembered, as map clients does.
const maxClients = 1 << 12

// Clients answers the programs' questions about network namespaces.
type Clients struct {
	log   *slog.Logger
	table *ebpf.Map
	ring  *ringbuf.Reader
	home  *os.File // the node's namespace, of Programs
	done  chan struct{}
	warn  sync.Once

	mu       sync.Mutex
	known    map[uint64]*Namespace // nil for others than Pods
	classify func(*Namespace) Class
}

// Clients begins to answer, once Classify was called. What an earlier process answered is forgotten, and asked again: until
// then the packet filter translates.
func (p *Programs) Clients(log *slog.Logger) (*Clients, error) {
	ring, err := ringbuf.NewReader(p.maps.Asks)
	if err != nil {
		return nil, explain("read the programs' questions", err)
	}
	c := &Clients{log: log, table: p.maps.Clients, ring: ring, home: p.home, done: make(chan struct{}), known: map[uint64]*Namespace{}}
	if err := c.forget(); err != nil {
		_ = ring.Close()
		return nil, err
	}
	go c.run()
	return c, nil
}

// Close ends the answers. What is known stays.
func (c *Clients) Close() error {
	err := c.ring.Close()
	<-c.done
	return err
}

// Classify has every namespace, also those already known, classified by f, and returns when all are.
func (c *Clients) Classify(f func(*Namespace) Class) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.classify = f
	for cookie, ns := range c.known {
		if err := c.put(cookie, ns); err != nil {
			return err
		}
	}
	return nil
}

// Looked returns how many namespaces were looked at, and how many of them are Pods'.
func (c *Clients) Looked() (all, pods int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ns := range c.known {
		if ns != nil {
			pods++
		}
	}
	return len(c.known), pods
}

// forget empties the map.
func (c *Clients) forget() error {
	var cookies []uint64
	var k uint64
	var v programClient
	it := c.table.Iterate()
	for it.Next(&k, &v) {
		cookies = append(cookies, k)
	}
	if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return problem("read clients", err)
	}
	for _, k := range cookies {
		if err := gone(c.table.Delete(k)); err != nil {
			return problem("forget a client", err)
		}
	}
	clear(c.known)
	return nil
}

func (c *Clients) run() {
	defer close(c.done)
	for {
		r, err := c.ring.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		}
		if err != nil || len(r.RawSample) < 12 {
			continue
		}
		c.answer(native.Uint64(r.RawSample), int(native.Uint32(r.RawSample[8:])))
	}
}

// answer tells the programs what namespace a thread has.
func (c *Clients) answer(cookie uint64, thread int) {
	ns, err := c.look(cookie, thread)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		_ = c.table.Delete(cookie) // asked again by the next connection
		c.warn.Do(func() {
			c.log.Warn("cannot look at the network namespace of a client; its connections stay with the packet filter "+
				"(in a container: run it in the machine's PID namespace)", "thread", thread, "err", err)
		})
		return
	}
	if len(c.known) >= maxClients {
		if err := c.forget(); err != nil {
			c.log.Warn("cannot forget the namespaces of clients", "err", err)
		}
	}
	c.known[cookie] = ns
	if err := c.put(cookie, ns); err != nil {
		c.log.Warn("cannot tell the programs of connect-time of a client; its connections stay with the packet filter", "err", err)
	}
}

// put writes what is known of a namespace. c.mu is held.
func (c *Clients) put(cookie uint64, ns *Namespace) error {
	v := programClient{State: stateOther}
	switch {
	case ns != nil && c.classify == nil:
		return nil // Classify will
	case ns != nil:
		class := c.classify(ns)
		v.State = statePod
		for f := range v.Flags {
			if class.InPods[f] {
				v.Flags[f] |= flagInPods
			}
			if class.Local[f] {
				v.Flags[f] |= flagLocal
			}
		}
		for _, a := range ns.Addrs {
			if a.Is4() {
				v.Addr[0] = as16(a)
			} else {
				v.Addr[1] = as16(a)
			}
		}
	}
	return problem("write a client", c.table.Put(cookie, &v))
}

// look returns what the namespace of a thread is, nil if it is no Pod's of this node: if its packets may
// not come through the node's packet filter.
func (c *Clients) look(cookie uint64, thread int) (*Namespace, error) {
	return namespaceIf(c.home, thread, func() error {
		is, err := Cookie()
		if err == nil && is != cookie {
			err = errors.New("the thread has ended, or is in another namespace than its socket")
		}
		return err
	})
}

// namespaceOf is look for a process, and the node whose network namespace is home.
func namespaceOf(home *os.File, pid int) (*Namespace, error) {
	return namespaceIf(home, pid, func() error { return nil })
}

// namespaceIf returns what the namespace of a thread is, after check was called in it.
func namespaceIf(home *os.File, thread int, check func() error) (ns *Namespace, err error) {
	var peer int
	err = netns.Do(netns.Of(thread), func() error {
		if err := check(); err != nil {
			return err
		}
		ns, peer, err = inside(home)
		return err
	})
	if err != nil || ns == nil {
		return nil, err
	}
	err = netns.Do(fmt.Sprintf("/proc/self/fd/%d", home.Fd()), func() error {
		ns.From, err = origin(peer)
		return err
	})
	if err != nil || ns.From == "" {
		return nil, err
	}
	return ns, nil
}

// inside looks at the namespace of the calling thread, and returns the index of the interface that its packets come from.
func inside(node *os.File) (*Namespace, int, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, 0, fmt.Errorf("list interfaces: %w", err)
	}
	up := slices.DeleteFunc(links, func(l netlink.Link) bool {
		a := l.Attrs()
		return a.RawFlags&unix.IFF_UP == 0 || a.RawFlags&unix.IFF_LOOPBACK != 0
	})
	home, err := netlink.GetNetNsIdByFd(int(node.Fd()))
	if err != nil {
		return nil, 0, fmt.Errorf("look for the node's namespace: %w", err)
	}
	if len(up) != 1 || up[0].Type() != "veth" || home < 0 || up[0].Attrs().NetNsID != home {
		return nil, 0, nil
	}
	ns := &Namespace{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		addrs, err := netlink.AddrList(up[0], family)
		if err != nil {
			return nil, 0, fmt.Errorf("list addresses: %w", err)
		}
		n := 0
		for _, a := range addrs {
			ip, _ := netip.AddrFromSlice(a.IP)
			if ip = ip.Unmap(); ip.IsLinkLocalUnicast() {
				continue
			}
			ns.Addrs = append(ns.Addrs, ip)
			n++
		}
		if n > 1 {
			return nil, 0, nil
		}
	}
	return ns, up[0].Attrs().ParentIndex, nil
}

// origin returns the interface that packets of the veth end with an index come from: itself, or the bridge that it is a
// port of; empty for what is neither.
func origin(index int) (string, error) {
	l, err := netlink.LinkByIndex(index)
	if err != nil {
		return "", fmt.Errorf("find the interface of a namespace: %w", err)
	}
	if l.Type() != "veth" {
		return "", nil
	}
	if l.Attrs().MasterIndex == 0 {
		return l.Attrs().Name, nil
	}
	master, err := netlink.LinkByIndex(l.Attrs().MasterIndex)
	if err != nil {
		return "", fmt.Errorf("find the bridge of %s: %w", l.Attrs().Name, err)
	}
	if master.Type() != "bridge" {
		return "", nil
	}
	return master.Attrs().Name, nil
}
