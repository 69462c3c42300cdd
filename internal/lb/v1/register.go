package v1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
)

// GroupVersion is the group and version of all types of this package.
var GroupVersion = schema.GroupVersion{Group: "fairlead.dev", Version: "v1"}

// Scheme knows the types of this package.
var Scheme = newScheme()

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddKnownTypes(GroupVersion,
		&IPAddressPool{}, &IPAddressPoolList{}, &BGPPeer{}, &BGPPeerList{}, &Speaker{}, &SpeakerList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return s
}

// PoolClient is a client of IPAddressPools, as typed clients of client-go are.
type PoolClient = gentype.ClientWithList[*IPAddressPool, *IPAddressPoolList]

// PeerClient is a client of BGPPeers.
type PeerClient = gentype.ClientWithList[*BGPPeer, *BGPPeerList]

// SpeakerClient is a client of Speakers.
type SpeakerClient = gentype.ClientWithList[*Speaker, *SpeakerList]

// Client is a client of the group.
type Client struct {
	Pools    *PoolClient
	Peers    *PeerClient
	Speakers *SpeakerClient
}

// NewClient returns a client for the API server of config, which is not changed. It
// speaks JSON, as custom resources do.
func NewClient(config *rest.Config) (*Client, error) {
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/apis", &GroupVersion
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.NegotiatedSerializer = serializer.NewCodecFactory(Scheme).WithoutConversion()
	c, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, err
	}
	codec := runtime.NewParameterCodec(Scheme)
	return &Client{
		Pools: gentype.NewClientWithList("ipaddresspools", c, codec, "",
			func() *IPAddressPool { return &IPAddressPool{} }, func() *IPAddressPoolList { return &IPAddressPoolList{} }),
		Peers: gentype.NewClientWithList("bgppeers", c, codec, "",
			func() *BGPPeer { return &BGPPeer{} }, func() *BGPPeerList { return &BGPPeerList{} }),
		Speakers: gentype.NewClientWithList("speakers", c, codec, "",
			func() *Speaker { return &Speaker{} }, func() *SpeakerList { return &SpeakerList{} }),
	}, nil
}
