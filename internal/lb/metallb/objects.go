package metallb

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
)

// The kinds of MetalLB that are configuration.
const (
	kindPool      = "IPAddressPool"
	kindL2        = "L2Advertisement"
	kindBGP       = "BGPAdvertisement"
	kindPeer      = "BGPPeer"
	kindProfile   = "BFDProfile"
	kindCommunity = "Community"
)

const group = "metallb.io/"

// object is an object of MetalLB. What is in its status is not of interest.
type object[S any] struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              S               `json:"spec"`
	Status            json.RawMessage `json:"status,omitempty"`
}

type poolSpec struct {
	Addresses     []string    `json:"addresses"`
	AutoAssign    *bool       `json:"autoAssign"`
	AvoidBuggyIPs bool        `json:"avoidBuggyIPs"`
	AllocateTo    *allocation `json:"serviceAllocation"`
}

type allocation struct {
	Priority           int                    `json:"priority"`
	Namespaces         []string               `json:"namespaces"`
	NamespaceSelectors []metav1.LabelSelector `json:"namespaceSelectors"`
	ServiceSelectors   []metav1.LabelSelector `json:"serviceSelectors"`
}

// selection is the part of an advertisement with what it announces, and from where.
type selection struct {
	IPAddressPools         []string               `json:"ipAddressPools"`
	IPAddressPoolSelectors []metav1.LabelSelector `json:"ipAddressPoolSelectors"`
	NodeSelectors          []metav1.LabelSelector `json:"nodeSelectors"`
	ServiceSelectors       []metav1.LabelSelector `json:"serviceSelectors"`
}

type l2Spec struct {
	selection              `json:",inline"`
	Interfaces             []string     `json:"interfaces"`
	PreferredNodeSelectors []preference `json:"preferredNodeSelectors"`
}

// preference is a kind of node that should rather announce than others.
type preference struct {
	Weight     int32                `json:"weight"`
	Preference metav1.LabelSelector `json:"preference"`
}

type bgpSpec struct {
	selection           `json:",inline"`
	AggregationLength   *int32   `json:"aggregationLength"`
	AggregationLengthV6 *int32   `json:"aggregationLengthV6"`
	LocalPref           uint32   `json:"localPref"`
	Communities         []string `json:"communities"`
	Peers               []string `json:"peers"`
	ASPathPrepend       uint32   `json:"asPathPrepend"`
}

type peerSpec struct {
	MyASN                  uint32                 `json:"myASN"`
	PeerASN                uint32                 `json:"peerASN"`
	LocalASN               uint32                 `json:"localASN"`
	DynamicASN             string                 `json:"dynamicASN"`
	PeerAddress            string                 `json:"peerAddress"`
	Interface              string                 `json:"interface"`
	SourceAddress          string                 `json:"sourceAddress"`
	PeerPort               uint16                 `json:"peerPort"`
	HoldTime               *metav1.Duration       `json:"holdTime"`
	KeepaliveTime          *metav1.Duration       `json:"keepaliveTime"`
	ConnectTime            *metav1.Duration       `json:"connectTime"`
	RouterID               string                 `json:"routerID"`
	NodeSelectors          []metav1.LabelSelector `json:"nodeSelectors"`
	Password               string                 `json:"password"`
	PasswordSecret         secretReference        `json:"passwordSecret"`
	BFDProfile             string                 `json:"bfdProfile"`
	EnableGracefulRestart  bool                   `json:"enableGracefulRestart"`
	EBGPMultiHop           bool                   `json:"ebgpMultiHop"`
	VRF                    string                 `json:"vrf"`
	DisableMP              bool                   `json:"disableMP"`
	DualStackAddressFamily bool                   `json:"dualStackAddressFamily"`
}

type secretReference struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

type profileSpec struct {
	ReceiveInterval  *uint32 `json:"receiveInterval"`
	TransmitInterval *uint32 `json:"transmitInterval"`
	DetectMultiplier *uint32 `json:"detectMultiplier"`
	EchoInterval     *uint32 `json:"echoInterval"`
	EchoMode         *bool   `json:"echoMode"`
	PassiveMode      *bool   `json:"passiveMode"`
	MinimumTTL       *uint32 `json:"minimumTtl"`
}

type communitySpec struct {
	Communities []alias `json:"communities"`
}

type alias struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// configuration has all objects, in the order of the text.
type configuration struct {
	pools       []object[poolSpec]
	l2          []object[l2Spec]
	bgp         []object[bgpSpec]
	peers       []object[peerSpec]
	profiles    []object[profileSpec]
	communities []object[communitySpec]

	seen      map[string]bool // kind/name
	namespace string          // that of all objects
}

// MaxText is the longest text that is read.
const MaxText = 16 << 20

// read reads YAML or JSON: objects of metallb.io, and Lists of them.
func (c *converter) read(in io.Reader) error {
	limited := &io.LimitedReader{R: in, N: MaxText + 1}
	decoder := yaml.NewYAMLOrJSONDecoder(limited, 4096)
	for {
		var raw json.RawMessage
		err := decoder.Decode(&raw)
		switch {
		case limited.N <= 0:
			return fmt.Errorf("the text has more than %d MiB", MaxText>>20)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case len(raw) == 0 || string(raw) == "null":
			continue
		}
		if err := c.add(raw); err != nil {
			return err
		}
	}
}

// add adds an object, or the items of a List.
func (c *converter) add(raw json.RawMessage) error {
	var head struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return fmt.Errorf("a document is not an object of Kubernetes: %w", err)
	}
	version, ours := strings.CutPrefix(head.APIVersion, group)
	switch {
	case head.APIVersion == "v1" && head.Kind == "List", ours && strings.HasSuffix(head.Kind, "List"):
		for _, item := range head.Items {
			if err := c.add(item); err != nil {
				return err
			}
		}
		return nil
	case !ours:
		return fmt.Errorf("%s %q: want objects of metallb.io, and Lists of them", head.APIVersion, head.Kind)
	case version != "v1beta1" && (version != "v1beta2" || head.Kind != kindPeer):
		return fmt.Errorf("%s of %s%s: want v1beta1, of a BGPPeer also v1beta2", head.Kind, group, version)
	}
	switch head.Kind {
	case kindPool:
		return decode(c, raw, &c.pools)
	case kindL2:
		return decode(c, raw, &c.l2)
	case kindBGP:
		return decode(c, raw, &c.bgp)
	case kindPeer:
		return decode(c, raw, &c.peers)
	case kindProfile:
		return decode(c, raw, &c.profiles)
	case kindCommunity:
		return decode(c, raw, &c.communities)
	}
	return fmt.Errorf("%s: MetalLB v0.16 has no such configuration; want one of %s", head.Kind,
		strings.Join([]string{kindPool, kindL2, kindBGP, kindPeer, kindProfile, kindCommunity}, ", "))
}

// decode adds an object to a list. It refuses fields that are not known.
func decode[S any](c *converter, raw json.RawMessage, list *[]object[S]) error {
	var o object[S]
	wrong, err := kjson.UnmarshalStrict(raw, &o)
	if err != nil {
		var named object[json.RawMessage]
		_ = json.Unmarshal(raw, &named) // the same text was read as far as its kind
		return fmt.Errorf("%s/%s: %w", named.Kind, named.Name, err)
	}
	id := o.Kind + "/" + o.Name
	switch {
	case o.Name == "":
		return fmt.Errorf("%s: metadata.name is missing", o.Kind)
	case c.seen[id]:
		c.refuse(id, "metadata.name", "the text has two objects of this name")
	case len(c.seen) > 0 && o.Namespace != c.namespace:
		c.refuse(id, "metadata.namespace", "it is %q, and that of others is %q: MetalLB reads one namespace only", o.Namespace, c.namespace)
	default:
		c.namespace = o.Namespace
	}
	c.seen[id] = true
	for _, w := range wrong {
		c.refused = append(c.refused, id+": "+w.Error())
	}
	*list = append(*list, o)
	return nil
}

// matchesAll reports whether selectors, of which one has to match, select everything.
func matchesAll(selectors []metav1.LabelSelector) bool {
	return len(selectors) == 0 || slices.ContainsFunc(selectors, func(s metav1.LabelSelector) bool {
		return len(s.MatchLabels) == 0 && len(s.MatchExpressions) == 0
	})
}
