package prestop

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/runner/drain"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxAsking bounds the requests of one Pod at a time: a kubelet sends one for each container.
const maxAsking = 32

// state is what decides of a Pod.
type state struct {
	name    svc.Name
	uid     types.UID
	created time.Time
	// addrs are empty for a Pod in the machine's own network, and for one that has ended.
	addrs  []netip.Addr
	ending bool
	// grace is the grace period of the deletion, and until then the one of the Pod's specification.
	grace   time.Duration
	drained bool
}

func stateOf(p *corev1.Pod) state {
	s := state{name: svc.NameOf(p), uid: p.UID, created: p.CreationTimestamp.Time, drained: drain.Answer(&p.Status) != nil}
	s.ending = p.DeletionTimestamp != nil
	s.grace = corev1.DefaultTerminationGracePeriodSeconds * time.Second
	if g := cmp.Or(p.DeletionGracePeriodSeconds, p.Spec.TerminationGracePeriodSeconds); g != nil {
		s.grace = time.Duration(*g) * time.Second
	}
	if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return s
	}
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil && a.Unmap().IsGlobalUnicast() {
			s.addrs = append(s.addrs, a.Unmap())
		}
	}
	return s
}

// pod is a Pod of this node.
type pod struct {
	state
	// done is closed once no node sends the Pod new connections, or it is gone.
	done   chan struct{}
	closed bool
	asking int
}

func (p *pod) close() {
	if !p.closed {
		p.closed = true
		close(p.done)
	}
}

// pods are the Pods of this node. They are safe for concurrent use.
type pods struct {
	mu     sync.Mutex
	byName map[svc.Name]*pod
	byAddr map[netip.Addr]*pod
	// moved holds a token after byAddr has other addresses.
	moved loop.Signal
}

func newPods() *pods {
	return &pods{byName: map[svc.Name]*pod{}, byAddr: map[netip.Addr]*pod{}, moved: loop.NewSignal()}
}

func (s *pods) sink() reflector.Sink[*corev1.Pod] {
	return reflector.Sink[*corev1.Pod]{
		Replace: s.replace,
		Set:     func(p *corev1.Pod) { s.set(stateOf(p)) },
		Delete:  func(p *corev1.Pod) { s.delete(svc.NameOf(p)) },
	}
}

func (s *pods) replace(list []*corev1.Pod) {
	present := make(map[svc.Name]bool, len(list))
	for _, p := range list {
		present[svc.NameOf(p)] = true
		s.set(stateOf(p))
	}
	s.mu.Lock()
	var gone []svc.Name
	for name := range s.byName {
		if !present[name] {
			gone = append(gone, name)
		}
	}
	s.mu.Unlock()
	for _, name := range gone {
		s.delete(name)
	}
}

func (s *pods) set(now state) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.byName[now.name]
	if p != nil && p.uid != now.uid {
		p.close()
		p = nil
	}
	if p == nil {
		p = &pod{done: make(chan struct{})}
		s.byName[now.name] = p
	}
	moved := p.uid == "" || !slices.Equal(p.addrs, now.addrs)
	p.state = now
	if now.drained {
		p.close()
	}
	if moved {
		s.index()
	}
}

func (s *pods) delete(name svc.Name) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.byName[name]; p != nil {
		p.close()
		delete(s.byName, name)
		s.index()
	}
}

// index makes byAddr again: a node has some hundred Pods, and their addresses seldom change. The youngest of several Pods
// with an address has it: the others have ended, and the API does not tell so yet. It is called with mu held.
func (s *pods) index() {
	clear(s.byAddr)
	for _, p := range s.byName {
		for _, a := range p.addrs {
			if q := s.byAddr[a]; q == nil || q.created.Before(p.created) {
				s.byAddr[a] = p
			}
		}
	}
	s.moved.Set()
}

// addrs returns the addresses of the Pods.
func (s *pods) addrs() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]netip.Addr, 0, len(s.byAddr))
	for a := range s.byAddr {
		out = append(out, a)
	}
	return out
}

// has reports whether a Pod has an address.
func (s *pods) has(a netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byAddr[a] != nil
}

// enter begins a request of the Pod with an address, nil if there is none. ok is false for one too many; otherwise leave
// ends it.
func (s *pods) enter(a netip.Addr) (p *pod, now state, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p = s.byAddr[a]; p == nil {
		return nil, state{}, true
	}
	if p.asking >= maxAsking {
		return p, p.state, false
	}
	p.asking++
	return p, p.state, true
}

func (s *pods) leave(p *pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.asking--
}
