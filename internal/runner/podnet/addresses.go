package podnet

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"sync"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// addresses allocates addresses of the node's ranges to pods. It goes round each
// range, so that an address is not reused before all others were: a late packet
// to a pod that has ended reaches no other pod.
type addresses struct {
	mu     sync.Mutex
	ranges []netip.Prefix
	last   map[netip.Prefix]netip.Addr
	used   map[netip.Addr]bool
}

func newAddresses() *addresses {
	return &addresses{last: map[netip.Prefix]netip.Addr{}, used: map[netip.Addr]bool{}}
}

// setRanges sets the node's ranges and returns its gateways. Addresses allocated before stay allocated.
func (m *addresses) setRanges(ranges []netip.Prefix) (gateways []netip.Addr) {
	m.mu.Lock()
	m.ranges = nil
	for _, r := range ranges {
		m.ranges = append(m.ranges, r.Masked())
	}
	m.mu.Unlock()
	return m.gateways()
}

// gateways are the node's own addresses: the first of each range.
func (m *addresses) gateways() []netip.Addr {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []netip.Addr
	for _, r := range m.ranges {
		out = append(out, r.Addr().Next())
	}
	return out
}

// allocate returns an address of each range.
func (m *addresses) allocate() ([]netip.Addr, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []netip.Addr
	for _, r := range m.ranges {
		a, err := m.next(r)
		if err != nil {
			for _, a := range out {
				delete(m.used, a)
			}
			return nil, err
		}
		m.used[a], m.last[r] = true, a
		out = append(out, a)
	}
	return out, nil
}

// next finds a free address after the last one allocated. Its work is bounded
// by the number of used addresses.
func (m *addresses) next(r netip.Prefix) (netip.Addr, error) {
	a := m.last[r]
	for range len(m.used) + 4 {
		if a = advance(r, a); r.Contains(a) && !m.used[a] {
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("no address is left in %s: %d are in use on this node", r, len(m.used))
}

// advance is the usable address after a: not the network's, not the gateway's
// (the first), not the broadcast address of an IPv4 range.
func advance(r netip.Prefix, a netip.Addr) netip.Addr {
	first := r.Addr().Next().Next()
	if !a.IsValid() || !r.Contains(a) {
		return first
	}
	a = a.Next()
	if !r.Contains(a) || (a.Is4() && !r.Contains(a.Next())) {
		return first
	}
	return a
}

// reserve marks the addresses of an adopted pod as used.
func (m *addresses) reserve(addrs []netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range addrs {
		m.used[a] = true
		for _, r := range m.ranges {
			if r.Contains(a) && m.last[r].Less(a) {
				m.last[r] = a
			}
		}
	}
}

// release frees addresses.
func (m *addresses) release(addrs []netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range addrs {
		delete(m.used, a)
	}
}

// lastAddresses returns the last address allocated of each range, for the next
// run of the agent.
func (m *addresses) lastAddresses() map[netip.Prefix]netip.Addr {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.last)
}

// setLastAddresses takes over what lastAddresses returned in an earlier run.
func (m *addresses) setLastAddresses(last map[netip.Prefix]netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, v := range last {
		if k.Contains(v) {
			m.last[k.Masked()] = v
		}
	}
}

// Allocate returns a new address for a Pod of each range of the node.
func (n *Network) Allocate() ([]netip.Addr, error) {
	ips, err := n.addresses.allocate()
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(n.addresses.lastAddresses())
	if err == nil {
		err = fileio.Replace(n.addressesFile(), b, 0o600)
	}
	if err != nil {
		n.o.Log.Warn("cannot record the last addresses of pods; they may be reused early after a restart", "err", err)
	}
	return ips, nil
}

// Reserve marks the addresses of an adopted Pod as used, by it alone. It has no device if it has the node's network.
func (n *Network) Reserve(device, pod string, ips []netip.Addr) {
	n.addresses.reserve(ips)
	if device != "" && len(ips) > 0 {
		n.Sources.adopt(device, pod, ips)
	}
}

// Release frees the addresses of a Pod.
func (n *Network) Release(ips []netip.Addr) { n.addresses.release(ips) }

// LoadLast takes over the last addresses of an earlier run.
func (n *Network) LoadLast() error {
	b, err := os.ReadFile(n.addressesFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	last := map[netip.Prefix]netip.Addr{}
	if err == nil {
		err = json.Unmarshal(b, &last)
	}
	if err == nil {
		n.addresses.setLastAddresses(last)
	}
	return err
}

func (n *Network) addressesFile() string { return filepath.Join(n.o.StateDir, "addresses.json") }
