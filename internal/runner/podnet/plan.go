package podnet

import (
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/svc"
)

// plan is the desired state of the kernel. Targets read it in the order of Network.apply, and add to the last fields.
type plan struct {
	own    nodeFacts
	others []nodeFacts
	synced bool // others is complete
	// gateways are the node's own addresses among its Pods.
	gateways []netip.Addr

	direct   []link.Route // to neighbours, and for the node's own range
	peers    []link.Peer  // nodes that the carrier leads to
	carried  []link.Route // by the carrier
	problems map[string]string
}

// nodeFacts is what the network needs of a Node.
type nodeFacts struct {
	name  string
	uid   types.UID
	since time.Time // its creation
	cidrs []netip.Prefix
	ips   []netip.Addr
	key   link.Key // its public key for WireGuard, if it has one
}

func factsOf(n *corev1.Node) nodeFacts {
	f := nodeFacts{name: n.Name, uid: n.UID, since: n.CreationTimestamp.Time}
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR}
	}
	for _, c := range cidrs {
		if p, err := netip.ParsePrefix(c); err == nil && (p.Addr().Is4() || link.HasIPv6()) {
			f.cidrs = append(f.cidrs, p.Masked())
		}
	}
	if key, err := link.ParseKey(n.Annotations[svc.PublicKeyAnnotation]); err == nil {
		f.key = key
	}
	for _, a := range n.Status.Addresses {
		if a.Type != corev1.NodeInternalIP {
			continue
		}
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			f.ips = append(f.ips, ip.Unmap())
		}
	}
	return f
}

func (f nodeFacts) equal(o nodeFacts) bool {
	return f.uid == o.uid && f.key == o.key && slices.Equal(f.cidrs, o.cidrs) && slices.Equal(f.ips, o.ips)
}
