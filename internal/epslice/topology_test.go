package epslice

import (
	"fmt"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// topologyOf has n nodes of the same size in each zone.
func topologyOf(zones map[string]int) *Topology {
	var nodes []*corev1.Node
	for zone, n := range zones {
		for i := range n {
			nodes = append(nodes, testNode(fmt.Sprint(zone, i), zone))
		}
	}
	return NewTopology(nodes)
}

func TestTopologySame(t *testing.T) {
	two, one := topologyOf(map[string]int{"a": 1, "b": 1}), topologyOf(map[string]int{"a": 1})
	for _, c := range []struct {
		name string
		a, b *Topology
		want bool
	}{
		{"equal", two, topologyOf(map[string]int{"a": 1, "b": 1}), true},
		{"one zone", one, topologyOf(map[string]int{"a": 1}), true},
		{"zones not known", topologyOf(map[string]int{"": 1}), topologyOf(map[string]int{"": 2}), true},
		{"other sizes", two, topologyOf(map[string]int{"a": 1, "b": 2}), false},
		{"fewer zones", two, one, false},
		{"none before", two, nil, false},
	} {
		if got := c.a.Same(c.b); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestOverloaded(t *testing.T) {
	two := topologyOf(map[string]int{"a": 1, "b": 1})
	for _, c := range []struct {
		name   string
		t      *Topology
		hinted map[string]int
		want   bool
	}{
		{"no hints", two, nil, false},
		{"as many as the share", two, map[string]int{"a": 5, "b": 5}, false},
		{"within the overload", two, map[string]int{"a": 7, "b": 5}, false},
		{"too few", two, map[string]int{"a": 6, "b": 4}, true},
		{"a zone without any", two, map[string]int{"a": 10}, true},
		{"one zone left", topologyOf(map[string]int{"a": 1}), map[string]int{"a": 5, "b": 5}, true},
	} {
		if got := c.t.Overloaded(c.hinted); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestShares(t *testing.T) {
	two := topologyOf(map[string]int{"a": 1, "b": 1})
	got, reason := two.shares(12)
	want := share{wish: 6, min: 5, max: 7} // 12/2, 6/1.2, and the 2 that no minimum takes
	if reason != "" || len(got) != 2 || got["a"] != want || got["b"] != want {
		t.Errorf("%v, %q; want %v for each", got, reason, want)
	}
	if got, reason = two.shares(2); reason != "" || got["a"] != (share{wish: 1, min: 1, max: 1}) {
		t.Errorf("%v, %q; want one each", got, reason)
	}
	if got, reason = two.shares(1); got != nil || reason != "Insufficient number of endpoints (1 endpoints, 2 zones)" {
		t.Errorf("%v, %q", got, reason)
	}
}

func TestBalance(t *testing.T) {
	type counts = map[string]int
	for _, c := range []struct {
		name              string
		given             counts
		wish              map[string]float64
		giving, receiving counts
	}{
		{"even", counts{"a": 4, "b": 4}, map[string]float64{"a": 4, "b": 4}, counts{}, counts{}},
		{"two too many", counts{"a": 6, "b": 2}, map[string]float64{"a": 4, "b": 4}, counts{"a": 2}, counts{"b": 2}},
		{"both below one", counts{"a": 4, "b": 3}, map[string]float64{"a": 3.25, "b": 3.75}, counts{}, counts{}},
		{"one too many, less lacks", counts{"a": 5, "b": 3}, map[string]float64{"a": 4, "b": 3.75}, counts{"a": 1}, counts{"b": 1}},
		{"less too many, one lacks", counts{"a": 4, "b": 3}, map[string]float64{"a": 3.25, "b": 4}, counts{"a": 1}, counts{"b": 1}},
		{"half too many", counts{"a": 4, "b": 2}, map[string]float64{"a": 3.5, "b": 3}, counts{"a": 1}, counts{"b": 1}},
		{"half lacks", counts{"a": 5, "b": 3}, map[string]float64{"a": 4, "b": 3.5}, counts{"a": 1}, counts{"b": 1}},
		{"too little lacks", counts{"a": 6, "b": 3}, map[string]float64{"a": 4, "b": 3.25}, counts{}, counts{}},
		{"too little to give", counts{"a": 4, "b": 1}, map[string]float64{"a": 3.75, "b": 3}, counts{}, counts{}},
		{"alike: the first", counts{"a": 3, "b": 3, "c": 1, "d": 2}, map[string]float64{"a": 2, "b": 2, "c": 2, "d": 2},
			counts{"a": 1}, counts{"c": 1}},
		{"alike: the first lacks", counts{"a": 3, "c": 1, "d": 1}, map[string]float64{"a": 2, "c": 2, "d": 2}, counts{"a": 1}, counts{"c": 1}},
	} {
		shares := map[string]share{}
		for zone, wish := range c.wish {
			shares[zone] = share{wish: wish}
		}
		giving, receiving := balance(c.given, shares)
		if !maps.Equal(giving, c.giving) || !maps.Equal(receiving, c.receiving) {
			t.Errorf("%s: giving %v, receiving %v; want %v, %v", c.name, giving, receiving, c.giving, c.receiving)
		}
	}
}

func zoneHints(zone string) *discoveryv1.EndpointHints {
	return &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
}

// hintedWork has one ready endpoint for each letter, in the zone of that letter
// and hinted to it, and one that is not ready for each dot.
func hintedWork(zones string) *work {
	w := &work{}
	for _, z := range zones {
		e := discoveryv1.Endpoint{Conditions: discoveryv1.EndpointConditions{Ready: ptr(z != '.')}}
		if z != '.' {
			e.Zone, e.Hints = ptr(string(z)), zoneHints(string(z))
		}
		w.endpoints = append(w.endpoints, e)
	}
	return w
}

func (w *work) hintText() string {
	text := ""
	for _, e := range w.endpoints {
		if e.Hints == nil {
			text += "."
		} else {
			text += e.Hints.ForZones[0].Name
		}
	}
	return text
}

func TestMoveHints(t *testing.T) {
	for _, c := range []struct {
		zones, want string
		wish        map[string]float64
		given       map[string]int
	}{
		{".aaaa.aabb", ".bbaa.aabb", map[string]float64{"a": 4, "b": 4}, map[string]int{"a": 4, "b": 4}},
		{"aaaaaabc", "bbccaabc", map[string]float64{"a": 2, "b": 3, "c": 3}, map[string]int{"a": 2, "b": 3, "c": 3}},
		{"aaabbbcc", "caacbbcc", map[string]float64{"a": 2, "b": 2, "c": 4}, map[string]int{"a": 2, "b": 2, "c": 4}},
		{"aabb", "aabb", map[string]float64{"a": 2, "b": 2}, map[string]int{"a": 2, "b": 2}},
	} {
		w, given, shares := hintedWork(c.zones), map[string]int{}, map[string]share{}
		for _, z := range c.zones {
			if z != '.' {
				given[string(z)]++
			}
		}
		for zone, wish := range c.wish {
			shares[zone] = share{wish: wish}
		}
		move([]*work{w}, given, shares)
		if got := w.hintText(); got != c.want || !maps.Equal(given, c.given) {
			t.Errorf("%s: hints %s, given %v; want %s, %v", c.zones, got, given, c.want, c.given)
		}
	}
}

func TestHintsFit(t *testing.T) {
	shares := map[string]share{"a": {max: 3}, "b": {max: 3}}
	for _, c := range []struct {
		name, zones string
		given, want map[string]int // want: nil if they do not fit
	}{
		{"with room", "ab.", map[string]int{}, map[string]int{"a": 1, "b": 1}},
		{"up to the most", "aa", map[string]int{"a": 1}, map[string]int{"a": 3}},
		{"beyond", "aa", map[string]int{"a": 2}, nil},
		{"a zone without a share", "c", map[string]int{}, nil},
	} {
		given := maps.Clone(c.given)
		fit := hintedWork(c.zones).hintsFit(given, shares)
		if want := c.want; fit != (want != nil) || fit && !maps.Equal(given, want) || !fit && !maps.Equal(given, c.given) {
			t.Errorf("%s: %v, given %v; want %v", c.name, fit, given, want)
		}
	}
	for _, hints := range []*discoveryv1.EndpointHints{nil, {}} {
		w := hintedWork("ab")
		w.endpoints[1].Hints = hints
		if w.hintsFit(map[string]int{}, shares) {
			t.Errorf("hints %v are taken for some", hints)
		}
	}
}

// Objects of the API are not written to, and slices without endpoints are none.
func TestOwnEndpoints(t *testing.T) {
	old := &discoveryv1.EndpointSlice{Endpoints: hintedWork("ab").endpoints}
	w := &work{old: old, endpoints: old.Endpoints}
	w.stripHints()
	if w.hintText() != ".." || old.Endpoints[0].Hints == nil || old.Endpoints[1].Hints == nil {
		t.Errorf("hints %s, those of the object %v", w.hintText(), old.Endpoints)
	}
	mine := &w.endpoints[0]
	if w.own(); &w.endpoints[0] != mine {
		t.Error("endpoints that are not shared are copied")
	}
	for _, w := range []*work{{old: old}, {old: &discoveryv1.EndpointSlice{}, endpoints: endpointsIn(1)}, {}} {
		n := len(w.endpoints)
		if w.own(); len(w.endpoints) != n {
			t.Errorf("%d endpoints, want %d", len(w.endpoints), n)
		}
	}
}

func TestTopologyHintsAreCounted(t *testing.T) {
	w := manyPods(8)
	w.nodes["n1"] = testNode("n1", "z1")
	for _, name := range []string{"p4", "p5", "p6", "p7"} {
		w.pods[name].Spec.NodeName = "n1"
	}
	w.service.Annotations = map[string]string{corev1.AnnotationTopologyMode: "Auto"}
	in := w.input(0)
	in.Topology = topologyOf(map[string]int{"z0": 1, "z1": 1})
	if got := Slices(in).Hints[discoveryv1.AddressTypeIPv4]; !maps.Equal(got, map[string]int{"z0": 4, "z1": 4}) {
		t.Errorf("hints by zone %v, want 4 and 4", got)
	}
}
