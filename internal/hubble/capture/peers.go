package capture

import (
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Peers finds the Pods and nodes that addresses belong to, at this moment. It is safe for concurrent use.
type Peers struct {
	node string // this one

	mu     sync.RWMutex
	pods   map[types.UID]*knownPod
	byAddr map[netip.Addr]*knownPod
	byName map[svc.Name]*knownPod
	nodes  map[string][]netip.Addr
	slices map[svc.Name][]netip.AddrPort
	// hosts and endpoints have all nodes and slices that name an address, in the order in which they came. The last one counts.
	hosts     map[netip.Addr][]string
	endpoints map[netip.AddrPort][]endpoint
}

type knownPod struct {
	peer    *hubble.Peer
	name    svc.Name
	uid     types.UID
	created int64
	local   bool
	addrs   []netip.Addr
}

// endpoint is a Pod as a slice names it, without labels and workload.
type endpoint struct {
	slice, pod svc.Name
	local      bool
}

func (e endpoint) peer() *hubble.Peer {
	return &hubble.Peer{Namespace: e.pod.Namespace, Pod: e.pod.Name, Labels: hubble.NamespaceLabels(e.pod.Namespace), Partial: true}
}

// NewPeers returns the Peers of a node, without any.
func NewPeers(node string) *Peers {
	p := &Peers{node: node}
	p.forgetNodes()
	p.forgetPods()
	p.forgetSlices()
	return p
}

func (p *Peers) forgetNodes() {
	p.nodes, p.hosts = map[string][]netip.Addr{}, map[netip.Addr][]string{}
}

func (p *Peers) forgetPods() {
	p.pods, p.byAddr, p.byName = map[types.UID]*knownPod{}, map[netip.Addr]*knownPod{}, map[svc.Name]*knownPod{}
}

func (p *Peers) forgetSlices() {
	p.slices, p.endpoints = map[svc.Name][]netip.AddrPort{}, map[netip.AddrPort][]endpoint{}
}

// Of returns who is at an address. local reports whether that is on this node.
func (p *Peers) Of(at netip.AddrPort) (peer *hubble.Peer, local bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	host, isNode := last(p.hosts[at.Addr()])
	if pod := p.byAddr[at.Addr()]; pod != nil && !isNode {
		return pod.peer, pod.local
	}
	if e, ok := last(p.endpoints[at]); ok {
		if pod := p.byName[e.pod]; pod != nil {
			return pod.peer, pod.local
		}
		return e.peer(), e.local
	}
	switch {
	case isNode && host == p.node, at.Addr().IsLoopback():
		return hubble.Host, true
	case isNode:
		return hubble.RemoteNode, false
	}
	return hubble.World, false
}

func last[T any](all []T) (one T, ok bool) {
	if len(all) == 0 {
		return one, false
	}
	return all[len(all)-1], true
}

// drop removes from a list of m what is gone.
func drop[K comparable, T any](m map[K][]T, at K, gone func(T) bool) {
	if left := slices.DeleteFunc(m[at], gone); len(left) > 0 {
		m[at] = left
	} else {
		delete(m, at)
	}
}

// Pods returns a Sink for Pods.
func (p *Peers) Pods() reflector.Sink[*corev1.Pod] {
	return reflector.Sink[*corev1.Pod]{
		Replace: func(all []*corev1.Pod) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.forgetPods()
			for _, pod := range all {
				p.setPod(pod)
			}
		},
		Set: func(pod *corev1.Pod) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.setPod(pod)
		},
		Delete: func(pod *corev1.Pod) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.unsetPod(pod.UID)
		},
	}
}

// setPod takes in a Pod. Of two Pods with an address the younger one has it: the other one has ended.
func (p *Peers) setPod(pod *corev1.Pod) {
	p.unsetPod(pod.UID)
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return
	}
	k := &knownPod{
		peer: hubble.PeerOf(pod), name: svc.Name{Namespace: pod.Namespace, Name: pod.Name}, uid: pod.UID,
		created: pod.CreationTimestamp.UnixNano(), local: pod.Spec.NodeName == p.node,
	}
	if !pod.Spec.HostNetwork {
		for _, ip := range pod.Status.PodIPs {
			if a, err := netip.ParseAddr(ip.IP); err == nil {
				k.addrs = append(k.addrs, a)
			}
		}
	}
	p.pods[k.uid] = k
	if other := p.byName[k.name]; other == nil || other.created <= k.created {
		p.byName[k.name] = k
	}
	for _, a := range k.addrs {
		if other := p.byAddr[a]; other == nil || other.created <= k.created {
			p.byAddr[a] = k
		}
	}
}

func (p *Peers) unsetPod(uid types.UID) {
	k := p.pods[uid]
	if k == nil {
		return
	}
	delete(p.pods, uid)
	if p.byName[k.name] == k {
		delete(p.byName, k.name)
	}
	for _, a := range k.addrs {
		if p.byAddr[a] == k {
			delete(p.byAddr, a)
		}
	}
}

// Nodes returns a Sink for Nodes.
func (p *Peers) Nodes() reflector.Sink[*corev1.Node] {
	set := func(n *corev1.Node) {
		p.unsetNode(n.Name)
		add := func(a netip.Addr) {
			p.nodes[n.Name] = append(p.nodes[n.Name], a)
			p.hosts[a] = append(p.hosts[a], n.Name)
		}
		for _, at := range n.Status.Addresses {
			if a, err := netip.ParseAddr(at.Address); err == nil {
				add(a)
			}
		}
		// The first address of the Pods' range is the node's own, from which its connections to Pods come.
		for _, text := range n.Spec.PodCIDRs {
			if r, err := netip.ParsePrefix(text); err == nil {
				add(r.Masked().Addr().Next())
			}
		}
	}
	return reflector.Sink[*corev1.Node]{
		Replace: func(all []*corev1.Node) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.forgetNodes()
			for _, n := range all {
				set(n)
			}
		},
		Set: func(n *corev1.Node) {
			p.mu.Lock()
			defer p.mu.Unlock()
			set(n)
		},
		Delete: func(n *corev1.Node) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.unsetNode(n.Name)
		},
	}
}

func (p *Peers) unsetNode(name string) {
	for _, a := range p.nodes[name] {
		drop(p.hosts, a, func(host string) bool { return host == name })
	}
	delete(p.nodes, name)
}

// Slices returns a Sink that learns the Pods behind endpoints and passes all on to next.
func (p *Peers) Slices(next reflector.Sink[*discoveryv1.EndpointSlice]) reflector.Sink[*discoveryv1.EndpointSlice] {
	to := next
	to.Replace = func(all []*discoveryv1.EndpointSlice) {
		p.mu.Lock()
		p.forgetSlices()
		for _, s := range all {
			p.setSlice(s)
		}
		p.mu.Unlock()
		next.Replace(all)
	}
	to.Set = func(s *discoveryv1.EndpointSlice) {
		p.mu.Lock()
		p.setSlice(s)
		p.mu.Unlock()
		next.Set(s)
	}
	to.Delete = func(s *discoveryv1.EndpointSlice) {
		p.mu.Lock()
		p.unsetSlice(svc.Name{Namespace: s.Namespace, Name: s.Name})
		p.mu.Unlock()
		next.Delete(s)
	}
	return to
}

// setSlice takes in the endpoints of a slice that are Pods. A Pod has the namespace of the slice, and the slice is one of the
// controller: users who may write slices do not decide whose flows are shown as another namespace's.
func (p *Peers) setSlice(s *discoveryv1.EndpointSlice) {
	name := svc.Name{Namespace: s.Namespace, Name: s.Name}
	p.unsetSlice(name)
	if s.Labels[discoveryv1.LabelManagedBy] != svc.ManagedBySelector {
		return
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if e.TargetRef == nil || e.TargetRef.Kind != "Pod" || e.TargetRef.Name == "" {
			continue
		}
		pod := svc.Name{Namespace: s.Namespace, Name: e.TargetRef.Name}
		local := e.NodeName != nil && *e.NodeName == p.node
		for _, text := range e.Addresses {
			a, err := netip.ParseAddr(text)
			if err != nil {
				continue
			}
			for _, port := range s.Ports {
				if port.Port == nil {
					continue
				}
				at := netip.AddrPortFrom(a, uint16(*port.Port))
				p.slices[name] = append(p.slices[name], at)
				p.endpoints[at] = append(p.endpoints[at], endpoint{slice: name, pod: pod, local: local})
			}
		}
	}
}

func (p *Peers) unsetSlice(name svc.Name) {
	for _, at := range p.slices[name] {
		drop(p.endpoints, at, func(e endpoint) bool { return e.slice == name })
	}
	delete(p.slices, name)
}
