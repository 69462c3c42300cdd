package sched

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// hostPort is a port of a node that a Pod asks for; an ip of "" means all addresses.
type hostPort struct {
	ip       string
	protocol corev1.Protocol
	port     int32
}

// hostPorts are the ports that a Pod holds on its node while it runs: the ports of
// its containers, and of init containers that go on running beside them.
func hostPorts(pod *corev1.Pod) (out []hostPort) {
	add := func(c *corev1.Container) {
		for _, p := range c.Ports {
			if p.HostPort <= 0 {
				continue
			}
			h := hostPort{p.HostIP, p.Protocol, p.HostPort}
			if h.protocol == "" {
				h.protocol = corev1.ProtocolTCP
			}
			if h.ip == "0.0.0.0" || h.ip == "::" {
				h.ip = ""
			}
			out = append(out, h)
		}
	}
	for i := range pod.Spec.InitContainers {
		if c := &pod.Spec.InitContainers[i]; c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add(c)
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i])
	}
	return out
}

func (h hostPort) conflicts(o hostPort) bool {
	return h.port == o.port && h.protocol == o.protocol && (h.ip == o.ip || h.ip == "" || o.ip == "")
}

// heldPorts are the ports that Pods hold, by node and Pod; Pods without any are left out.
type heldPorts map[string]map[svc.Name][]hostPort

// free reports whether a Pod can have ports on a node.
func (h heldPorts) free(node string, ports []hostPort) bool {
	for _, want := range ports {
		for _, held := range h[node] {
			for _, p := range held {
				if p.conflicts(want) {
					return false
				}
			}
		}
	}
	return true
}

func (h heldPorts) take(node string, pod svc.Name, ports []hostPort) {
	if len(ports) == 0 {
		return
	}
	if h[node] == nil {
		h[node] = map[svc.Name][]hostPort{}
	}
	h[node][pod] = ports
}

// release reports whether the Pod held any.
func (h heldPorts) release(node string, pod svc.Name) bool {
	if _, ok := h[node][pod]; !ok {
		return false
	}
	if delete(h[node], pod); len(h[node]) == 0 {
		delete(h, node)
	}
	return true
}
