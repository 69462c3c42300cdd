package zone

import (
	"net/netip"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// namespace has the reasons for which the names prod.svc and prod.pod exist.
type namespace struct {
	declared bool // by SetNamespace
	services int
}

// SetNamespace adds a namespace: its name below svc and pod exists even
// while it has no Services.
func (z *Zone) SetNamespace(name string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.changeNamespace(name, func(n *namespace) { n.declared = true })
}

// DeleteNamespace undoes SetNamespace.
func (z *Zone) DeleteNamespace(name string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.namespaces[name] != nil {
		z.changeNamespace(name, func(n *namespace) { n.declared = false })
	}
}

// Namespaces returns the names given to SetNamespace, in no order.
func (z *Zone) Namespaces() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	var out []string
	for name, n := range z.namespaces {
		if n.declared {
			out = append(out, name)
		}
	}
	return out
}

func (z *Zone) addToNamespace(name string, by int) {
	z.changeNamespace(name, func(n *namespace) { n.services += by })
}

func (z *Zone) changeNamespace(name string, change func(*namespace)) {
	n := z.namespaces[name]
	if n == nil {
		n = &namespace{}
		z.namespaces[name] = n
	}
	had := n.declared || n.services > 0
	change(n)
	has := n.declared || n.services > 0
	if !has {
		delete(z.namespaces, name)
	}
	if had == has {
		return
	}
	parents := []string{"svc", "pod"}
	if z.pods == PodsDisabled {
		parents = parents[:1]
	}
	for _, parent := range parents {
		w, ok1 := appendLabel(nil, name)
		w, ok2 := appendLabel(w, parent)
		switch {
		case !ok1 || !ok2:
		case has:
			z.names.set(string(w), &records{})
		default:
			z.names.remove(string(w))
		}
	}
	z.serial.Add(1)
}

// podIndex knows which addresses the pods of a namespace have. It is used
// with PodsVerified only.
type podIndex struct {
	mu    sync.RWMutex
	pods  map[svc.Name][]netip.Addr
	count map[podKey]int
	// spaces is the namespaces of the pods with an address, more than one where pods
	// share the address of a node.
	spaces map[netip.Addr]map[string]struct{}
}

type podKey struct {
	namespace string
	addr      netip.Addr
}

func (p *podIndex) has(namespace string, a netip.Addr) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.count[podKey{namespace, a}] > 0
}

func (p *podIndex) set(name svc.Name, addrs []netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods == nil {
		p.pods, p.count = map[svc.Name][]netip.Addr{}, map[podKey]int{}
		p.spaces = map[netip.Addr]map[string]struct{}{}
	}
	for _, a := range p.pods[name] {
		k := podKey{name.Namespace, a}
		if p.count[k]--; p.count[k] == 0 {
			delete(p.count, k)
			if delete(p.spaces[a], name.Namespace); len(p.spaces[a]) == 0 {
				delete(p.spaces, a)
			}
		}
	}
	for _, a := range addrs {
		p.count[podKey{name.Namespace, a}]++
		if p.spaces[a] == nil {
			p.spaces[a] = map[string]struct{}{}
		}
		p.spaces[a][name.Namespace] = struct{}{}
	}
	if p.pods[name] = addrs; len(addrs) == 0 {
		delete(p.pods, name)
	}
}

// SetPod enters a pod's addresses, which PodsVerified answers for. A pod that
// has come to its end has none.
func (z *Zone) SetPod(p *corev1.Pod) {
	var addrs []netip.Addr
	if p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
		for _, ip := range p.Status.PodIPs {
			if a, err := netip.ParseAddr(ip.IP); err == nil {
				addrs = append(addrs, a.Unmap())
			}
		}
		if a, err := netip.ParseAddr(p.Status.PodIP); err == nil && len(addrs) == 0 {
			addrs = append(addrs, a.Unmap())
		}
	}
	z.podIndex.set(svc.Name{Namespace: p.Namespace, Name: p.Name}, addrs)
}

// DeletePod takes a pod out; one that is not there is no error.
func (z *Zone) DeletePod(name svc.Name) { z.podIndex.set(name, nil) }

// Pods are the names of all pods that have an address, in no order.
func (z *Zone) Pods() []svc.Name {
	z.podIndex.mu.RLock()
	defer z.podIndex.mu.RUnlock()
	out := make([]svc.Name, 0, len(z.podIndex.pods))
	for n := range z.podIndex.pods {
		out = append(out, n)
	}
	return out
}

// PodNamespace returns the namespace of the pods with an address, false if there is none
// or more than one.
func (z *Zone) PodNamespace(a netip.Addr) (namespace string, ok bool) {
	p := &z.podIndex
	p.mu.RLock()
	defer p.mu.RUnlock()
	spaces := p.spaces[a]
	if len(spaces) != 1 {
		return "", false
	}
	for ns := range spaces {
		namespace = ns
	}
	return namespace, true
}
