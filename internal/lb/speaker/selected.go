package speaker

import (
	"maps"
	"reflect"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// onDemand is a kind that is followed once something needs it.
type onDemand struct {
	once   sync.Once
	needed chan struct{} // is closed then
}

func newOnDemand() onDemand { return onDemand{needed: make(chan struct{})} }

// need has a kind followed: it counts as not listed from now on. The caller holds mu.
func (k *Known) need(kind *onDemand) {
	kind.once.Do(func() {
		k.unlisted++
		close(kind.needed)
	})
}

// poolWay is how a pool's addresses are announced.
type poolWay struct {
	interfaces []string
	object     *v1.IPAddressPool // nil for an address of no pool
	// selects is nil if every node may announce the addresses, else nodes are the names of the selected ones, sorted. It is
	// replaced, never changed.
	selects labels.Selector
	nodes   []string
}

// takes reports whether the addresses are announced in a way, v1.AnnounceARP or v1.AnnounceBGP.
func (w *poolWay) takes(way string) bool { return w.object == nil || w.object.Spec.Takes(way) }

// peers returns the names of the peers that get routes to the addresses; all is true if every peer does.
func (w *poolWay) peers() (names []string, all bool) {
	if w.object == nil {
		return nil, true
	}
	return w.object.Spec.RoutesTo()
}

// setPool records how the addresses of a pool are announced. The caller holds mu.
func (k *Known) setPool(o *v1.IPAddressPool) {
	decisive := func(s v1.IPAddressPoolSpec) v1.IPAddressPoolSpec {
		return v1.IPAddressPoolSpec{Interfaces: s.Interfaces, Announce: s.Announce, NodeSelector: s.NodeSelector, BGP: s.BGP}
	}
	if old, had := k.pools[o.Name]; had && reflect.DeepEqual(decisive(old.object.Spec), decisive(o.Spec)) {
		return
	}
	w := poolWay{interfaces: o.Spec.Interfaces, object: o}
	if o.Spec.NodeSelector != nil {
		selects, err := metav1.LabelSelectorAsSelector(o.Spec.NodeSelector)
		if err != nil { // nothing is known of who may
			selects = labels.Nothing()
		}
		w.selects = selects
		for _, name := range slices.Sorted(maps.Keys(k.labels)) {
			if selects.Matches(k.labels[name]) {
				w.nodes = append(w.nodes, name)
			}
		}
		k.need(&k.otherNodes)
	}
	k.pools[o.Name] = w
	k.all = true
}

// dropPool records that a pool is deleted. The caller holds mu.
func (k *Known) dropPool(n svc.Name) {
	delete(k.pools, n.Name)
	k.all = true
}

// setLabels records the labels of a Node, for the pools that select some. The caller holds mu.
func (k *Known) setLabels(o *corev1.Node) {
	if have, known := k.labels[o.Name]; known && labels.Equals(have, o.Labels) {
		return
	}
	k.labels[o.Name] = labels.Set(o.Labels)
	k.selectNode(o.Name, func(s labels.Selector) bool { return s.Matches(labels.Set(o.Labels)) })
}

// dropLabels records that a Node is deleted. The caller holds mu.
func (k *Known) dropLabels(n svc.Name) {
	delete(k.labels, n.Name)
	k.selectNode(n.Name, func(labels.Selector) bool { return false })
}

// selectNode records which pools select a node. The caller holds mu.
func (k *Known) selectNode(node string, selected func(labels.Selector) bool) {
	for name, w := range k.pools {
		if w.selects == nil {
			continue
		}
		i, was := slices.BinarySearch(w.nodes, node)
		is := selected(w.selects)
		if is == was {
			continue
		}
		nodes := slices.Clone(w.nodes)
		if is {
			w.nodes = slices.Insert(nodes, i, node)
		} else {
			w.nodes = slices.Delete(nodes, i, i+1)
		}
		k.pools[name] = w
		k.all = true
	}
}
