package metallb

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// Result is a configuration in fairlead's terms.
type Result struct {
	Pools []*v1.IPAddressPool
	Peers []*v1.BGPPeer
	// Passwords are in the objects of peers, by the names of the Secrets of kube-system that the peers
	// refer to.
	Passwords map[string]string
	// Announce is how nodes announce: v1.AnnounceARP, or v1.AnnounceBGP. Peers are announced to in both cases.
	Announce string
	// Notes list what the reader has to do or know.
	Notes []string
}

// Refusals are the fields that cannot be kept, each with its object, its path and the reason.
type Refusals []string

// Error returns them in one line.
func (r Refusals) Error() string { return strings.Join(r, "; ") }

// converter converts one configuration.
type converter struct {
	configuration
	refused Refusals
	out     Result
}

// refuse notes that a field of an object cannot be kept.
func (c *converter) refuse(id, path, format string, args ...any) {
	if path != "" {
		path += ": "
	}
	c.refused = append(c.refused, id+": "+path+fmt.Sprintf(format, args...))
}

func (c *converter) note(id, path, format string, args ...any) {
	c.out.Notes = append(c.out.Notes, id+": "+path+": "+fmt.Sprintf(format, args...))
}

// Convert reads objects of metallb.io as YAML or JSON and returns what they mean for fairlead. If fields cannot be
// kept, the error is Refusals.
func Convert(in io.Reader) (*Result, error) {
	c := &converter{}
	c.seen, c.out.Passwords = map[string]bool{}, map[string]string{}
	if err := c.read(in); err != nil {
		return nil, err
	}
	if len(c.seen) == 0 {
		return nil, errors.New("there is no object of metallb.io in it")
	}
	aliases := c.aliases()
	ranks := c.ranks()
	byARP, byBGP := false, false // whether some pool is announced so
	for i := range c.pools {
		p := &c.pools[i]
		w := c.waysOf(p)
		if !w.l2 && !w.bgp {
			c.refuse(id(p), "", "no advertisement selects it, so MetalLB does not announce its addresses, and fairlead would: add one, "+
				"or leave the pool out")
			continue
		}
		byARP, byBGP = byARP || w.l2, byBGP || w.bgp
		c.convertPool(p, w, aliases, ranks[p.Name])
	}
	c.checkAdvertisements()
	c.convertPeers(byBGP)
	c.out.Announce = v1.AnnounceARP
	if byBGP && !byARP {
		c.out.Announce = v1.AnnounceBGP
	}
	if len(c.refused) > 0 {
		return nil, c.refused
	}
	return &c.out, nil
}

func id[S any](o *object[S]) string { return o.Kind + "/" + o.Name }

// ways are the ways in which a pool is announced, and by which advertisements.
type ways struct {
	l2, bgp bool
	viaL2   []*object[l2Spec]
	viaBGP  []*object[bgpSpec]
}

// announce returns the ways as a pool has them. A pool without them would also be announced in a way that comes later.
func (w ways) announce() (out []string) {
	if w.l2 {
		out = append(out, v1.AnnounceARP)
	}
	if w.bgp {
		out = append(out, v1.AnnounceBGP)
	}
	return out
}

// waysOf returns how a pool is announced.
func (c *converter) waysOf(p *object[poolSpec]) ways {
	w := ways{}
	for i := range c.l2 {
		if selects(&c.l2[i].Spec.selection, p) {
			w.l2, w.viaL2 = true, append(w.viaL2, &c.l2[i])
		}
	}
	for i := range c.bgp {
		if selects(&c.bgp[i].Spec.selection, p) {
			w.bgp, w.viaBGP = true, append(w.viaBGP, &c.bgp[i])
		}
	}
	return w
}

// selects reports whether an advertisement is for a pool. Without pools and selectors it is for all.
func selects(s *selection, p *object[poolSpec]) bool {
	if len(s.IPAddressPools) == 0 && len(s.IPAddressPoolSelectors) == 0 {
		return true
	}
	return slices.Contains(s.IPAddressPools, p.Name) || slices.ContainsFunc(s.IPAddressPoolSelectors, func(s metav1.LabelSelector) bool {
		selector, err := metav1.LabelSelectorAsSelector(&s)
		return err == nil && selector.Matches(labels.Set(p.Labels))
	})
}

// checkAdvertisements refuses what advertisements have beside the ways and attributes of pools.
func (c *converter) checkAdvertisements() {
	for i := range c.l2 {
		c.checkSelection(id(&c.l2[i]), &c.l2[i].Spec.selection)
		if len(c.l2[i].Spec.PreferredNodeSelectors) > 0 {
			c.note(id(&c.l2[i]), "spec.preferredNodeSelectors",
				"it has no effect: fairlead spreads addresses over all nodes that can announce them")
		}
	}
	for i := range c.bgp {
		a := &c.bgp[i]
		c.checkSelection(id(a), &a.Spec.selection)
		if a.Spec.ASPathPrepend > v1.MaxASPathPrepend {
			c.refuse(id(a), "spec.asPathPrepend", "it is %d: want 0 to %d", a.Spec.ASPathPrepend, v1.MaxASPathPrepend)
		}
		for j, name := range a.Spec.Peers {
			if !c.seen[kindPeer+"/"+name] {
				c.refuse(id(a), fmt.Sprintf("spec.peers[%d]", j), "there is no BGPPeer %q", name)
			}
		}
	}
}

func (c *converter) checkSelection(id string, s *selection) {
	for i, name := range s.IPAddressPools {
		if !c.seen[kindPool+"/"+name] {
			c.refuse(id, fmt.Sprintf("spec.ipAddressPools[%d]", i), "there is no IPAddressPool %q", name)
		}
	}
	for i := range s.IPAddressPoolSelectors {
		c.checkSelector(id, fmt.Sprintf("spec.ipAddressPoolSelectors[%d]", i), &s.IPAddressPoolSelectors[i])
	}
	if !matchesAll(s.NodeSelectors) {
		c.oneSelector(id, "spec.nodeSelectors", s.NodeSelectors)
	}
	if !matchesAll(s.ServiceSelectors) {
		c.refuse(id, "spec.serviceSelectors", "fairlead announces all Services of a pool: give these Services a pool of their own, "+
			"with serviceAllocation.serviceSelectors")
	}
}

// checkSelector reports whether a selector is valid, and refuses it otherwise.
func (c *converter) checkSelector(id, path string, s *metav1.LabelSelector) bool {
	_, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		c.refuse(id, path, "%s", err)
	}
	return err == nil
}

// convertPool converts a pool with the advertisements that are for it.
func (c *converter) convertPool(p *object[poolSpec], w ways, aliases map[string]string, rank int32) {
	out := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: p.Name}}
	spec := &out.Spec
	spec.AutoAssign, spec.AvoidBuggyIPs, spec.Priority = p.Spec.AutoAssign, p.Spec.AvoidBuggyIPs, rank
	if len(p.Spec.Addresses) == 0 {
		c.refuse(id(p), "spec.addresses", "it is empty")
	}
	for i, text := range p.Spec.Addresses {
		if _, err := pool.Parse(text); err != nil {
			c.refuse(id(p), fmt.Sprintf("spec.addresses[%d]", i), "%s", err)
		}
		spec.Addresses = append(spec.Addresses, strings.ReplaceAll(text, " ", ""))
	}
	if a := p.Spec.AllocateTo; a != nil {
		spec.Namespaces = a.Namespaces
		spec.NamespaceSelector = c.oneSelector(id(p), "spec.serviceAllocation.namespaceSelectors", a.NamespaceSelectors)
		spec.ServiceSelector = c.oneSelector(id(p), "spec.serviceAllocation.serviceSelectors", a.ServiceSelectors)
	}
	spec.Announce, spec.NodeSelector = w.announce(), c.nodesOf(p, w)
	for _, a := range w.viaL2 { // an advertisement without interfaces is for all of them
		if len(a.Spec.Interfaces) == 0 {
			spec.Interfaces = nil
			break
		}
		spec.Interfaces = append(spec.Interfaces, a.Spec.Interfaces...)
	}
	slices.Sort(spec.Interfaces)
	spec.Interfaces = slices.Compact(spec.Interfaces)
	var routes []v1.PoolRoute
	for _, a := range w.viaBGP {
		routes = c.addRoute(p, routes, a, aliases)
	}
	if len(routes) > maxRoutes {
		c.refuse(id(p), "", "its BGPAdvertisements are %d different routes to each address, and fairlead has %d", len(routes), maxRoutes)
	} else if len(routes) > 1 || len(routes) == 1 && !reflect.DeepEqual(routes[0], v1.PoolRoute{}) {
		spec.BGP = &v1.PoolBGP{PoolRoute: routes[0], Advertisements: routes[1:]}
	}
	c.out.Pools = append(c.out.Pools, out)
}

// nodesOf returns which nodes announce a pool, nil for all. Its advertisements must agree: for each of them MetalLB has
// interfaces, attributes and peers, and a pool has one selector here.
func (c *converter) nodesOf(p *object[poolSpec], w ways) *metav1.LabelSelector {
	var first *metav1.LabelSelector
	var firstOf string
	for _, a := range w.selections() {
		var nodes *metav1.LabelSelector
		if !matchesAll(a.NodeSelectors) {
			nodes, _ = oneOf(a.NodeSelectors)
		}
		switch {
		case firstOf == "":
			first, firstOf = nodes, a.of
		case !selectsSame(first, nodes):
			c.refuse(id(p), "", "%s and %s announce it from different nodes, and a pool has one nodeSelector: give each its own pool, or "+
				"the same spec.nodeSelectors", firstOf, a.of)
			return nil
		}
	}
	return first
}

// advertised is the selection of an advertisement of a pool.
type advertised struct {
	of string
	*selection
}

func (w ways) selections() (out []advertised) {
	for _, a := range w.viaL2 {
		out = append(out, advertised{id(a), &a.Spec.selection})
	}
	for _, a := range w.viaBGP {
		out = append(out, advertised{id(a), &a.Spec.selection})
	}
	return out
}

// oneSelector returns the selector that a list of alternatives is, nil if there is none or if it is refused.
func (c *converter) oneSelector(id, path string, selectors []metav1.LabelSelector) *metav1.LabelSelector {
	for i := range selectors {
		if !c.checkSelector(id, fmt.Sprintf("%s[%d]", path, i), &selectors[i]) {
			return nil
		}
	}
	one, ok := oneOf(selectors)
	if !ok {
		c.refuse(id, path, "it has %d selectors, and fairlead takes one, or several that list values of the same label", len(selectors))
	}
	return one
}

// The lengths of prefixes that are one address.
const (
	wholeV4 = 32
	wholeV6 = 128
)

// maxRoutes is how many routes a pool may have: PoolBGP.Advertisements are 8 at most.
const maxRoutes = 9

// addRoute adds an advertisement to the routes of a pool, of which several are one if no more than their communities differ.
func (c *converter) addRoute(p *object[poolSpec], routes []v1.PoolRoute, a *object[bgpSpec], aliases map[string]string) []v1.PoolRoute {
	add := v1.PoolRoute{Peers: c.routePeers(a), AggregationLengthV4: length(a.Spec.AggregationLength, wholeV4),
		AggregationLengthV6: length(a.Spec.AggregationLengthV6, wholeV6), ASPathPrepend: int32(a.Spec.ASPathPrepend)}
	if a.Spec.LocalPref != 0 {
		add.LocalPreference = new(int64(a.Spec.LocalPref))
	}
	var into *v1.PoolRoute
	for i := range routes {
		have := &routes[i]
		alike := same(have.LocalPreference, add.LocalPreference) && have.ASPathPrepend == add.ASPathPrepend
		switch {
		case !same(have.AggregationLengthV4, add.AggregationLengthV4) || !same(have.AggregationLengthV6, add.AggregationLengthV6):
		case alike && slices.Equal(have.Peers, add.Peers):
			into = have
		case !alike && common(have.Peers, add.Peers):
			c.refuse(id(a), "spec", "another BGPAdvertisement announces pool %s to the same BGPPeer with another localPref or "+
				"asPathPrepend, and an address has one route for a peer", p.Name)
			return routes
		}
	}
	if into == nil {
		routes = append(routes, add)
		into = &routes[len(routes)-1]
	}
	for i, text := range a.Spec.Communities {
		value := communityOf(cmp.Or(aliases[text], text))
		if _, err := bgp.ParseCommunity(value); err != nil {
			c.refuse(id(a), fmt.Sprintf("spec.communities[%d]", i), "%q is neither a name of a Community nor a value: %s", text, err)
			continue
		}
		if !slices.Contains(into.Communities, value) {
			into.Communities = append(into.Communities, value)
		}
	}
	return routes
}

// routePeers returns the peers that get the routes of an advertisement, sorted, none for all.
func (c *converter) routePeers(a *object[bgpSpec]) (peers []string) {
	for i := range c.peers {
		p := &c.peers[i]
		got := len(a.Spec.Peers) == 0 || slices.Contains(a.Spec.Peers, p.Name)
		if got {
			peers = append(peers, p.Name)
		}
		internal := p.Spec.DynamicASN == "internal" || p.Spec.PeerASN == p.Spec.MyASN
		if got && internal && a.Spec.ASPathPrepend > 0 {
			c.note(id(a), "spec.asPathPrepend", "it has no effect at BGPPeer %s: a router of the same AS gets no path", p.Name)
		}
	}
	if len(peers) == len(c.peers) {
		return nil
	}
	slices.Sort(peers)
	return peers
}

// common reports whether some peer gets the routes of both lists, of which an empty one is for all.
func common(a, b []string) bool {
	return len(a) == 0 || len(b) == 0 || slices.ContainsFunc(a, func(name string) bool { return slices.Contains(b, name) })
}

func same[T comparable](a, b *T) bool { return a == b || a != nil && b != nil && *a == *b }

// length returns a length unless it is the default.
func length(have *int32, byDefault int32) *int32 {
	if have == nil || *have == byDefault {
		return nil
	}
	return have
}

// communityOf returns a community as fairlead writes it: MetalLB marks large ones.
func communityOf(text string) string { return strings.TrimPrefix(text, "large:") }

// aliases returns the values of communities by their names.
func (c *converter) aliases() map[string]string {
	out := map[string]string{}
	for i := range c.communities {
		o := &c.communities[i]
		for j, a := range o.Spec.Communities {
			path := fmt.Sprintf("spec.communities[%d]", j)
			if _, twice := out[a.Name]; twice || a.Name == "" {
				c.refuse(id(o), path+".name", "%q is empty, or the name of another community", a.Name)
			}
			if _, err := bgp.ParseCommunity(communityOf(a.Value)); err != nil {
				c.refuse(id(o), path+".value", "%s", err)
			}
			out[a.Name] = a.Value
		}
	}
	return out
}

// ranks returns the priority of each pool. With MetalLB, pools with a serviceAllocation come first, a lower
// priority before a higher one, 0 last. With fairlead, a higher priority comes first.
func (c *converter) ranks() map[string]int32 {
	var numbers []int
	for i := range c.pools {
		if a := c.pools[i].Spec.AllocateTo; a != nil && a.Priority > 0 {
			numbers = append(numbers, a.Priority)
		} else if a != nil && a.Priority < 0 {
			c.refuse(id(&c.pools[i]), "spec.serviceAllocation.priority", "it is %d; want 0 or more", a.Priority)
		}
	}
	slices.SortFunc(numbers, func(a, b int) int { return cmp.Compare(b, a) })
	numbers = slices.Compact(numbers)
	out := map[string]int32{}
	for i := range c.pools {
		if a := c.pools[i].Spec.AllocateTo; a != nil {
			out[c.pools[i].Name] = int32(2 + slices.Index(numbers, a.Priority)) // 1 if it has none
		}
	}
	return out
}
