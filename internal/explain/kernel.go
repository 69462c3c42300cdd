package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Route is how a node sends packets to an endpoint: out of Device, to the router Via unless there is none, from Source. Error is why it
// does not.
type Route struct {
	To     netip.Addr `json:"to"`
	Device string     `json:"device,omitempty"`
	Via    netip.Addr `json:"via,omitzero"`
	Source netip.Addr `json:"source,omitzero"`
	Error  string     `json:"error,omitempty"`
}

func (r *Route) String() string {
	if r.Error != "" {
		return "no route: " + r.Error
	}
	text := "route: device " + r.Device
	if r.Via.IsValid() {
		text += ", by router " + r.Via.String()
	}
	if r.Source.IsValid() {
		text += ", from " + r.Source.String()
	}
	return text
}

// Tracked are the connections to the ports of a question that a node tracks now and that are not closed: of UDP what is not forgotten yet.
type Tracked struct {
	Connections uint64 `json:"connections"`
	// Endpoints are some of the addresses that answer them.
	Endpoints []TrackedEndpoint `json:"endpoints,omitempty"`
	// Error is why they are not known.
	Error string `json:"error,omitempty"`
}

// TrackedEndpoint is an address that answers tracked connections.
type TrackedEndpoint struct {
	Endpoint    netip.AddrPort `json:"endpoint"`
	Connections uint64         `json:"connections"`
}

// maxLeft bounds the former endpoints that are named.
const maxLeft = 8

// ofKernel adds what else the node's kernel knows about an endpoint.
func (e *explaining) ofKernel(at netip.AddrPort, say func(text, source string)) {
	if i := slices.IndexFunc(e.facts.Routes, func(r Route) bool { return r.To == at.Addr() }); i >= 0 {
		say(e.facts.Routes[i].String(), "routes of node "+e.facts.Node)
	}
	if e.open == nil {
		e.open = map[netip.AddrPort]uint64{}
		for i := 0; e.facts.Tracked != nil && i < len(e.facts.Tracked.Endpoints); i++ {
			to := &e.facts.Tracked.Endpoints[i]
			e.open[to.Endpoint] = to.Connections
		}
	}
	if n := e.open[at]; n > 0 {
		say(fmt.Sprintf("tracked connections: %d", n), e.tracking())
	}
}

func (e *explaining) tracking() string { return "connection tracking of node " + e.facts.Node }

// tracked adds the number of connections that the node tracks, and names addresses that still have some and are endpoints no longer. It
// comes after endpoints.
func (e *explaining) tracked() {
	t := e.facts.Tracked
	switch {
	case t == nil:
		return
	case t.Error != "":
		e.verdict.add("tracked connections are not known: "+t.Error, e.tracking())
		return
	}
	e.verdict.add(fmt.Sprintf("tracked connections: %d", t.Connections), e.tracking())
	if e.facts.Mode == "userspace" {
		return // the proxy answers them
	}
	known := map[string]bool{}
	for i := range e.verdict.Endpoints {
		known[e.verdict.Endpoints[i].Address] = true
	}
	left := slices.DeleteFunc(slices.Clone(t.Endpoints), func(to TrackedEndpoint) bool { return known[to.Endpoint.String()] })
	slices.SortFunc(left, func(a, b TrackedEndpoint) int {
		return cmp.Or(cmp.Compare(b.Connections, a.Connections), a.Endpoint.Compare(b.Endpoint))
	})
	for _, to := range left[:min(len(left), maxLeft)] {
		e.verdict.add(fmt.Sprintf("tracked connections with %s, which is not an endpoint: %d; they stay there until they end", to.Endpoint,
			to.Connections), e.tracking())
	}
}
