package epslice

import (
	"maps"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// work is a slice of the result: an old one, changed or not, or a new one.
type work struct {
	old       *discoveryv1.EndpointSlice
	ports     []discoveryv1.EndpointPort
	weight    string // as of weightOf
	endpoints []discoveryv1.Endpoint
	dirty     bool
	gains     bool // endpoints that were in no slice of their group
}

// group is the endpoints of one address family that share their ports and weight.
type group struct {
	ports  *portSet
	weight string // as of weightOf
	want   map[endpointKey]*discoveryv1.Endpoint
	works  []*work
	left   []*discoveryv1.Endpoint // wanted and in no slice yet
}

// family plans the slices of one address type.
func (p *planner) family(t discoveryv1.AddressType, present []*discoveryv1.EndpointSlice) {
	groups := p.groups(t)
	var spare []*discoveryv1.EndpointSlice // owned, would be deleted
	slices.SortFunc(present, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	for _, s := range present {
		if !p.owner.owns(s) {
			p.plan.Delete = append(p.plan.Delete, s)
			continue
		}
		g := groups[groupKey(s)]
		if g == nil {
			spare = append(spare, s)
			continue
		}
		if w := p.keep(g, s); w != nil {
			g.works = append(g.works, w)
		} else {
			spare = append(spare, s)
		}
	}
	var all []*work
	keys := slices.Sorted(maps.Keys(groups))
	for _, k := range keys {
		g := groups[k]
		g.takeLeft()
		g.fillDirty(p.max)
	}
	for _, k := range keys {
		g := groups[k]
		spare = g.place(p.max, spare)
		all = append(all, g.works...)
	}
	if len(all) == 0 {
		spare = p.placeholder(&all, spare)
	}
	if p.hints == hintTopology {
		p.topology(t, all)
	}
	// An endpoint that moves, since its weight or ports have changed, comes before it goes.
	slices.SortStableFunc(all, func(a, b *work) int {
		if a.gains == b.gains {
			return 0
		} else if a.gains {
			return -1
		}
		return 1
	})
	p.emit(t, all)
	p.plan.Delete = append(p.plan.Delete, spare...)
}

// keep returns what stays of a present slice, nil if nothing does. What it keeps
// is no longer in g.want.
func (p *planner) keep(g *group, s *discoveryv1.EndpointSlice) *work {
	w := &work{old: s, ports: s.Ports, weight: g.weight, dirty: !maps.Equal(s.Labels, p.labels)}
	changed := false
	var kept []discoveryv1.Endpoint
	number := 0
	differ := func(i int) {
		if !changed {
			changed = true
			kept = append(make([]discoveryv1.Endpoint, 0, len(s.Endpoints)), s.Endpoints[:i]...)
		}
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		k := keyOf(e)
		want := g.want[k]
		if want == nil || number == p.max {
			differ(i)
			continue
		}
		delete(g.want, k)
		number++
		if !sameEndpoint(e, want) || p.hints != hintTopology && !sameHints(e.Hints, want.Hints) {
			differ(i)
		}
		if changed {
			kept = append(kept, *want)
		}
	}
	if !changed {
		w.endpoints = s.Endpoints
		return w
	}
	if len(kept) == 0 {
		return nil
	}
	w.endpoints, w.dirty = kept, true
	return w
}

// takeLeft lists the wanted endpoints that are in no slice, in a fixed order.
func (g *group) takeLeft() {
	if len(g.want) == 0 {
		return
	}
	keys := slices.SortedFunc(maps.Keys(g.want), compareKeys)
	g.left = make([]*discoveryv1.Endpoint, len(keys))
	for i, k := range keys {
		g.left[i] = g.want[k]
	}
}

func (g *group) fill(w *work, limit int) {
	n := min(len(g.left), limit-len(w.endpoints))
	if n <= 0 {
		return
	}
	w.endpoints = slices.Clip(w.endpoints) // shared memory is not written to
	for _, e := range g.left[:n] {
		w.endpoints = append(w.endpoints, *e)
	}
	g.left, w.dirty, w.gains = g.left[n:], true, true
}

// fillDirty puts endpoints into slices that are written anyway, the fullest
// first.
func (g *group) fillDirty(limit int) {
	if len(g.left) == 0 {
		return
	}
	var dirty []*work
	for _, w := range g.works {
		if w.dirty {
			dirty = append(dirty, w)
		}
	}
	slices.SortStableFunc(dirty, func(a, b *work) int { return len(b.endpoints) - len(a.endpoints) })
	for _, w := range dirty {
		g.fill(w, limit)
	}
}

// place finds slices for all that is left: spare ones cost no extra write; then
// the unchanged one that comes closest to full if it takes the rest; then new
// ones. It returns the spare slices not used.
func (g *group) place(limit int, spare []*discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice {
	for len(g.left) > 0 {
		var w *work
		switch {
		case len(spare) > 0:
			w = &work{old: spare[0], ports: g.ports.ports, weight: g.weight}
			spare = spare[1:]
			g.works = append(g.works, w)
		default:
			if w = g.closestToFull(limit); w == nil {
				w = &work{ports: g.ports.ports, weight: g.weight}
				g.works = append(g.works, w)
			}
		}
		g.fill(w, limit)
	}
	return spare
}

func (g *group) closestToFull(limit int) *work {
	var best *work
	for _, w := range g.works {
		n := len(w.endpoints) + len(g.left)
		if !w.dirty && n <= limit && (best == nil || len(w.endpoints) > len(best.endpoints)) {
			best = w
		}
	}
	return best
}

// placeholder keeps one slice without ports and endpoints if there would be none,
// so that clients can tell a Service without endpoints from one that was not
// planned yet.
func (p *planner) placeholder(all *[]*work, spare []*discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice {
	for i, s := range spare {
		if len(s.Ports) == 0 && len(s.Endpoints) == 0 && maps.Equal(s.Labels, p.labels) {
			return slices.Delete(slices.Clone(spare), i, i+1)
		}
	}
	w := &work{dirty: true}
	if len(spare) > 0 {
		w.old, spare = spare[0], spare[1:]
	}
	*all = append(*all, w)
	return spare
}

// emit turns the changed works into slices to write.
func (p *planner) emit(t discoveryv1.AddressType, all []*work) {
	for _, w := range all {
		if !w.dirty {
			continue
		}
		s := &discoveryv1.EndpointSlice{AddressType: t, Ports: w.ports, Endpoints: w.endpoints}
		if s.Ports == nil {
			s.Ports = []discoveryv1.EndpointPort{}
		}
		if s.Endpoints == nil {
			s.Endpoints = []discoveryv1.Endpoint{}
		}
		if w.old != nil {
			s.ObjectMeta = w.old.ObjectMeta
			s.Annotations = setWeight(setTrigger(w.old.Annotations, p.in.Trigger), w.weight)
		} else {
			if p.in.Service.DeletionTimestamp != nil {
				continue
			}
			s.Namespace = p.owner.namespace
			s.GenerateName, s.Name = p.names.next(t)
			s.OwnerReferences = p.owner.reference()
			s.Annotations = setWeight(setTrigger(nil, p.in.Trigger), w.weight)
		}
		s.Labels = p.labels
		if w.old != nil {
			p.plan.Update = append(p.plan.Update, s)
		} else {
			p.plan.Create = append(p.plan.Create, s)
		}
	}
}
