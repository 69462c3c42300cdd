package userspace

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// place is one list of endpoints of one frontend: list 0 is for everybody, or
// for clients outside, list 1 for clients inside where they differ.
type place struct {
	front dataplane.FrontKey
	list  int
}

// wanted is a listener that a service port needs: one for all places with the
// same endpoints, so nearly always one.
type wanted struct {
	places    []place
	endpoints []table.Endpoint
}

// listenersFor are the listeners that a service port needs. A place without
// endpoints needs none.
func listenersFor(p *table.ServicePort) []wanted {
	var out []wanted
	add := func(pl place, list []table.Endpoint) {
		if len(list) == 0 {
			return
		}
		for i := range out {
			if slices.Equal(out[i].endpoints, list) {
				out[i].places = append(out[i].places, pl)
				return
			}
		}
		out = append(out, wanted{[]place{pl}, list})
	}
	for i := range p.Frontends {
		f := &p.Frontends[i]
		k := dataplane.KeyOf(p.Protocol, f)
		add(place{k, 0}, f.Endpoints)
		add(place{k, 1}, f.LocalClients)
	}
	return out
}

// front is what the kernel has of a frontend.
type front struct {
	key     dataplane.FrontKey
	owner   string  // for people who read the table
	to      [2]dest // for everybody; for clients inside, if split
	split   bool
	limited bool
	allow   []netip.Prefix // who is let in, if limited
	cluster bool           // other ports of its address are refused
}

// frontFor describes a frontend of a port. portOf returns the port on which
// the connections to a place are accepted, 0 if there is none.
func frontFor(p *table.ServicePort, f *table.Frontend, portOf func(place) uint16) *front {
	k := dataplane.KeyOf(p.Protocol, f)
	fr := &front{key: k, owner: p.ID.String(), cluster: f.Kind == table.ClusterIP}
	fr.to[0] = dest{port: portOf(place{k, 0}), drop: f.Drop}
	if f.LocalClients != nil {
		fr.to[1] = dest{port: portOf(place{k, 1})}
		fr.split = fr.to[1] != fr.to[0]
	}
	if f.SourceRanges != nil {
		fr.limited, fr.allow = true, f.SourceRanges
	}
	return fr
}

// slot names an element: the set it is in and its key.
type slot struct {
	set, key string
}

// content is the content of a table, present or desired: the elements of its sets,
// and the rules of its chains.
type content struct {
	elems  map[slot]nftables.Elem
	chains map[string]chain
}

func newContent() *content {
	return &content{elems: map[slot]nftables.Elem{}, chains: map[string]chain{}}
}

func (c *content) add(set string, e nftables.Elem) { c.elems[slot{set, string(e.Key)}] = e }

// addBase adds what is always there.
func (c *content) addBase(l *layout, s *dataplane.Settings) {
	for _, ch := range l.base(s) {
		c.chains[ch.name] = ch
	}
	for _, a := range s.NodeAddrs {
		c.add(setNodeAddresses, nftables.Elem{Key: a.AsSlice()})
	}
}

// addFront adds a frontend, but for the address of a ClusterIP.
func (c *content) addFront(l *layout, s *dataplane.Settings, fr *front) {
	e := nftables.Elem{Key: tables.AppendKey(nil, fr.key), Comment: fr.owner}
	ports, others := setVIPs, setOtherVIPs
	if fr.key.Node {
		ports, others = setNodePorts, setOtherNode
	}
	switch {
	case fr.split || fr.limited:
		chains := l.conditions(fr, s)
		for _, ch := range chains {
			c.chains[ch.name] = ch
		}
		e.Goto = chains[len(chains)-1].name
		c.add(others, e)
	case fr.to[0].port != 0:
		e.Data = portBytes(fr.to[0].port)
		c.add(ports, e)
	case fr.to[0].drop:
		e.Goto = chainDrop
		c.add(others, e)
	default:
		e.Goto = chainRefuse
		c.add(others, e)
	}
}

func (c *content) addProxyPort(p svc.Protocol, port uint16) {
	c.add(setProxyPorts, nftables.Elem{Key: tables.AppendKey(nil, dataplane.FrontKey{Port: port, Proto: p, Node: true})})
}

func (c *content) addClusterIP(a netip.Addr) {
	c.add(setClusterIPs, nftables.Elem{Key: a.AsSlice()})
}
