package kubeproxy

import (
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/recent"
	"github.com/fairlead/fairlead/internal/svc"
)

// setPrefix begins the names of the sets with the clients of an endpoint, in mode nftables.
const setPrefix = "affinity-"

// maxName is NameLengthMax of sigs.k8s.io/knftables without kube-proxy's longest prefix.
const maxName = 256 - 16

// Memory is where a kube-proxy of mode nftables or iptables remembers the endpoints of clients with session affinity. It works in
// the network namespace of the thread that opened it, and one goroutine uses it.
type Memory struct {
	conn  *nftables.Conn
	sets  map[nftables.Table]map[string]bool
	lists *recent.Lists
}

// OpenMemory opens the sets and lists of kube-proxy. The Memory is empty if no kube-proxy has left rules. Its cost grows with the number
// of sets, which only Services with session affinity have, and not with the number of rules.
func OpenMemory() (*Memory, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	m := &Memory{conn: c, sets: map[nftables.Table]map[string]bool{}}
	for _, in := range families {
		t := nftables.Table{Family: in, Name: tableName}
		_, there, err := c.Table(t)
		var sets []nftables.StoredSet
		if there && err == nil {
			sets, err = c.Sets(t)
		}
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		if !there {
			continue
		}
		m.sets[t] = map[string]bool{}
		for i := range sets {
			m.sets[t][sets[i].Name] = true
		}
	}
	if m.lists, err = recent.Open(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return m, nil
}

// Empty reports whether there is neither a table of kube-proxy nor a directory of lists.
func (m *Memory) Empty() bool { return len(m.sets) == 0 && m.lists.None() }

// Close releases what OpenMemory has opened.
func (m *Memory) Close() error {
	return errors.Join(m.lists.Close(), m.conn.Close())
}

// Clients returns the clients that kube-proxy keeps at an endpoint of a port, each with when it came last: a number that is higher
// for a later time, and 0 for all in mode nftables. A client is in the lists of mode iptables also after its time; the list of the
// endpoint that it came to last counts.
func (m *Memory) Clients(id svc.PortName, p svc.Protocol, at netip.AddrPort) (map[netip.Addr]uint64, error) {
	out := map[netip.Addr]uint64{}
	if t, name := setOf(id, p, at); m.sets[t][name] {
		var found []netip.Addr
		if err := m.conn.Elems(t, name, func() { found = nil }, func(e nftables.Elem) {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				found = append(found, a)
			}
		}); err != nil {
			return nil, fmt.Errorf("set %s of table %s: %w", name, t, err)
		}
		for _, a := range found {
			out[a] = 0
		}
	}
	listed, err := m.lists.Addrs(chainOf(id, p, at))
	maps.Copy(out, listed)
	return out, err
}

// Keep has kube-proxy keep a client at an endpoint of a port. Where it knows no such endpoint, or keeps the client already, nothing
// happens. A list of mode iptables has room for 100 clients, unless the module has another ip_list_tot.
func (m *Memory) Keep(id svc.PortName, p svc.Protocol, at netip.AddrPort, client netip.Addr) error {
	if t, name := setOf(id, p, at); m.sets[t][name] {
		b := nftables.NewBatch()
		b.AddElem(t, name, &nftables.Elem{Key: client.AsSlice()})
		if err := m.conn.Commit(b); err != nil && !nftables.IsConflict(err) {
			return fmt.Errorf("set %s of table %s: %w", name, t, err)
		}
	}
	return m.lists.Add(chainOf(id, p, at), client)
}

// setOf is the set with the clients of an endpoint: servicePortEndpointChainNameBase of kube-proxy's pkg/proxy/nftables/proxier.go.
func setOf(id svc.PortName, p svc.Protocol, at netip.AddrPort) (nftables.Table, string) {
	ip := strings.ReplaceAll(at.Addr().String(), ":", ".")
	name := fmt.Sprintf("%s/%s/%s/%s__%s/%d", id.Namespace, id.Name.Name, strings.ToLower(p.String()), id.Port, ip, at.Port())
	if name = hash(name)[:8] + "-" + name; len(name) > maxName {
		name = name[:maxName-3] + "..."
	}
	return nftables.Table{Family: nftables.FamilyOf(svc.FamilyOf(at.Addr())), Name: tableName}, setPrefix + name
}

// chainOf is the chain of an endpoint in mode iptables, and the list of its clients: servicePortEndpointChainName of
// pkg/proxy/iptables/proxier.go.
func chainOf(id svc.PortName, p svc.Protocol, at netip.AddrPort) string {
	return "KUBE-SEP-" + hash(id.String() + strings.ToLower(p.String()) + at.String())[:16]
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:])
}
