package v1

import (
	"math"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// How a speaker announces addresses, beside by BGP to the BGPPeers of its node.
const (
	AnnounceARP  = "arp"  // by ARP and NDP
	AnnounceBGP  = "bgp"  // in no other way
	AnnounceNone = "none" // not at all, and not by BGP either
)

// Speaker is what announces addresses on one node, and is named after it. It is
// written by the speaker and by no other program.
type Speaker struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Status SpeakerStatus `json:"status,omitempty"`
}

// SpeakerList is a list of Speakers.
type SpeakerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []Speaker `json:"items"`
}

// MaxAnnounced bounds SpeakerStatus.Addresses: an object of the API server has a bounded size, and
// the rest of the status must be writable however many addresses there are.
const MaxAnnounced = 1000

// SpeakerAddressConflict is the condition of a Speaker that hears a machine outside of the cluster answer for addresses
// of the cluster's load balancers. There is none in good times.
const SpeakerAddressConflict = "AddressConflict"

// MaxNetworks bounds SpeakerStatus.Networks and Interfaces.
const MaxNetworks = 1024

// SpeakerStatus is what a speaker is and does.
type SpeakerStatus struct {
	// Eligible reports whether the node may announce addresses, and Reason why not.
	Eligible bool   `json:"eligible"`
	Reason   string `json:"reason,omitempty"`
	// Announce is how the speaker announces: AnnounceARP, AnnounceBGP or AnnounceNone.
	// Builds that do not report it may not report Interfaces either.
	Announce string `json:"announce,omitempty"`
	// ReturnBy is until when a speaker that has ended to be restarted promises to be back. Until then the others keep its
	// addresses for it, and its next process begins with Addresses. Later it announces nothing, whatever Addresses has.
	ReturnBy *metav1.MicroTime `json:"returnBy,omitempty"`
	// Endpoints are where other speakers reach this one, as ip:port, UDP.
	Endpoints []string `json:"endpoints,omitempty"`
	// Networks are the networks of the node's interfaces, as CIDRs.
	Networks []string `json:"networks,omitempty"`
	// Interfaces answer ARP and NDP for the speaker, MaxNetworks of them at most; there are
	// none if it only announces by BGP. AnyNetwork means that they answer for addresses of
	// every network.
	Interfaces []string `json:"interfaces,omitempty"`
	AnyNetwork bool     `json:"anyNetwork,omitempty"`
	// VoterVersion is the version of the list of voters that the speaker uses.
	VoterVersion int64 `json:"voterVersion,omitempty"`
	// VoterList is the list of that version as JSON, from which a lost list is restored.
	VoterList string `json:"voterList,omitempty"`
	// Addresses are the announced addresses, MaxAnnounced of them at most. AddressCount is
	// how many are announced.
	Addresses    []AnnouncedAddress `json:"addresses,omitempty"`
	AddressCount int32              `json:"addressCount,omitempty"`
	// Peers are the sessions with BGPPeers.
	Peers []PeerStatus `json:"peers,omitempty"`
	// Absent are the endpoints that get no new clients from this node in the proxied way, MaxAbsent of them at most.
	Absent []AbsentEndpoint `json:"absent,omitempty"`
	// NoMesh is why the node does not serve routes that name Services as their parents: its clients of these
	// reach the Services' own endpoints. It is empty if the node serves them, or there are none.
	NoMesh string `json:"noMesh,omitempty"`
	// Gateways are what the node serves of Gateways; nil before it knows, and of builds that do not report it.
	Gateways *ServedGateways `json:"gateways,omitempty"`
	// Conditions are for what is wrong.
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// MaxGateways bounds ServedGateways.Served.
const MaxGateways = 1000

// ServedGateways are the Gateways that a node serves.
type ServedGateways struct {
	// Served has MaxGateways items at most, sorted by their names. More is true if there are more.
	Served []ServedGateway `json:"served,omitempty"`
	More   bool            `json:"more,omitempty"`
}

// ServedGateway is a Gateway that a node serves.
type ServedGateway struct {
	// Name is NAMESPACE/NAME, and Version what watch.State.Versions has for the listeners that accept connections.
	Name    string `json:"name"`
	Version string `json:"version"`
	// Addresses are where they do so, and Announced the ones that this node announces.
	Addresses []string `json:"addresses,omitempty"`
	Announced []string `json:"announced,omitempty"`
}

// Equal reports whether both are the same.
func (g *ServedGateways) Equal(o *ServedGateways) bool {
	if g == nil || o == nil {
		return g == o
	}
	return g.More == o.More && slices.EqualFunc(g.Served, o.Served, func(a, b ServedGateway) bool {
		return a.Name == b.Name && a.Version == b.Version && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.Announced, b.Announced)
	})
}

// MaxAbsent bounds SpeakerStatus.Absent.
const MaxAbsent = 256

// AbsentEndpoint is an endpoint of a Service that gets no new clients.
type AbsentEndpoint struct {
	// Service is NAMESPACE/NAME, and Endpoint an address with a port.
	Service  string `json:"service"`
	Endpoint string `json:"endpoint"`
	// Pod is the name of the Pod, if it is one.
	Pod string `json:"pod,omitempty"`
	// Since is when that began, and Reason why it is so.
	Since  metav1.Time `json:"since"`
	Reason string      `json:"reason"`
}

// AnnouncedAddress is an address that a speaker announces.
type AnnouncedAddress struct {
	Address string `json:"address"`
	// Via is how: "arp", "ndp" or "bgp".
	Via string `json:"via"`
	// Interface is where, unless Via is "bgp".
	Interface string `json:"interface,omitempty"`
	// Since is when the speaker has begun, and Reason why.
	Since  metav1.MicroTime `json:"since"`
	Reason string           `json:"reason,omitempty"`
}

// PeerEstablished is the PeerStatus.State of a session that routes go over.
const PeerEstablished = "Established"

// PeerStatus is a session with a BGPPeer.
type PeerStatus struct {
	// Name is the BGPPeer's.
	Name    string `json:"name"`
	Address string `json:"address"`
	// State is that of RFC 4271, section 8.2.2: Idle, Connect, Active, OpenSent,
	// OpenConfirm or Established.
	State string `json:"state"`
	// Since is when State was entered, and Reason why the last session ended.
	Since  metav1.MicroTime `json:"since"`
	Reason string           `json:"reason,omitempty"`
	// BFD is the state of the BFD session beside an established one, or why there is none. Empty if none is wanted.
	BFD string `json:"bfd,omitempty"`
	// Prefixes is the number of routes announced to the peer.
	Prefixes int32 `json:"prefixes"`
}

// Bound removes the items of a status that the API server would reject, and sets AddressCount.
func (s *SpeakerStatus) Bound() {
	s.AddressCount = int32(min(len(s.Addresses), math.MaxInt32))
	s.Addresses = s.Addresses[:min(len(s.Addresses), MaxAnnounced)]
	s.Networks = s.Networks[:min(len(s.Networks), MaxNetworks)]
	s.Absent = s.Absent[:min(len(s.Absent), MaxAbsent)]
}
