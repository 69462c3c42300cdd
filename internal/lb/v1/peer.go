package v1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BGPPeer is a router that speakers announce addresses to. The state of its sessions
// is in the status of the Speakers.
type BGPPeer struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec BGPPeerSpec `json:"spec"`
}

// BGPPeerList is a list of BGPPeers.
type BGPPeerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []BGPPeer `json:"items"`
}

// BGPPeerSpec is written by users.
type BGPPeerSpec struct {
	// Address is the router's, of either family.
	Address string `json:"address"`
	// Port is 179 by default.
	Port int32 `json:"port,omitempty"`
	// LocalASN and PeerASN are 1 to 4294967295.
	LocalASN int64 `json:"localASN"`
	PeerASN  int64 `json:"peerASN"`
	// PasswordSecretRef names a Secret of kube-system whose key "password" is the TCP MD5
	// password of the session (RFC 2385). fairlead's own API server lets nodes only read
	// Secrets whose name begins with "fairlead-bgp-".
	PasswordSecretRef *SecretReference `json:"passwordSecretRef,omitempty"`
	// HoldTime is 90s by default, at least 3s (RFC 4271, section 4.2), and
	// KeepaliveTime a third of it.
	HoldTime      *metav1.Duration `json:"holdTime,omitempty"`
	KeepaliveTime *metav1.Duration `json:"keepaliveTime,omitempty"`
	// GracefulRestart lets the router keep the routes for RestartTime, 120s by default,
	// while the speaker restarts (RFC 4724).
	GracefulRestart bool             `json:"gracefulRestart,omitempty"`
	RestartTime     *metav1.Duration `json:"restartTime,omitempty"`
	// BFD begins a BFD session beside the one of BGP (RFC 5880): the session of BGP ends when the router is not heard any more.
	BFD *BFDSpec `json:"bfd,omitempty"`
	// EBGPMultihop is the TTL of packets to a router of another AS that is not on the
	// nodes' own network: 2 to 255. Zero or 1 is a router on that network.
	EBGPMultihop int32 `json:"ebgpMultihop,omitempty"`
	// NodeSelector restricts the peer to nodes with these labels.
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`
	// SourceAddress is the node's address of the session. It is seldom of use in a peer of
	// more than one node.
	SourceAddress string `json:"sourceAddress,omitempty"`
}

// BFDSpec are the times of a BFD session.
type BFDSpec struct {
	// TransmitInterval is how often a packet is sent and ReceiveInterval how often one may come, 300ms by default, 10ms to 60s. The
	// longer interval of both ends counts.
	TransmitInterval *metav1.Duration `json:"transmitInterval,omitempty"`
	ReceiveInterval  *metav1.Duration `json:"receiveInterval,omitempty"`
	// DetectMultiplier is after how many intervals without a packet an end gives the other one up: 2 to 255, 3 by default.
	DetectMultiplier int32 `json:"detectMultiplier,omitempty"`
}

// SecretReference names a Secret of kube-system.
type SecretReference struct {
	Name string `json:"name"`
}

// PasswordKey is the key of a password in its Secret.
const PasswordKey = "password"
