package explain

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Facts are what one node reports about the service ports of a question. Its JSON form goes from an
// agent to the command: fields are only ever added.
type Facts struct {
	Node string `json:"node"`
	Mode string `json:"mode,omitempty"`
	// Problem is why the node reported nothing; the rest is then what its table must be by the objects.
	Problem string `json:"problem,omitempty"`

	// The settings of the Table.
	NodePortAddrs []netip.Addr   `json:"nodePortAddrs,omitempty"`
	ClusterCIDRs  []netip.Prefix `json:"clusterCIDRs,omitempty"`
	LocalCIDRs    []netip.Prefix `json:"localCIDRs,omitempty"`
	ServiceCIDRs  []netip.Prefix `json:"serviceCIDRs,omitempty"`
	MasqueradeAll bool           `json:"masqueradeAll,omitempty"`
	// Addresses are the machine's.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// Unreached are the names of the nodes that this one does not reach (docs/design/019-broken-paths.md).
	Unreached []string `json:"unreached,omitempty"`

	Ports  []Port  `json:"ports,omitempty"`
	Probes []Probe `json:"probes,omitempty"`
	// Routes are to the endpoints, some of many.
	Routes []Route `json:"routes,omitempty"`
	// Tracked is nil if it was not read.
	Tracked *Tracked `json:"tracked,omitempty"`
	// Problems are of the Service, as table.Problem has them.
	Problems []string `json:"problems,omitempty"`
	// Uncovered is nil if connect-time is off, or on for all Pods.
	Uncovered *Uncovered `json:"uncovered,omitempty"`
}

// Uncovered are Pods of the node whose connections connect-time leaves to the rules of the mode: their processes are outside of
// its control group.
type Uncovered struct {
	// Addresses are the Pods' addresses.
	Addresses []netip.Addr `json:"addresses"`
	// Text names the control groups, Remedy what to do.
	Text   string `json:"text"`
	Remedy string `json:"remedy"`
}

// of reports whether a client is, or may be, one of the Pods.
func (u *Uncovered) of(c *Client) bool {
	if c.Host {
		return false
	}
	return len(c.Addrs) == 0 || slices.ContainsFunc(c.Addrs, func(a netip.Addr) bool { return slices.Contains(u.Addresses, a) })
}

// Port is one service port of the node's Table.
type Port struct {
	*table.ServicePort
	// Rejected is why the mode could not write the port, empty if it did.
	Rejected string `json:"rejected,omitempty"`
	// Installed has the installed state of each frontend, in their order; empty if the mode cannot read
	// it back.
	Installed []dataplane.Installed `json:"installed,omitempty"`
	// Counts are the packets that were refused and dropped, by frontend.
	Counts []dataplane.DropCount `json:"counts,omitempty"`
}

// Probe is what became of one connection from the node to an endpoint.
type Probe struct {
	Endpoint netip.AddrPort `json:"endpoint"`
	Result   Result         `json:"result"`
	// Error is the error of a connection that failed.
	Error string `json:"error,omitempty"`
}

// Result is how a probe ended.
type Result string

// The results.
const (
	Connected  Result = "connected"
	NotOpen    Result = "refused"
	Unroutable Result = "no route"
	NoReply    Result = "timeout"
)

// SettingsFrom takes the settings of a Table.
func (f *Facts) SettingsFrom(t *table.Table) {
	f.NodePortAddrs, f.ClusterCIDRs, f.LocalCIDRs, f.ServiceCIDRs = t.NodePortAddrs, t.ClusterCIDRs, t.LocalCIDRs, t.ServiceCIDRs
	f.MasqueradeAll = t.MasqueradeAll
}

// Choose returns the ports of a Table that a question is about: all of a Service, or the one with a
// frontend at an address. A protocol of 0 is any.
func Choose(t *table.Table, service svc.Name, at netip.AddrPort, proto svc.Protocol) []*table.ServicePort {
	var out []*table.ServicePort
	for p := range t.All() {
		if service != (svc.Name{}) && p.ID.Name == service {
			out = append(out, p)
			continue
		}
		if at.IsValid() && (proto == 0 || proto == p.Protocol) && slices.ContainsFunc(p.Frontends, func(f table.Frontend) bool {
			return isAt(&f, at, t.NodePortAddrs)
		}) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *table.ServicePort) int {
		if c := a.ID.Compare(b.ID); c != 0 {
			return c
		}
		return int(a.Family) - int(b.Family)
	})
	return out
}

// isAt reports whether packets to an address are for a frontend.
func isAt(f *table.Frontend, at netip.AddrPort, nodePortAddrs []netip.Addr) bool {
	if f.Kind != table.NodePort {
		return f.Addr == at
	}
	return f.Addr.Port() == at.Port() && f.Addr.Addr().Is4() == at.Addr().Is4() && slices.Contains(nodePortAddrs, at.Addr())
}

// inside reports whether a client is on this node, as the kernel finds out for a frontend of an address: it is the node
// itself, or its address is in the ranges of the node's Pods.
func (f *Facts) inside(c *Client, at netip.Addr) bool {
	if c.Host {
		return c.Node == f.Node
	}
	a := c.Addr(at)
	return a.IsValid() && (slices.Contains(f.Addresses, a) ||
		slices.ContainsFunc(f.LocalCIDRs, func(p netip.Prefix) bool { return p.Contains(a) }))
}

func (f *Facts) probe(a netip.AddrPort) (Probe, bool) {
	i := slices.IndexFunc(f.Probes, func(p Probe) bool { return p.Endpoint == a })
	if i < 0 {
		return Probe{}, false
	}
	return f.Probes[i], true
}
