package explain

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/table"
)

// Cluster is what a node's Table depends on beside its objects.
type Cluster struct {
	PodCIDRs, ServiceCIDRs []netip.Prefix
}

// Build returns the Table that a node must have by the objects, with the defaults of all flags that the objects do
// not tell.
func Build(c *Cluster, name string, node *corev1.Node, services []*corev1.Service, slices []*discoveryv1.EndpointSlice) *table.Table {
	b := table.NewBuilder(table.Config{NodeName: name, ClusterCIDRs: c.PodCIDRs})
	b.SetServiceCIDRs(c.ServiceCIDRs)
	if node != nil {
		b.SetNode(node)
		b.SetAddresses(NodeAddresses(node))
	}
	for _, s := range services {
		b.SetService(s)
	}
	for _, s := range slices {
		b.SetSlice(s)
	}
	t, _ := b.Build()
	return t
}

// NodeAddresses are the internal addresses of a Node.
func NodeAddresses(n *corev1.Node) []netip.Addr {
	var out []netip.Addr
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			out = append(out, ip.Unmap())
		}
	}
	return out
}

// Assumed are the Facts of a node that reports none, by its Table as Build makes it.
func Assumed(name, problem string, t *table.Table, ports []*table.ServicePort) *Facts {
	out := &Facts{Node: name, Problem: problem}
	out.SettingsFrom(t)
	out.Addresses = t.NodePortAddrs
	for _, p := range ports {
		out.Ports = append(out.Ports, Port{ServicePort: p})
	}
	return out
}
