package table

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// node is what counts of this node: its addresses, and what on it, or what it needs, no Service and no Pod gets.
type node struct {
	clusterCIDRs []netip.Prefix
	noLoopback   bool // host ports are not at 127.0.0.1

	zone     string
	machine  []netip.Addr   // of the machine, as given
	primary  []netip.Addr   // the Node's InternalIPs, one a family at most
	podCIDRs []netip.Prefix // the Node's
	reserved reserved
}

var loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// hostPorts returns what a Pod's host ports ask for. With hostIP they have that address
// alone, which must be one of this node: a Pod gets no traffic to others.
func (n *node) hostPorts(s *service, c *complaints) (out []hostPort) {
	for _, p := range s.host.Ports {
		var at netip.Addr
		id := fmt.Sprintf("%d-%s", p.Port, strings.ToLower(p.Protocol.String()))
		if p.HostIP != "" {
			id += "-" + p.HostIP
			var why string
			if at, why = n.hostAddr(p.HostIP); why != "" {
				c.add(ReasonInvalidHostIP, "host port %d: hostIP %s %s", p.Port, p.HostIP, why)
				continue
			}
		}
		for _, ip := range s.host.IPs {
			f := svc.FamilyOf(ip)
			if at.IsValid() && svc.FamilyOf(at) != f {
				continue
			}
			h := hostPort{
				key: Key{ID: svc.PortName{Name: s.name, Port: id}, Family: f},
				to:  []Endpoint{{Addr: netip.AddrPortFrom(ip, p.To), Local: true}},
			}
			add := func(k FrontendKind, a netip.Addr) {
				h.wants = appendWant(h.wants, want{key: h.key}, k, p.Protocol, a, int32(p.Port))
			}
			h.everywhere = !at.IsValid() || at.IsUnspecified()
			switch {
			case !h.everywhere:
				add(ExternalIP, at)
			case f == svc.IPv4 && !n.noLoopback:
				add(ExternalIP, loopback4)
				fallthrough
			default:
				add(NodePort, anyAddr(f))
			}
			out = append(out, h)
		}
	}
	return out
}

// hostAddr reads a hostIP. why is what keeps a port there from leading to a Pod.
func (n *node) hostAddr(text string) (a netip.Addr, why string) {
	a, err := netip.ParseAddr(text)
	a = a.Unmap()
	switch {
	case err != nil:
		why = "is not an address"
	case a.IsLoopback() && (a.Is6() || n.noLoopback):
		why = "is a loopback address, from which nothing is led to a Pod"
		if a.Is4() {
			why += " in this mode of the proxy"
		}
	case !a.IsUnspecified() && !a.IsLoopback() && !slices.Contains(n.machine, a):
		why = "is no address of this node"
	}
	return a, why
}

// etcdPeerPort is the default port of etcd for its peers. On a machine with an API server no
// Pod gets it: a member that the others cannot reach brings the quorum nearer to its end.
const etcdPeerPort = 2380

// reservedOfHost returns who on this node has the port that a Pod wants as its host port,
// at whichever address: the agent, the API server and its store stay reachable.
func (n *node) reservedOfHost(at svc.Frontend) (reserver, bool) {
	for who := range reservers {
		for _, r := range n.reserved[who] {
			here := r.Protocol == at.Protocol && (r.Addr.Addr().IsLoopback() || slices.Contains(n.machine, r.Addr.Addr()))
			switch {
			case here && r.Addr.Port() == at.Addr.Port():
				return who, true
			case here && who != reservedAgent && at.Addr.Port() == etcdPeerPort:
				return reservedPeers, true
			}
		}
	}
	return 0, false
}

// overlap returns what of this node's surroundings a range has, "" for nothing. virtual are the cluster's IPs.
func (n *node) overlap(p netip.Prefix, virtual *vips) string {
	for _, who := range []reserver{reservedAPI, reservedServer} {
		for _, at := range n.reserved[who] {
			// A client inside of the cluster may reach its server at a ClusterIP.
			if a := at.Addr.Addr(); p.Contains(a) && virtual.owner(a) == nil {
				return fmt.Sprintf("has %s, %s", a, who)
			}
		}
	}
	for _, a := range n.primary {
		if p.Contains(a) {
			return fmt.Sprintf("has %s, an address of this node", a)
		}
	}
	for _, pods := range slices.Concat(n.clusterCIDRs, n.podCIDRs) {
		if p.Overlaps(pods) {
			return fmt.Sprintf("overlaps %s, a range of pods", pods)
		}
	}
	return ""
}
