package v1

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// IPAddressPool is a set of addresses that Services of type LoadBalancer get.
type IPAddressPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   IPAddressPoolSpec   `json:"spec"`
	Status IPAddressPoolStatus `json:"status,omitempty"`
}

// IPAddressPoolList is a list of IPAddressPools.
type IPAddressPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []IPAddressPool `json:"items"`
}

// IPAddressPoolSpec is written by users.
type IPAddressPoolSpec struct {
	// Addresses are CIDRs ("192.0.2.0/24") and first-last pairs ("192.0.2.10-192.0.2.20"),
	// of either family.
	Addresses []string `json:"addresses"`
	// AvoidBuggyIPs leaves out IPv4 addresses that end with .0 or .255, which some
	// devices drop.
	AvoidBuggyIPs bool `json:"avoidBuggyIPs,omitempty"`
	// AutoAssign, true by default, gives addresses to Services that name neither a
	// pool nor an address.
	AutoAssign *bool `json:"autoAssign,omitempty"`
	// Priority orders the pools that a Service may use: higher ones are used up first.
	Priority int32 `json:"priority,omitempty"`
	// Internal makes this a pool for internal load balancers: only Services that ask
	// for one by an annotation of a cloud get addresses of such pools.
	Internal bool `json:"internal,omitempty"`
	// Namespaces and NamespaceSelector restrict the pool to Services of the namespaces
	// that are listed or selected.
	Namespaces        []string              `json:"namespaces,omitempty"`
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	// ServiceSelector restricts the pool to Services with these labels.
	ServiceSelector *metav1.LabelSelector `json:"serviceSelector,omitempty"`
	// Interfaces are the names of the nodes' interfaces that answer ARP and NDP for the
	// pool's addresses. Without them the interfaces whose network has the
	// address answer.
	Interfaces []string `json:"interfaces,omitempty"`
	// Announce are the ways in which the pool's addresses are announced, of AnnounceARP and AnnounceBGP. Empty is both, where a
	// node can.
	Announce []string `json:"announce,omitempty"`
	// NodeSelector restricts which nodes announce the pool's addresses, by the labels of the Nodes.
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`
	// BGP is how the pool's addresses are announced by BGP.
	BGP *PoolBGP `json:"bgp,omitempty"`
}

// PoolBGP are the routes to a pool's addresses.
type PoolBGP struct {
	PoolRoute `json:",inline"`
	// Advertisements are further routes beside that one. If several make the same prefix for a peer, it gets one route with the
	// communities of all, the highest local preference and the shortest path.
	Advertisements []PoolRoute `json:"advertisements,omitempty"`
}

// MaxASPathPrepend bounds PoolRoute.ASPathPrepend.
const MaxASPathPrepend = 10

// PoolRoute is how a pool's addresses are announced to some BGP peers.
type PoolRoute struct {
	// Peers are the names of the peers that get the routes: of BGPPeers, and of peers of the command line. Empty is all.
	Peers []string `json:"peers,omitempty"`
	// Communities are standard ("64512:100"), large ("64512:1:2") or well-known
	// ("no-export", "no-advertise", "no-export-subconfed", "blackhole") ones.
	Communities []string `json:"communities,omitempty"`
	// LocalPreference goes to peers of the same AS: 0 to 4294967295.
	LocalPreference *int64 `json:"localPreference,omitempty"`
	// ASPathPrepend is how often the node's AS number is added to the path that peers of another AS get: 0 to MaxASPathPrepend.
	ASPathPrepend int32 `json:"asPathPrepend,omitempty"`
	// AggregationLengthV4 and AggregationLengthV6 are the lengths of the prefixes that
	// are announced: 32 and 128 by default, a route for each address.
	AggregationLengthV4 *int32 `json:"aggregationLengthV4,omitempty"`
	AggregationLengthV6 *int32 `json:"aggregationLengthV6,omitempty"`
}

// IPAddressPoolStatus is written by the controller. Numbers of addresses above
// MaxCount are shown as MaxCount.
type IPAddressPoolStatus struct {
	// Total, Free and Used count addresses of both families. Addresses that are never
	// given out, like the addresses of nodes, are not in Free.
	Total int64 `json:"total"`
	Free  int64 `json:"free"`
	Used  int64 `json:"used"`
	// IPv4 and IPv6 are the same for one family, if the pool has it.
	IPv4 *PoolUsage `json:"ipv4,omitempty"`
	IPv6 *PoolUsage `json:"ipv6,omitempty"`
	// ObservedGeneration is that of the spec this status is of.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions are PoolReady, PoolOverlap and PoolAnnounceable.
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PoolUsage counts the addresses of one family of a pool.
type PoolUsage struct {
	Total int64 `json:"total"`
	Free  int64 `json:"free"`
	Used  int64 `json:"used"`
}

// MaxCount is the highest number that every reader of JSON keeps exactly.
const MaxCount = 1<<53 - 1

// Conditions of an IPAddressPool.
const (
	// PoolReady is True while addresses of the pool are given out, and False with what
	// is wrong with its spec.
	PoolReady = "Ready"
	// PoolOverlap is True while some of the pool's addresses are not given out because
	// they belong to an older pool, to a node or to the ranges of Services.
	PoolOverlap = "Overlap"
	// PoolAnnounceable is True while some node can announce each of the pool's addresses, and
	// Unknown while no speaker runs.
	PoolAnnounceable = "Announceable"
)

// Takes reports whether the pool's addresses are announced in a way, AnnounceARP or AnnounceBGP.
func (s *IPAddressPoolSpec) Takes(way string) bool {
	return len(s.Announce) == 0 || slices.Contains(s.Announce, way)
}

// Routes returns the routes of the pool's addresses, at least one.
func (s *IPAddressPoolSpec) Routes() []PoolRoute {
	if s.BGP == nil {
		return []PoolRoute{{}}
	}
	return append([]PoolRoute{s.BGP.PoolRoute}, s.BGP.Advertisements...)
}

// RoutesTo returns the names of the peers that get routes to the pool's addresses, sorted; all is true if every peer does.
func (s *IPAddressPoolSpec) RoutesTo() (peers []string, all bool) {
	for _, r := range s.Routes() {
		if len(r.Peers) == 0 {
			return nil, true
		}
		peers = append(peers, r.Peers...)
	}
	slices.Sort(peers)
	return slices.Compact(peers), false
}

// IsAutoAssign returns AutoAssign with its default.
func (s *IPAddressPoolSpec) IsAutoAssign() bool { return s.AutoAssign == nil || *s.AutoAssign }
