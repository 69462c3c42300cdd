package endpoints

import (
	"context"
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// topologyState keeps the CPU of the zones for Services with topology-aware
// hints, and has those replanned whose hints no longer fit when Nodes change.
type topologyState struct {
	nodes  corelisters.NodeLister
	replan func(svc.Name)
	wake   loop.Signal

	mu    sync.Mutex
	zones *epslice.Topology
	hints map[svc.Name]map[discoveryv1.AddressType]map[string]int
}

func newTopologyState(k *kit.Kit, replan func(svc.Name)) (*topologyState, error) {
	t := &topologyState{
		nodes: k.Informers.Core().V1().Nodes().Lister(), replan: replan, wake: loop.NewSignal(),
		zones: epslice.NewTopology(nil), hints: map[svc.Name]map[discoveryv1.AddressType]map[string]int{},
	}
	return t, k.Handle(k.Informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { t.wake.Set() },
		UpdateFunc: func(old, o any) {
			if a, b := old.(*corev1.Node), o.(*corev1.Node); !epslice.NewTopology([]*corev1.Node{a}).Same(epslice.NewTopology([]*corev1.Node{b})) ||
				!maps.Equal(a.Labels, b.Labels) {
				t.wake.Set()
			}
		},
		DeleteFunc: func(any) { t.wake.Set() },
	})
}

// run counts the zones after Nodes changed, until ctx ends.
func (t *topologyState) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.wake:
			t.count()
		}
	}
}

func (t *topologyState) count() {
	nodes, err := t.nodes.List(labels.Everything())
	if err != nil {
		return
	}
	zones := epslice.NewTopology(nodes)
	var overloaded []svc.Name
	t.mu.Lock()
	t.zones = zones
	for name, families := range t.hints {
		for _, hinted := range families {
			if zones.Overloaded(hinted) {
				overloaded = append(overloaded, name)
				break
			}
		}
	}
	t.mu.Unlock()
	for _, name := range overloaded {
		t.replan(name)
	}
}

func (t *topologyState) now() *epslice.Topology {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.zones
}

func (t *topologyState) hinted(name svc.Name) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.hints[name]
	return ok
}

// planned records the hints of the last plan of a Service.
func (t *topologyState) planned(name svc.Name, hints map[discoveryv1.AddressType]map[string]int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if hints == nil {
		delete(t.hints, name)
	} else {
		t.hints[name] = hints
	}
}
