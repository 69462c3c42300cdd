package bgp

import (
	"net/netip"
	"slices"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// prefixesPerMessage is chosen so that a message with the most communities that a
// route may have stays below 4096 bytes: a prefix has up to 17 bytes.
const prefixesPerMessage = 128

// familyOf returns the address family of a prefix.
func familyOf(p netip.Prefix) wire.Family {
	if p.Addr().Is4() {
		return wire.RF_IPv4_UC
	}
	return wire.RF_IPv6_UC
}

// reachable reports whether routes of family f can be announced: the router takes
// the family, and there is a next hop for it.
func (t terms) reachable(f wire.Family) bool {
	return t.family[f] && len(t.nextHop(f)) > 0
}

// nextHop returns the next hop of family f: an address of this node, and for IPv6 a
// link-local one behind it (RFC 2545, section 3).
func (t terms) nextHop(f wire.Family) []netip.Addr {
	v6 := make([]netip.Addr, 0, 2)
	for _, a := range []netip.Addr{t.hops.v6, t.hops.linkLocal} {
		if a.IsValid() {
			v6 = append(v6, a)
		}
	}
	switch {
	case f == wire.RF_IPv6_UC, t.extendedNextHop && !t.hops.v4.IsValid():
		return v6
	case t.hops.v4.IsValid():
		return []netip.Addr{t.hops.v4}
	}
	return nil
}

// classic reports whether routes of family f go into the fields of RFC 4271 instead of
// attributes for several protocols.
func (t terms) classic(f wire.Family) bool { return f == wire.RF_IPv4_UC && t.hops.v4.IsValid() }

// announcements returns messages that announce prefixes of one family with the same
// attributes.
func (t terms) announcements(f wire.Family, prefixes []netip.Prefix, attributes Attributes) ([]*wire.BGPMessage, error) {
	common := t.pathAttributes(attributes)
	hops := t.nextHop(f)
	return chunked(prefixes, func(routes []wire.PathNLRI) (*wire.BGPMessage, error) {
		if t.classic(f) {
			hop, err := wire.NewPathAttributeNextHop(hops[0])
			if err != nil {
				return nil, err
			}
			return wire.NewBGPUpdateMessage(nil, append(common[:len(common):len(common)], hop), routes), nil
		}
		reach, err := wire.NewPathAttributeMpReachNLRI(f, routes, hops...)
		if err != nil {
			return nil, err
		}
		return wire.NewBGPUpdateMessage(nil, append([]wire.PathAttributeInterface{reach}, common...), nil), nil
	})
}

// withdrawals returns messages that withdraw prefixes of one family.
func (t terms) withdrawals(f wire.Family, prefixes []netip.Prefix) ([]*wire.BGPMessage, error) {
	return chunked(prefixes, func(routes []wire.PathNLRI) (*wire.BGPMessage, error) {
		if t.classic(f) {
			return wire.NewBGPUpdateMessage(routes, nil, nil), nil
		}
		unreach, err := wire.NewPathAttributeMpUnreachNLRI(f, routes)
		if err != nil {
			return nil, err
		}
		return wire.NewBGPUpdateMessage(nil, []wire.PathAttributeInterface{unreach}, nil), nil
	})
}

// pathAttributes returns the path attributes that do not depend on the family.
func (t terms) pathAttributes(a Attributes) []wire.PathAttributeInterface {
	out := []wire.PathAttributeInterface{wire.NewPathAttributeOrigin(wire.BGP_ORIGIN_ATTR_TYPE_IGP)}
	if t.peer.Internal() {
		out = append(out, wire.NewPathAttributeAsPath(nil), wire.NewPathAttributeLocalPref(a.localPreference()))
	} else {
		out = append(out, wire.NewPathAttributeAsPath([]wire.AsPathParamInterface{
			wire.NewAs4PathParam(wire.BGP_ASPATH_ATTR_TYPE_SEQ, slices.Repeat([]uint32{t.peer.LocalASN}, 1+a.ASPathPrepend)),
		}))
	}
	var standard []uint32
	var large []*wire.LargeCommunity
	for _, c := range a.Communities[:min(len(a.Communities), MaxCommunities)] {
		if c.Large {
			large = append(large, wire.NewLargeCommunity(c.Parts[0], c.Parts[1], c.Parts[2]))
		} else {
			standard = append(standard, c.Parts[0]<<16|c.Parts[1])
		}
	}
	if len(standard) > 0 {
		out = append(out, wire.NewPathAttributeCommunities(standard))
	}
	if len(large) > 0 {
		out = append(out, wire.NewPathAttributeLargeCommunities(large))
	}
	return out
}

// chunked makes messages of at most prefixesPerMessage prefixes.
func chunked(prefixes []netip.Prefix, message func([]wire.PathNLRI) (*wire.BGPMessage, error)) ([]*wire.BGPMessage, error) {
	var out []*wire.BGPMessage
	for len(prefixes) > 0 {
		n := min(len(prefixes), prefixesPerMessage)
		routes := make([]wire.PathNLRI, n)
		for i, p := range prefixes[:n] {
			nlri, err := wire.NewIPAddrPrefix(p)
			if err != nil {
				return nil, err
			}
			routes[i].NLRI = nlri
		}
		m, err := message(routes)
		if err != nil {
			return nil, err
		}
		out, prefixes = append(out, m), prefixes[n:]
	}
	return out, nil
}
