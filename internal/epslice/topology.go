package epslice

import (
	"fmt"
	"maps"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// overload is the fraction of its share by which an endpoint may be overloaded
// before topology-aware hints are removed.
const overload = 0.2

// Topology is the share of the cluster's CPU that lies in each zone.
type Topology struct {
	ratios map[string]float64 // nil: not known for every node, or one zone only
	cpus   map[string]int64
}

// NewTopology adds up the ready Nodes, without the control plane.
func NewTopology(nodes []*corev1.Node) *Topology {
	t := &Topology{cpus: map[string]int64{}}
	var total int64
	for _, node := range nodes {
		if !inTopology(node) {
			continue
		}
		zone, cpu := node.Labels[corev1.LabelTopologyZone], node.Status.Allocatable.Cpu().MilliValue()
		if zone == "" || cpu == 0 {
			return &Topology{}
		}
		t.cpus[zone] += cpu
		total += cpu
	}
	if len(t.cpus) < 2 {
		return t
	}
	t.ratios = map[string]float64{}
	for zone, cpu := range t.cpus {
		t.ratios[zone] = float64(cpu) / float64(total)
	}
	return t
}

// Same reports whether t and o lead to the same hints.
func (t *Topology) Same(o *Topology) bool {
	return o != nil && (t.ratios == nil) == (o.ratios == nil) && maps.Equal(t.cpus, o.cpus)
}

func inTopology(node *corev1.Node) bool {
	for _, label := range []string{"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"} {
		if _, ok := node.Labels[label]; ok {
			return false
		}
	}
	for i := range node.Status.Conditions {
		if c := &node.Status.Conditions[i]; c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Overloaded reports whether earlier hints, counted by zone, are now too few for
// some zone, so that the Service has to be planned again.
func (t *Topology) Overloaded(hinted map[string]int) bool {
	if len(hinted) == 0 {
		return false
	}
	if len(t.ratios) == 0 {
		return true
	}
	total := 0
	for _, n := range hinted {
		total += n
	}
	for zone, ratio := range t.ratios {
		n, ok := hinted[zone]
		if !ok || n < int(math.Ceil(float64(total)*ratio/(1+overload))) {
			return true
		}
	}
	return false
}

// share is how many endpoints a zone is to be hinted.
type share struct {
	wish     float64
	max, min int
}

// shares divides a number of ready endpoints among the zones, or returns the
// reason why it cannot.
func (t *Topology) shares(ready int) (map[string]share, string) {
	switch {
	case t.ratios == nil:
		return nil, "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes"
	case len(t.ratios) > ready:
		return nil, fmt.Sprintf("Insufficient number of endpoints (%d endpoints, %d zones)", ready, len(t.ratios))
	}
	out, total := map[string]share{}, 0
	for zone, ratio := range t.ratios {
		wish := ratio * float64(ready)
		s := share{min: int(math.Ceil(wish * (1 / (1 + overload))))}
		s.wish = math.Max(wish, float64(s.min))
		total += s.min
		out[zone] = s
	}
	if total > ready {
		return nil, fmt.Sprintf("Unable to allocate minimum required endpoints to each zone without exceeding overload threshold "+
			"(%d endpoints, %d zones)", ready, len(t.ratios))
	}
	for zone, s := range out {
		s.max = s.min + ready - total
		out[zone] = s
	}
	return out, ""
}

// topology hints every ready endpoint of one family to a zone, or removes all
// hints, with an Event that has the reason.
func (p *planner) topology(t discoveryv1.AddressType, all []*work) {
	given, reason := p.assignHints(all)
	if reason != "" {
		for _, w := range all {
			w.stripHints()
		}
	}
	for _, w := range all {
		w.dirty = w.dirty || !slices.EqualFunc(w.endpoints, w.old.Endpoints, func(a, b discoveryv1.Endpoint) bool {
			return sameHints(a.Hints, b.Hints)
		})
	}
	if reason != "" {
		p.plan.Events = append(p.plan.Events, Event{Warning: true, Reason: "TopologyAwareHintsDisabled",
			Message: reason + ", addressType: " + string(t)})
		return
	}
	if !p.in.Hinted {
		p.plan.Events = append(p.plan.Events, Event{Reason: "TopologyAwareHintsEnabled",
			Message: "Topology Aware Hints has been enabled, addressType: " + string(t)})
	}
	if p.plan.Hints == nil {
		p.plan.Hints = map[discoveryv1.AddressType]map[string]int{}
	}
	p.plan.Hints[t] = given
}

// assignHints leaves unchanged slices as they are if their hints still fit, hints
// the endpoints of the others to their own zones, and then moves as few as needed
// to zones that have too few.
func (p *planner) assignHints(all []*work) (map[string]int, string) {
	ready := 0
	for _, w := range all {
		for i := range w.endpoints {
			if isReady(&w.endpoints[i]) {
				ready++
			}
		}
	}
	shares, reason := p.in.Topology.shares(ready)
	if reason != "" {
		return nil, reason
	}
	given := map[string]int{}
	var open []*work
	for _, w := range all {
		if w.dirty || !w.hintsFit(given, shares) {
			open = append(open, w)
		}
	}
	for _, w := range open {
		w.own()
		for i := range w.endpoints {
			e := &w.endpoints[i]
			e.Hints = nil
			if !isReady(e) {
				continue
			}
			if e.Zone == nil || *e.Zone == "" {
				return nil, "One or more endpoints do not have a zone specified"
			}
			given[*e.Zone]++
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: *e.Zone}}}
		}
	}
	move(open, given, shares)
	if len(given) == 0 {
		return nil, "No hints allocated for zones"
	}
	return given, ""
}

// hintsFit reports whether the hints of an unchanged slice may stay, and counts
// them if so.
func (w *work) hintsFit(given map[string]int, shares map[string]share) bool {
	here := map[string]int{}
	for i := range w.endpoints {
		e := &w.endpoints[i]
		if !isReady(e) {
			continue
		}
		if e.Hints == nil || len(e.Hints.ForZones) == 0 {
			return false
		}
		for _, z := range e.Hints.ForZones {
			here[z.Name]++
		}
	}
	for zone, n := range here {
		if s, ok := shares[zone]; !ok || n+given[zone] > s.max {
			return false
		}
	}
	for zone, n := range here {
		given[zone] += n
	}
	return true
}

// move hints endpoints of zones that have too many to zones that have too few.
func move(open []*work, given map[string]int, shares map[string]share) {
	giving, receiving := balance(given, shares)
	for _, w := range open {
		for i := range w.endpoints {
			e := &w.endpoints[i]
			if !isReady(e) || giving[*e.Zone] == 0 {
				continue
			}
			zone := ""
			for _, z := range slices.Sorted(maps.Keys(receiving)) {
				if receiving[z] > 0 {
					zone = z
					break
				}
			}
			if zone == "" {
				return
			}
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
			giving[*e.Zone]--
			receiving[zone]--
			given[*e.Zone]--
			given[zone]++
		}
	}
}

// balance returns by how many endpoints each zone has too many or too few.
func balance(given map[string]int, shares map[string]share) (giving, receiving map[string]int) {
	surplus, lack := map[string]float64{}, map[string]float64{}
	for zone, s := range shares {
		if d := float64(given[zone]) - s.wish; d > 0 {
			surplus[zone] = d
		} else if d < 0 {
			lack[zone] = -d
		}
	}
	giving, receiving = map[string]int{}, map[string]int{}
	for {
		from, most := largest(surplus)
		to, need := largest(lack)
		if from == "" || to == "" || most < 1 && need < 1 || most < 0.5 || need < 0.5 {
			return giving, receiving
		}
		giving[from]++
		surplus[from]--
		receiving[to]++
		lack[to]--
	}
}

func largest(m map[string]float64) (string, float64) {
	best, most := "", 0.0
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if m[k] > most {
			best, most = k, m[k]
		}
	}
	return best, most
}

func isReady(e *discoveryv1.Endpoint) bool {
	return e.Conditions.Ready != nil && *e.Conditions.Ready
}

// own makes w.endpoints safe to change.
func (w *work) own() {
	if w.old != nil && len(w.endpoints) > 0 && len(w.old.Endpoints) > 0 && &w.endpoints[0] == &w.old.Endpoints[0] {
		w.endpoints = slices.Clone(w.endpoints)
	}
}

func (w *work) stripHints() {
	for i := range w.endpoints {
		if w.endpoints[i].Hints != nil {
			w.own()
			w.endpoints[i].Hints = nil
		}
	}
}
