package metallb

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/bfd"
	"github.com/fairlead/fairlead/internal/lb/bgp"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// multihopTTL is the TTL that FRR, MetalLB's default, gives to packets of a multihop session.
const multihopTTL = 255

// passwordPrefix begins the names of Secrets with the passwords of peers.
const passwordPrefix = "fairlead-bgp-"

// convertPeers converts the peers, to which pools are announced or not.
func (c *converter) convertPeers(announced bool) {
	used := map[string]bool{}
	for i := range c.peers {
		p := &c.peers[i]
		used[p.Spec.BFDProfile] = true
		if !announced {
			c.refuse(id(p), "", "no pool is announced by BGP, so MetalLB tells this router nothing: "+
				"leave the peer out, or add a BGPAdvertisement")
			continue
		}
		c.refusePeerFields(p)
		c.convertPeer(p)
	}
	for i := range c.profiles {
		if p := &c.profiles[i]; !used[p.Name] {
			c.note(id(p), "spec", "no BGPPeer uses it: it is left out")
		}
	}
}

// refusePeerFields refuses and notes what has no counterpart.
func (c *converter) refusePeerFields(p *object[peerSpec]) {
	s := &p.Spec
	refuse := func(set bool, path, why string) {
		if set {
			c.refuse(id(p), "spec."+path, "%s", why)
		}
	}
	refuse(s.LocalASN != 0, "localASN", "fairlead has one AS number for each peer: write it as myASN")
	refuse(s.DynamicASN == "external", "dynamicASN", "fairlead needs the router's AS number: write it as peerASN")
	refuse(s.DynamicASN != "" && s.DynamicASN != "internal" && s.DynamicASN != "external", "dynamicASN", "want internal or external")
	refuse(s.DynamicASN != "" && s.PeerASN != 0, "dynamicASN", "it excludes peerASN")
	refuse(s.Interface != "", "interface", "fairlead has no unnumbered sessions: give the router's address as peerAddress")
	refuse(s.VRF != "", "vrf", "fairlead connects from the node's main routing table")
	refuse(s.DisableMP, "disableMP", "fairlead announces both families to a router that takes both")
	if s.ConnectTime != nil {
		c.note(id(p), "spec.connectTime", "it has no effect: fairlead chooses when it connects again")
	}
	if s.RouterID != "" {
		c.note(id(p), "spec.routerID", "it has no effect: a node's address is its router ID")
	}
}

func (c *converter) convertPeer(p *object[peerSpec]) {
	s := &p.Spec
	out := &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: p.Name}, Spec: v1.BGPPeerSpec{
		Address: s.PeerAddress, Port: int32(s.PeerPort), LocalASN: int64(s.MyASN), PeerASN: int64(s.PeerASN),
		HoldTime: s.HoldTime, KeepaliveTime: s.KeepaliveTime, GracefulRestart: s.EnableGracefulRestart, SourceAddress: s.SourceAddress,
	}}
	if s.DynamicASN == "internal" {
		out.Spec.PeerASN = out.Spec.LocalASN
	}
	if s.EBGPMultiHop {
		out.Spec.EBGPMultihop = multihopTTL
	}
	if !matchesAll(s.NodeSelectors) {
		out.Spec.NodeSelector = c.oneSelector(id(p), "spec.nodeSelectors", s.NodeSelectors)
	}
	out.Spec.BFD = c.convertProfile(p)
	c.checkPeer(p, out)
	c.convertPassword(p, out)
	c.out.Peers = append(c.out.Peers, out)
}

// convertProfile returns the BFD session of a peer, nil without one.
func (c *converter) convertProfile(p *object[peerSpec]) *v1.BFDSpec {
	if p.Spec.BFDProfile == "" {
		return nil
	}
	i := slices.IndexFunc(c.profiles, func(b object[profileSpec]) bool { return b.Name == p.Spec.BFDProfile })
	if i < 0 {
		c.refuse(id(p), "spec.bfdProfile", "there is no BFDProfile %q", p.Spec.BFDProfile)
		return nil
	}
	profile := &c.profiles[i]
	s, out := &profile.Spec, &v1.BFDSpec{}
	interval := func(path string, ms *uint32) *metav1.Duration {
		if ms == nil {
			return nil
		}
		d := time.Duration(*ms) * time.Millisecond
		if d < bfd.MinInterval || d > bfd.MaxInterval {
			c.refuse(id(profile), path, "it is %s: want %s to %s", d, bfd.MinInterval, bfd.MaxInterval)
		}
		return &metav1.Duration{Duration: d}
	}
	out.TransmitInterval = interval("spec.transmitInterval", s.TransmitInterval)
	out.ReceiveInterval = interval("spec.receiveInterval", s.ReceiveInterval)
	if s.DetectMultiplier != nil {
		out.DetectMultiplier = int32(*s.DetectMultiplier)
	}
	if s.EchoMode != nil && *s.EchoMode {
		c.note(id(profile), "spec.echoMode", "it has no effect: fairlead has no echo function")
	}
	if s.PassiveMode != nil && *s.PassiveMode {
		c.note(id(profile), "spec.passiveMode", "it has no effect: fairlead begins sessions itself")
	}
	if s.MinimumTTL != nil {
		c.note(id(profile), "spec.minimumTtl", "it has no effect: over one hop a packet must have the TTL 255")
	}
	return out
}

// checkPeer refuses a peer that fairlead's speakers could not use.
func (c *converter) checkPeer(p *object[peerSpec], out *v1.BGPPeer) {
	check := bgp.Peer{Name: p.Name, Port: p.Spec.PeerPort, LocalASN: p.Spec.MyASN, PeerASN: uint32(out.Spec.PeerASN),
		GracefulRestart: p.Spec.EnableGracefulRestart, MultihopTTL: int(out.Spec.EBGPMultihop), Password: p.Spec.Password}
	var err error
	if check.Address, err = netip.ParseAddr(p.Spec.PeerAddress); err != nil && p.Spec.Interface == "" {
		c.refuse(id(p), "spec.peerAddress", "%q is not an IP address", p.Spec.PeerAddress)
	}
	if p.Spec.SourceAddress != "" {
		if check.SourceAddress, err = netip.ParseAddr(p.Spec.SourceAddress); err != nil {
			c.refuse(id(p), "spec.sourceAddress", "%q is not an IP address", p.Spec.SourceAddress)
		}
	}
	for _, d := range []struct {
		path string
		have *metav1.Duration
	}{{"spec.holdTime", p.Spec.HoldTime}, {"spec.keepaliveTime", p.Spec.KeepaliveTime}} {
		if d.have != nil && d.have.Duration <= 0 {
			c.refuse(id(p), d.path, "it is %s: fairlead ends a session with a router that is silent", d.have.Duration)
			return
		}
	}
	if p.Spec.HoldTime != nil {
		check.HoldTime = p.Spec.HoldTime.Duration
	}
	if p.Spec.KeepaliveTime != nil {
		check.KeepaliveTime = p.Spec.KeepaliveTime.Duration
	}
	if err := check.Validate(); check.Address.IsValid() && err != nil {
		c.refuse(id(p), "spec", "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
}

// convertPassword refers to a Secret of kube-system.
func (c *converter) convertPassword(p *object[peerSpec], out *v1.BGPPeer) {
	name := p.Spec.PasswordSecret.Name
	switch {
	case p.Spec.Password != "" && name != "":
		c.refuse(id(p), "spec.password", "it excludes passwordSecret")
		return
	case p.Spec.Password != "":
		name = passwordPrefix + p.Name
		c.out.Passwords[name] = p.Spec.Password
		c.note(id(p), "spec.password", "it is in the Secret kube-system/%s: let fairlead-lb read it", name)
	case name != "":
		c.note(id(p), "spec.passwordSecret", "copy the Secret %s from MetalLB's namespace to kube-system, and let fairlead-lb read it", name)
	default:
		return
	}
	out.Spec.PasswordSecretRef = &v1.SecretReference{Name: name}
}
