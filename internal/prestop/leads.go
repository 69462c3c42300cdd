package prestop

import (
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// leads knows which Pods of this node are endpoints of Services that proxies serve. It is safe for concurrent use.
type leads struct {
	node string

	mu    sync.Mutex
	pods  map[svc.Name][]types.UID // by EndpointSlice
	count map[types.UID]int        // of slices
}

func newLeads(node string) *leads {
	return &leads{node: node, pods: map[svc.Name][]types.UID{}, count: map[types.UID]int{}}
}

// to reports whether a Service leads to a Pod.
func (l *leads) to(pod types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count[pod] > 0
}

// follow returns a Sink that passes slices on.
func (l *leads) follow(next reflector.Sink[*discoveryv1.EndpointSlice]) reflector.Sink[*discoveryv1.EndpointSlice] {
	out := next
	out.Replace = func(all []*discoveryv1.EndpointSlice) {
		l.mu.Lock()
		clear(l.pods)
		clear(l.count)
		for _, s := range all {
			l.set(s)
		}
		l.mu.Unlock()
		next.Replace(all)
	}
	out.Set = func(s *discoveryv1.EndpointSlice) {
		l.mu.Lock()
		l.set(s)
		l.mu.Unlock()
		next.Set(s)
	}
	out.Delete = func(s *discoveryv1.EndpointSlice) {
		l.mu.Lock()
		l.unset(svc.NameOf(s))
		l.mu.Unlock()
		next.Delete(s)
	}
	return out
}

// set is called with mu held.
func (l *leads) set(s *discoveryv1.EndpointSlice) {
	name := svc.NameOf(s)
	l.unset(name)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if e.NodeName == nil || *e.NodeName != l.node || e.TargetRef == nil || e.TargetRef.Kind != "Pod" {
			continue
		}
		l.pods[name] = append(l.pods[name], e.TargetRef.UID)
		l.count[e.TargetRef.UID]++
	}
}

// unset is called with mu held.
func (l *leads) unset(name svc.Name) {
	for _, uid := range l.pods[name] {
		if l.count[uid]--; l.count[uid] == 0 {
			delete(l.count, uid)
		}
	}
	delete(l.pods, name)
}
