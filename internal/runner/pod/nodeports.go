package pod

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// nodePort is a port of the node that a Pod asks for; an ip of "" means all addresses.
type nodePort struct {
	protocol corev1.Protocol
	ip       string
	port     int32
}

func newNodePort(protocol, ip string, port int32) nodePort {
	if ip == "0.0.0.0" || ip == "::" {
		ip = ""
	}
	return nodePort{corev1.Protocol(cmp.Or(protocol, string(corev1.ProtocolTCP))), ip, port}
}

func (p nodePort) conflicts(o nodePort) bool {
	return p.port == o.port && p.protocol == o.protocol && (p.ip == o.ip || p.ip == "" || o.ip == "")
}

func (p nodePort) String() string {
	if p.ip == "" {
		return fmt.Sprintf("%s port %d of the node", p.protocol, p.port)
	}
	return fmt.Sprintf("%s port %s of the node", p.protocol, net.JoinHostPort(p.ip, strconv.Itoa(int(p.port))))
}

// nodePortsOf returns the ports that a Pod holds while it runs: those of its containers and of init containers that go on
// running beside them, also in the machine's network.
func nodePortsOf(pod *corev1.Pod) (out []nodePort) {
	add := func(c *corev1.Container) {
		for _, p := range c.Ports {
			if p.HostPort > 0 {
				out = append(out, newNodePort(string(p.Protocol), p.HostIP, p.HostPort))
			}
		}
	}
	for i := range pod.Spec.InitContainers {
		if c := &pod.Spec.InitContainers[i]; podspec.IsSidecar(c) {
			add(c)
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i])
	}
	return out
}

// nodePorts are the ports of the node that its Pods hold, which two Pods cannot share. Its methods are safe for
// concurrent use.
type nodePorts struct {
	mu   sync.Mutex
	held map[types.UID]heldPorts
}

type heldPorts struct {
	pod   string
	ports []nodePort
}

// admit has a Pod hold its ports, and returns "", or which of them another Pod has. A Pod that runs already holds them in
// any case.
func (n *nodePorts) admit(pod *corev1.Pod, uid types.UID, runs bool) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	ports := nodePortsOf(pod)
	for other, held := range n.held {
		if other == uid || runs {
			continue
		}
		for _, has := range held.ports {
			for _, want := range ports {
				if want.conflicts(has) {
					return fmt.Sprintf("Pod %s has %s", held.pod, has)
				}
			}
		}
	}
	n.hold(uid, pod.Namespace+"/"+pod.Name, ports)
	return ""
}

// adopt has a Pod of an earlier run hold its ports until its object is known.
func (n *nodePorts) adopt(rec record) {
	var ports []nodePort
	for _, p := range rec.HostPorts {
		ports = append(ports, newNodePort(p.Protocol.String(), p.HostIP, int32(p.Port)))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hold(rec.UID, svc.Name{Namespace: rec.Namespace, Name: rec.Name}.String(), ports)
}

// hold is called with mu held.
func (n *nodePorts) hold(uid types.UID, pod string, ports []nodePort) {
	if len(ports) == 0 {
		delete(n.held, uid)
		return
	}
	n.held[uid] = heldPorts{pod, ports}
}

// release gives the ports of a Pod free.
func (n *nodePorts) release(uid types.UID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.held, uid)
}
