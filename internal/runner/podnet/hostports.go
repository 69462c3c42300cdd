package podnet

import (
	"cmp"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// HostPorts are the host ports of the pods that have a network, for the proxy, which leads
// them there.
type HostPorts struct {
	changed func() // may be nil

	mu   sync.Mutex
	held map[types.UID]HeldPorts
}

// HeldPorts are the host ports of one Pod.
type HeldPorts struct {
	svc.HostPorts
	// Started decides between two Pods of one name: the younger one has the ports.
	Started time.Time
}

// NewHostPorts begins with the host ports of Pods of an earlier run, so that the proxy of this run does not remove
// them before the Pods are adopted. changed is called after each change; it may be nil.
func NewHostPorts(earlier map[types.UID]HeldPorts, changed func()) *HostPorts {
	h := &HostPorts{changed: changed, held: map[types.UID]HeldPorts{}}
	for uid, p := range earlier {
		if p.leads() {
			h.held[uid] = p
		}
	}
	return h
}

// leads reports whether there are ports and addresses to lead them to.
func (p HeldPorts) leads() bool { return len(p.Ports) > 0 && len(p.IPs) > 0 }

// Set takes over what a pod has now, nothing if it has no ports or no addresses.
func (h *HostPorts) Set(uid types.UID, now HeldPorts) {
	h.mu.Lock()
	before, was := h.held[uid]
	is := now.leads()
	if is {
		h.held[uid] = now
	} else {
		delete(h.held, uid)
	}
	h.mu.Unlock()
	if h.changed != nil && (was != is || is && !reflect.DeepEqual(before.HostPorts, now.HostPorts)) {
		h.changed()
	}
}

// All returns, in no order, one entry for each name: that of the pod that started last, where one whose object
// was deleted by force still ends.
func (h *HostPorts) All() (out []svc.HostPorts) {
	h.mu.Lock()
	defer h.mu.Unlock()
	newest := map[svc.Name]HeldPorts{}
	for _, p := range h.held {
		if o, ok := newest[p.Pod]; !ok || cmp.Or(p.Started.Compare(o.Started), strings.Compare(p.UID, o.UID)) > 0 {
			newest[p.Pod] = p
		}
	}
	for _, p := range newest {
		out = append(out, p.HostPorts)
	}
	return out
}

// HostPortsOf returns the host ports that lead to a pod: the ports of its containers and of init
// containers that go on running beside them; none in the machine's network, where its processes
// listen themselves.
func HostPortsOf(pod *corev1.Pod) (out []svc.HostPort) {
	if pod.Spec.HostNetwork {
		return nil
	}
	ended := func(c corev1.Container) bool { return !podspec.IsSidecar(&c) }
	beside := slices.DeleteFunc(slices.Clone(pod.Spec.InitContainers), ended)
	for _, c := range slices.Concat(beside, pod.Spec.Containers) {
		for _, p := range c.Ports {
			proto, err := svc.ParseProtocol(string(p.Protocol))
			if err != nil || p.HostPort <= 0 || p.HostPort > 65535 || p.ContainerPort <= 0 || p.ContainerPort > 65535 {
				continue // the API has no such port
			}
			h := svc.HostPort{Protocol: proto, HostIP: p.HostIP, Port: uint16(p.HostPort), To: uint16(p.ContainerPort)}
			if !slices.Contains(out, h) {
				out = append(out, h)
			}
		}
	}
	return out
}
